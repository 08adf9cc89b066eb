"""README's table has a row for every file of mlx-lm and no silent case."""

from __future__ import annotations

import importlib

import pytest

from tests.families import table
from tests.families.configs import FAMILIES

MUST_BE_EQUAL = (
    "llama qwen2 qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_moe gemma gemma2 gemma3_text gemma3n "
    "gemma4_text gpt_oss mistral3 ministral3 mixtral phi3 phimoe glm4 glm4_moe glm4_moe_lite "
    "deepseek_v2 deepseek_v3 kimi_linear minimax olmo2 olmo3 granite granitemoehybrid nemotron_h "
    "lfm2 lfm2_moe jamba mamba2 smollm3 cohere2 exaone4 seed_oss hunyuan_v1_dense bailing_moe "
    "ernie4_5_moe falcon_h1"
)


def test_every_file_has_a_row() -> None:
    rows = table.recorded_rows()
    assert sorted(rows) == table.model_files()
    for name, row in rows.items():
        cells = row.strip("| ").split(" | ")
        assert len(cells) == 5
        assert cells[2] == "equal" or cells[2].startswith(("refused: ", "no model"))
        assert (cells[2] == "equal") == (cells[1] != "–")
        assert (cells[2] == "no model: shared code") == (name not in FAMILIES)


@pytest.mark.parametrize("name", sorted(set(table.model_files()) - FAMILIES.keys()))
def test_files_without_a_row_of_their_own_hold_no_model(name: str) -> None:
    if name != "__init__":
        assert not hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "ModelArgs")


def test_enough_are_equal() -> None:
    rows = table.recorded_rows()
    found = table.counts(rows)
    assert found["PACKED"] + found["GROUPED"] + found["SERIAL"] >= 110
    assert [name for name in MUST_BE_EQUAL.split() if " equal " not in rows[name]] == []
