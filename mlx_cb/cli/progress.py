"""Progress bars of commands that take long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WIDTH = 140  # characters, in a file or a pipe


def wide_console() -> Console:
    """A console whose tables show whole names where no terminal says how wide it is."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def progress(console: Console) -> Progress:
    """A bar per line of work, on this console."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def announcer(bar: Progress) -> Callable[[str, int, int], None]:
    """A line that names what is being done; hears of each run before it begins."""
    line = bar.add_task("starting", total=None)
    began = time.monotonic()

    def announce(name: str, number: int, total: int) -> None:
        bar.update(line, description=name, completed=number - 1, total=total)
        if not bar.console.is_terminal:  # a bar shows nothing in a file or a pipe
            minutes = (time.monotonic() - began) / 60
            bar.console.print(f"{number} of {total}: {name} (after {minutes:.1f} min)")

    return announce
