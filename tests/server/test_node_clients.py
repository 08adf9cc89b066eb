"""Released clients for Node, each through its whole round: `tests/server/node/*.mjs`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.npm import clients_folder

Serve = Callable[..., Any]
PROGRAMS = sorted((Path(__file__).parent / "node").glob("*.mjs"))
REPLIES = (
    {"match": "<tools>", "turn": 0, "reasoning": "hm", "text": "So.",
     "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
    {"turn": 1, "text": "It is 5."},
    {"match": "busy", "refuse": 429},
    {"match": "endless", "tokens": ["x "], "repeat": True, "delay_s": 0.01},
    {"text": "Hello there."},
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_node_client(serve: Serve, program: Path) -> None:
    server = serve(*REPLIES)
    folder = clients_folder()
    # node looks for packages from where the program stands
    copied = folder / program.name
    shutil.copy(program, copied)
    done = subprocess.run(
        ["node", str(copied), server.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("ok")
    server.wait_until_idle()  # the cancelled answer is closed, not played to its end
    assert any(p.finish_reason == "abort" for p in server.engine.played.values())
