"""The demo model's own tokenizer and template, against transformers: C019, C021, C087, C119."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.config import ModelConfig
from mlx_cb.model.resolve import resolve
from mlx_cb.text.chat_template import ChatInput
from mlx_cb.text.detokenizer import new_detokenizer
from mlx_cb.text.model_text import ModelText
from tests.text.test_detokenizer import MIXED


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve(ModelConfig("demo"))


@pytest.fixture(scope="module")
def demo(folder: Path) -> ModelText:
    return ModelText.load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "be"}, {"role": "user", "content": MIXED}],
    [
        {"role": "user", "content": "  a \n"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "def f():\n\treturn 1"},
    ],
]


@pytest.mark.parametrize("messages", CHATS)
def test_prompts_are_those_of_transformers(
    demo: ModelText, reference: Any, messages: list[dict[str, str]]
) -> None:
    prompt = demo.encode_chat(ChatInput(messages))
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert prompt.ids == list(expected)


def test_c119_no_begin_of_sequence_token_twice(demo: ModelText) -> None:
    prompt = demo.encode_chat(ChatInput(CHATS[0]))
    assert prompt.ids[0] != prompt.ids[1]
    assert prompt.ids[0] == demo.tokenizer.token_id("<|im_start|>")


def stream(demo: ModelText, ids: list[int]) -> list[str]:
    detokenizer = new_detokenizer(demo.tokenizer)
    return [detokenizer.feed([i]) for i in ids] + [detokenizer.finish()]


def test_c019_streams_of_the_real_tokenizer(demo: ModelText) -> None:
    ids = demo.tokenizer.encode(MIXED)
    pieces = stream(demo, ids)
    assert "".join(pieces) == MIXED
    assert not any("\ufffd" in piece for piece in pieces)


def test_c021_random_streams_equal_decode(demo: ModelText, reference: Any) -> None:
    rng = random.Random(21)
    for _ in range(2000):
        ids = [rng.randrange(demo.tokenizer.vocab_size) for _ in range(rng.randrange(1, 12))]
        text = "".join(stream(demo, ids))
        assert text == demo.tokenizer.decode(ids)
        assert text == reference.decode(ids, skip_special_tokens=True)


def test_c087_the_next_turn_begins_with_this_one(demo: ModelText) -> None:
    """A generated answer, replayed as history, is the same tokens that were generated."""
    first = demo.encode_chat(ChatInput(CHATS[0]))
    answer = demo.tokenizer.encode("Hello! How can I help you?", add_special_tokens=False)
    text = "".join(stream(demo, answer))
    history = [*CHATS[0], {"role": "assistant", "content": text}, *CHATS[0]]
    second = demo.encode_chat(ChatInput(history))
    assert second.ids[: len(first.ids) + len(answer)] == first.ids + answer


@pytest.mark.parametrize("name", ["chatml with tools", "thinking"])
def test_templates_render_as_in_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    from mlx_cb.engine.scripted_model import CHAT_TEMPLATE
    from mlx_cb.text.template_engine import CompiledTemplate

    thinking = (
        "{%- for m in messages %}{%- set c = m.content.split('</think>')[-1].lstrip('\\n') %}"
        "{{ m.role }}: {{ c | trim }} {{ loop.index0 % 2 }}\n"
        "{%- if loop.last and enable_thinking is defined %}{{ enable_thinking | tojson }}"
        "{%- endif %}{%- endfor %}{{ '<think>' if add_generation_prompt }}"
    )
    source = CHAT_TEMPLATE if name == "chatml with tools" else thinking
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": "<&>"}}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "<think>y</think>\n\nz", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    extra = {"tools": tools, "enable_thinking": True, "add_generation_prompt": True}
    expected, _ = render_jinja_template([messages], chat_template=source, **extra)
    assert CompiledTemplate(source).render({"messages": messages, **extra}) == expected[0]
