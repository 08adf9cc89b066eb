"""Lines for people, also where nobody reads them: a service's pipe may have no other end."""

from __future__ import annotations

import os
import sys


def show(text: str) -> None:
    """Print what somebody may want to pipe, on standard output."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter would try once more at its end, and fail; Python's manual advises this.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Tell what is going on, on standard error."""
    try:
        print(f"mlx-cb: {text}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
