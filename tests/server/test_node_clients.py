"""Released clients for Node, each through its whole round: `tests/server/node/*.mjs`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.npm import clients_folder
from tests.server.script import EMBEDDING_SCRIPT, REPLIES, assert_all_was_done

Serve = Callable[..., Any]
PROGRAMS = sorted((Path(__file__).parent / "node").glob("*.mjs"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_node_client(serve: Serve, program: Path) -> None:
    server, embedding = serve(*REPLIES), serve(script=EMBEDDING_SCRIPT)
    folder = clients_folder()
    # node looks for packages from where the program stands
    copied = folder / program.name
    shutil.copy(program, copied)
    done = subprocess.run(
        ["node", str(copied), server.url, embedding.url],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("ok")
    assert_all_was_done(server)
