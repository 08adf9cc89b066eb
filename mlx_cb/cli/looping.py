"""Runs what measures: on the fast event loop, and ended in order whoever ends it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_measurement(work: Coroutine[Any, Any, _T]) -> _T:
    """Run on uvloop, where it exists."""
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    # As Ctrl-C, so that the servers that were started are ended too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
