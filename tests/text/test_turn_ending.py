"""The end of a turn is found in the template where no file says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_cb.config import EngineConfig, ModelConfig
from mlx_cb.engine.core import EngineCore
from mlx_cb.model.checkpoint import says_where_turns_end
from mlx_cb.text.tokenizer import Tokenizer
from mlx_cb.text.turn_ending import turn_endings
from tests import tiny
from tests.text.conftest import CHATML


def loop(ending: str) -> str:
    """A template that writes `ending` behind every message."""
    return "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + ending + "{% endfor %}"


def write(folder: Path, tokenizer: Tokenizer, template: str | None) -> Path:
    """A folder with nothing but a tokenizer that names no ending."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer.content)
    config = {"eos_token": None, "pad_token": "<|endoftext|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("template", "ending"),
    [
        (CHATML, "<|im_end|>"),
        (loop("{{ pad_token }}"), "<|endoftext|>"),
        (loop(" \n<|endoftext|><|im_end|>"), "<|endoftext|>"),
        (loop(""), None),
        (loop("</think>"), None),  # a marker of text, not a control token
        ("{{ raise_exception('only users') }}", None),
        ("{% for m in messages %}", None),
        (None, None),
    ],
)
def test_the_token_behind_an_answer(
    template: str | None, ending: str | None, byte_level: Tokenizer, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", byte_level, template)
    expected = set() if ending is None else {byte_level.token_id(ending)}
    assert turn_endings(folder) == expected


def test_a_model_stops_where_only_its_template_says(byte_level: Tokenizer, tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama_model(vocab_size=byte_level.vocab_size), tmp_path / "m")
    write(folder, byte_level, loop("<|endoftext|>"))
    assert not says_where_turns_end(folder)
    core = EngineCore.load(EngineConfig(model=ModelConfig(model=str(folder))))
    assert core.loaded.eos_token_ids == {byte_level.token_id("<|endoftext|>")}
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert says_where_turns_end(folder)
    core = EngineCore.load(EngineConfig(model=ModelConfig(model=str(folder))))
    assert core.loaded.eos_token_ids == {3}
