"""SIGKILL at random moments of SSD writes: never a wrong token afterwards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_cb.ssd.block_file import BlockKind
from mlx_cb.ssd.folder import BlockFolder, FolderLimits
from tests import tiny
from tests.engine.ssd_victim import OUTPUT, prompts


def kill_and_go_on(folder: Path, kills: int) -> None:
    model = tiny.llama_model()
    answers = [tiny.solo(model, prompt, OUTPUT) for prompt in prompts()]
    (folder / "answers.json").write_text(json.dumps(answers))
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.ssd_victim", str(folder), str(kills), "1"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    said = re.search(r"(\d+) kills, (\d+) blocks restored", done.stdout)
    assert said is not None, done.stdout
    assert int(said[1]) == kills
    assert int(said[2]) > 0, "nothing came back: the kills met no files"
    assert "is not used" not in done.stderr, "a half-written file got its final name"
    _check_folder(folder / "ssd")


def _check_folder(ssd: Path) -> None:
    """Every file with a final name is whole."""
    files = list(ssd.rglob("*.kv"))
    assert files
    (model_folder,) = {path.parent.parent for path in files}
    data = files[0].read_bytes()
    kind = BlockKind(data[20:52], len(data) - 84)
    folder = BlockFolder(ssd, kind, FolderLimits(10**9, 10**9))
    known = folder.open()
    assert model_folder.name == kind.identity.hex()[:16]
    assert len(known) == len(files)
    assert all(folder.read(content_hash) is not None for content_hash in known)


def test_two_kills(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, 2)


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, 50)
