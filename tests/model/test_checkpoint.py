"""Where turns end, how long texts may be, how the makers sample: from the small files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.model.checkpoint import eos_token_ids, generation_defaults, max_model_len
from mlx_cb.sampling_params import SamplingParams
from tests import tiny


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


ADDED = [
    {"id": 1, "content": "</s>"},
    {"id": 7, "content": "<|im_end|>"},
    {"id": 9, "content": "<|end|>"},
]


def test_endings_come_from_configs_tokenizer_and_template(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer={"added_tokens": ADDED},
        tokenizer_config={"eos_token": {"content": "</s>"}, "chat_template": "…<|im_end|>\n"},
    )
    assert eos_token_ids(tmp_path, {"eos_token_id": [3, 4]}) == {1, 3, 4, 7}
    assert eos_token_ids(tmp_path, {"text_config": {"eos_token_id": 5}}) == {1, 5, 7}
    (tmp_path / "chat_template.jinja").write_text("no marker")
    assert eos_token_ids(tmp_path, {}) == {1}


def test_the_makers_own_list_is_not_added_to_by_the_template(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer={"added_tokens": ADDED},
        tokenizer_config={"chat_template": "<|im_end|>"},
        generation_config={"eos_token_id": 3},
    )
    assert eos_token_ids(tmp_path, {}) == {3}


def test_parts_of_a_harmony_turn_do_not_end_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer={"added_tokens": ADDED},
        tokenizer_config={"chat_template": "<|end|> <|return|>"},
    )
    assert eos_token_ids(tmp_path, {"eos_token_id": 2}) == {2}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({}, 8192),
        (
            {"max_position_embeddings": 131072, "rope_scaling": {"type": "linear", "factor": 8}},
            131072,
        ),
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {
                        "rope_type": "yarn",
                        "factor": 8.0,
                        "original_max_position_embeddings": 8192,
                    },
                },
            },
            65536,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
    ],
)
def test_longest_text(config: dict[str, Any], longest: int) -> None:
    assert max_model_len(config, None) == longest
    assert max_model_len(config, 100) == 100


def test_generation_defaults(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}
    write(tmp_path, generation_config={"temperature": 0.6, "top_k": 20, "max_length": 9})
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    write(tmp_path, generation_config={"do_sample": False, "temperature": 0.6})
    assert generation_defaults(tmp_path) == {"temperature": 0.0}


def test_a_setting_out_of_range_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path, generation_config={"temperature": -3, "top_p": 0.9, "top_k": 1.5})
    assert generation_defaults(tmp_path) == {"top_p": 0.9}


def test_defaults_fill_in_what_a_client_left_out() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    nothing = SamplingParams.asked({"temperature": None}).with_defaults(defaults)
    assert (nothing.temperature, nothing.top_k, nothing.repetition_penalty) == (0.6, 20, 1.1)
    some = SamplingParams.asked({"top_k": 5, "temperature": 0.9}).with_defaults(defaults)
    assert (some.temperature, some.top_k, some.repetition_penalty) == (0.9, 5, 1.1)
    greedy = SamplingParams.asked({"temperature": 0.0}).with_defaults(defaults)
    assert greedy.is_plain_greedy
    said = SamplingParams(max_tokens=3).with_defaults(defaults)
    assert said == SamplingParams(max_tokens=3), "the Python API's own numbers stand"


def test_the_engine_follows_the_makers_unless_the_client_says_otherwise() -> None:
    core = tiny.engine(tiny.llama_model())
    core.loaded = replace(core.loaded, generation_defaults={"temperature": 0.0})
    assert core.add("left out", [1, 2], SamplingParams.asked({"max_tokens": 2})).is_plain_greedy
    asked = SamplingParams.asked({"max_tokens": 2, "temperature": 0.7})
    assert core.add("said", [1, 2], asked).params.temperature == 0.7
