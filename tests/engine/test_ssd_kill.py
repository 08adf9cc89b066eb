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


def kill_and_go_on(folder: Path, kills: int, num_servers: int = 1) -> None:
    model = tiny.llama_model()
    answers = [tiny.solo(model, prompt, OUTPUT) for prompt in prompts()]
    (folder / "answers.json").write_text(json.dumps(answers))
    victims = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.ssd_victim", str(folder), str(kills), str(seed)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(1, num_servers + 1)
    ]
    for victim in victims:
        said, errors = victim.communicate(timeout=800)
        assert victim.returncode == 0, errors
        found = re.search(r"(\d+) kills, (\d+) blocks restored", said)
        assert found is not None, said
        assert int(found[1]) == kills
        assert int(found[2]) > 0, "nothing came back: the kills met no files"
        assert "is not used" not in errors, "a half-written file got its final name"
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


@pytest.mark.slow
def test_two_servers_on_one_folder_are_killed_in_turn(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, 10, num_servers=2)
