"""Folders that hold less, or something else, than a model: C099, C100, C101, C103."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_cb.config import ModelConfig
from mlx_cb.errors import MlxCbError, ModelNotFound, UnsupportedModel
from mlx_cb.model import loader
from tests import tiny

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in three shards and their index."""
    made = tiny.save(tiny.llama_model(), tmp_path / "tiny")
    whole = mx.load(str(made / "model.safetensors"))
    assert isinstance(whole, dict)
    names = sorted(whole)
    (made / "model.safetensors").unlink()
    placed = {}
    for number in range(3):
        own = {name: whole[name] for name in names[number::3]}
        shard = f"model-0000{number + 1}-of-00003.safetensors"
        mx.save_safetensors(str(made / shard), own, metadata={"format": "mlx"})
        placed |= dict.fromkeys(own, shard)
    index = {"metadata": {}, "weight_map": placed}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    return made


def second(folder: Path) -> Path:
    return folder / "model-00002-of-00003.safetensors"


def refusal(folder: Path) -> MlxCbError:
    with pytest.raises((ModelNotFound, UnsupportedModel)) as caught:
        loader.load(ModelConfig(model=str(folder)))
    assert "\n" not in caught.value.message
    assert "Hint:" in caught.value.message
    assert caught.value.exit_code == 3
    return caught.value


def test_c099_a_model_in_shards_is_whole(folder: Path) -> None:
    assert loader.load(ModelConfig(model=str(folder))).num_parameters > 0


def _dangle(shard: Path) -> None:
    shard.unlink()
    shard.symlink_to("nowhere")


@pytest.mark.parametrize(
    "spoil",
    [
        Path.unlink,
        lambda shard: shard.rename(shard.with_name("other.safetensors")),
        lambda shard: shard.rename(shard.with_name(shard.name + ".incomplete")),
        _dangle,
        lambda shard: shard.write_text(POINTER),
    ],
    ids=["removed", "renamed", "incomplete", "dangling", "pointer"],
)
def test_c099_a_missing_shard_is_named(folder: Path, spoil: Callable[[Path], object]) -> None:
    spoil(second(folder))
    assert second(folder).name in refusal(folder).message


def test_c099_without_an_index_a_link_to_nowhere_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    _dangle(second(folder))
    assert second(folder).name in refusal(folder).message


@pytest.mark.parametrize("cut", [1, 1000, 0.5, 1.0])
def test_c100_a_shard_that_is_cut_off_is_told_with_its_sizes(folder: Path, cut: float) -> None:
    content = second(folder).read_bytes()
    left = len(content) - (cut if isinstance(cut, int) else int(len(content) * cut))
    second(folder).write_bytes(content[:left])
    message = refusal(folder).message
    assert second(folder).name in message
    assert f"{left} bytes" in message
    if left > 5000:  # its header is there, and says how long it should be
        assert f"of {len(content)}" in message


@pytest.mark.parametrize("header", [b"\xff" * 8, b"\x05" + b"\0" * 7 + b"{{{{{", b"\0" * 8])
def test_c100_a_header_that_is_none(folder: Path, header: bytes) -> None:
    content = second(folder).read_bytes()
    second(folder).write_bytes(header + content[len(header) :])
    assert second(folder).name in refusal(folder).message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "no model_type"),
        ("{}", "no model_type"),
        ('{"model_type": 3}', "no model_type"),
        ('{"model_type": "no_such_family"}', "no_such_family not supported"),
        ('{"model_type": "clip"}', "clip not supported"),
        (None, "no config.json"),
    ],
)
def test_c101_a_config_that_is_none_is_told_in_words(
    folder: Path, config: str | None, words: str
) -> None:
    if config is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(config)
    message = refusal(folder).message
    assert words in message
    assert str(folder) in message


@pytest.mark.parametrize("model", ["no-such-model", "./missing/dir", "", "/etc/hostname"])
def test_c103_a_typo_is_a_line_or_two(tmp_path: Path, model: str) -> None:
    """And a path that looks local never goes to a hub: offline is not what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "mlx_cb", "serve", model, "--port", "0"],
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode in (2, 3)
    assert done.stderr.count("\n") <= 4
    assert "Traceback" not in done.stderr
    assert "hub cannot be reached" not in done.stderr
