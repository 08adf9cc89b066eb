"""`--shared-prompt`: files become token ids, and users of a real model share what is in them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.config import CacheConfig, EngineConfig, ModelConfig
from mlx_cb.core.shared_prompts import SharedPrompts
from mlx_cb.engine.core import EngineCore
from mlx_cb.engine.marked_prompts import read_marked_prompts
from mlx_cb.errors import InvalidRequest
from mlx_cb.model.resolve import resolve
from mlx_cb.text.chat_template import ChatInput
from mlx_cb.text.model_text import ModelText
from tests import tiny
from tests.families.build import build
from tests.families.scenario import engine as family_engine

RULES = "You answer for the town library. " + "Be brief, name the shelf, and never guess. " * 12


@functools.cache
def demo() -> Path:
    return resolve(ModelConfig("demo"))


def chat(*messages: tuple[str, str]) -> list[int]:
    asked = [{"role": role, "content": content} for role, content in messages]
    return ModelText.load(demo()).encode_chat(ChatInput(asked)).ids


def test_a_text_file_is_a_system_message(tmp_path: Path) -> None:
    (tmp_path / "rules.md").write_text(RULES + "\n")
    (ids,) = read_marked_prompts([str(tmp_path / "rules.md")], demo())
    for question in ("Where is Melville?", "7 books, please", "Ünder"):
        assert chat(("system", RULES), ("user", question))[: len(ids)] == ids
    text = ModelText.load(demo()).tokenizer.decode(ids, skip_special_tokens=False)
    assert RULES in text


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [{"role": "system", "content": RULES}, {"role": "user", "content": "Hello"}]},
        {"prompt": RULES},
    ],
    ids=["chat", "completion"],
)
def test_a_json_file_is_what_a_client_sends(tmp_path: Path, asked: dict[str, Any]) -> None:
    path = tmp_path / "asked.json"
    path.write_text(json.dumps(asked))
    (ids,) = read_marked_prompts([str(path)], demo())
    if "prompt" in asked:
        assert ids == ModelText.load(demo()).tokenizer.encode(RULES)
    else:
        whole = chat(("system", RULES), ("user", "Hello"), ("assistant", "Hi."), ("user", "So?"))
        assert whole[: len(ids)] == ids
        assert len(ids) > len(chat(("system", RULES)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "--shared-prompt .*a.json: Expecting"),
        ("a.json", "[1]", "must hold an object"),
        ("a.json", '{"messages": [{"role": "user", "content": 5}]}', "a text as content"),
        ("a.json", "{}", "must hold a prompt, or messages"),
        ("a.txt", "\xff", "codec can't decode"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=message):
        read_marked_prompts([str(tmp_path / name)], demo())
    with pytest.raises(InvalidRequest, match=r"--shared-prompt .*gone"):
        read_marked_prompts([str(tmp_path / "gone")], demo())


def test_the_engine_shares_the_system_prompt_of_a_chat(tmp_path: Path) -> None:
    (tmp_path / "rules.txt").write_text(RULES)
    files = (str(tmp_path / "rules.txt"),)
    core = EngineCore.load(EngineConfig(cache=CacheConfig(kv_memory=2**27, shared_prompts=files)))
    (length,) = core.status()["shared_prompts"]
    found = []
    for user in ("ann", "bob"):
        core.add(user, chat(("system", RULES), ("user", "Where is it?")), tiny.greedy(3), user)
        found.append(tiny.run(core).outputs[user][-1].num_cached_tokens)
    assert found == [0, length // 16 * 16]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "recurrent_gemma", "qwen3_next"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_whatever_layers_keep_the_shared_part_is_computed_once(name: str, pipelined: bool) -> None:
    """Three users, tokens as alone; the third finds what the first two have left."""
    built = build(name)
    core = family_engine(built, name, num_blocks=200, pipelined=pipelined)
    block_size = core.config.cache.block_size
    marked = [5 * n % 199 for n in range(4 * block_size + 3)]
    core.shared_prompts = SharedPrompts([marked], block_size)
    for number, user in enumerate(("ann", "bob", "carl")):
        prompt = [*marked, *(50 + number + n for n in range(5))]
        core.add(user, prompt, tiny.greedy(6), user)
        collected = tiny.run(core)
        wanted = tiny.solo(built, prompt, 6)
        tiny.same_tokens(built, prompt, collected.token_ids[user], wanted)
        cached = collected.outputs[user][-1].num_cached_tokens
        assert cached == (4 * block_size if number else 0), user
    assert core.counters.failed_steps == 0
