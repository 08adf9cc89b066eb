"""A step journal for mlx_lm.server, which keeps none: what each step computed, and how long.

Wraps three methods of mlx-lm's `BatchGenerator` inside the peer's own process; what they do is not
changed. One JSON object per line: `started` (monotonic seconds), `seconds`, `passes` as
`[kind, sequences, new tokens each, tokens before]`, `copied` (tokens moved since the last step) and
`tokens` handed out.
"""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any


def record_steps(path: Path) -> None:
    """From now on every step of a BatchGenerator is written to the file."""
    generate = importlib.import_module("mlx_lm.generate")  # the package hides it by a function
    journal = _Journal(path)
    _wrap(generate.GenerationBatch, "_step", journal.decode)
    _wrap(generate.GenerationBatch, "filter", journal.move)
    _wrap(generate.GenerationBatch, "extend", journal.move)
    _wrap(generate.PromptProcessingBatch, "prompt", journal.prompt)
    inner = generate.BatchGenerator._next

    def timed(self: Any) -> Any:
        journal.passes = []
        started = time.monotonic()
        result = inner(self)
        journal.write(started, time.monotonic() - started, len(result[1]))
        return result

    generate.BatchGenerator._next = timed


class _Journal:
    """What the step that runs now has done so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(b"")
        self.passes: list[list[object]] = []
        self.copied = 0
        self.moved = 0

    def decode(self, batch: Any) -> None:
        """Before a pass over the last token of each sequence."""
        self.passes.append(["decode", len(batch.uids), 1, _length(batch)])
        self.copied, self.moved = self.copied + self.moved, 0

    def prompt(self, batch: Any, tokens: list[list[int]]) -> None:
        """Before a pass over the next part of each prompt."""
        if tokens:
            longest = max(len(part) for part in tokens)
            self.passes.append(["prompt", len(tokens), longest, _length(batch)])

    def move(self, batch: Any, *others: Any) -> None:
        """Before keys and values are copied to where sequences join or leave."""
        joining = others[0] if others and hasattr(others[0], "uids") else None
        count = len(batch.uids) + (len(joining.uids) if joining else 0)
        length = max(_length(batch), _length(joining) if joining else 0)
        self.moved += count * length

    def write(self, started: float, seconds: float, tokens: int) -> None:
        """After the step; what was moved since the last pass is paid for by the next one."""
        if self.passes:
            entry = {
                "started": started,
                "seconds": seconds,
                "passes": self.passes,
                "copied": self.copied,
                "tokens": tokens,
            }
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self.copied = 0


def _length(batch: Any) -> int:
    """Tokens per sequence in a batch's cache, padding included."""
    for cache in batch.prompt_cache:
        for name in ("_idx", "offset"):
            value = getattr(cache, name, None)
            if isinstance(value, int):
                return value
    return 0


def _wrap(owner: type, name: str, before: Any) -> None:
    inner = getattr(owner, name)

    def wrapped(self: Any, *arguments: Any) -> Any:
        before(self, *arguments)
        return inner(self, *arguments)

    setattr(owner, name, wrapped)
