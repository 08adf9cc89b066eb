"""A model's folder is data: nothing in it is ever run (C072)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.config import ModelConfig
from mlx_cb.errors import ModelNotFound, UnsupportedModel
from mlx_cb.model import loader
from mlx_cb.model.resolve import resolve
from mlx_cb.text.model_text import ModelText
from tests import tiny

EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").write_text("it ran")
class Model: pass
class ModelArgs: pass
class Tokenizer: pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that works, with a program beside it."""
    made = tiny.save(tiny.llama_model(), tmp_path / "tiny")
    (made / "evil.py").write_text(EVIL)
    return made


def change(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | values))


def test_c072_a_program_that_the_config_names_is_refused(folder: Path) -> None:
    change(folder / "config.json", model_file="evil.py")
    with pytest.raises((UnsupportedModel, ModelNotFound)) as caught:
        loader.load(ModelConfig(model=str(folder)))
    assert "\n" not in caught.value.message
    assert "evil.py" in caught.value.message
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "AutoConfig", "AutoTokenizer"])
def test_c072_a_map_to_programs_is_not_followed(folder: Path, name: str) -> None:
    classes: Any = "evil.Model" if name != "AutoTokenizer" else ["evil.Tokenizer", None]
    for file in ("config.json", "tokenizer_config.json"):
        change(folder / file, auto_map={name: classes})
    loader.load(ModelConfig(model=str(folder)))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("has_file", [True, False])
def test_c072_a_tokenizers_program_is_not_run(folder: Path, has_file: bool) -> None:
    """With a tokenizer.json its class is not needed; without one the model is refused."""
    source = resolve(ModelConfig())  # the demo model's own
    if has_file:
        (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="Tokenizer", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]},
    )  # fmt: skip
    if has_file:
        ModelText.load(folder)
    else:
        with pytest.raises((UnsupportedModel, ModelNotFound)):
            ModelText.load(folder)
    assert not (folder / "ran").exists()


def test_c072_there_is_no_switch_for_it() -> None:
    """What does not exist, no request can set."""
    from mlx_cb.cli.serve import command

    names = {parameter.name or "" for parameter in command.params}
    assert not [name for name in names if "trust" in name or "remote" in name]
    assert not [name for name in ModelConfig.__dataclass_fields__ if "trust" in name]
