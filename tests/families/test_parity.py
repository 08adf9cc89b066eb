"""Every family, one eventful run each: equal to mlx-lm's own answers, or refused by name."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.probe import probe
from mlx_cb.model.proof import prove
from tests.families.build import build
from tests.families.configs import FAMILIES
from tests.families.scenario import check_parity
from tests.families.table import REFUSED, recorded_rows, refused_row, row_of

#: What people run most; the others are slow together and go to `make test-all`.
POPULAR = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "mistral3",
    "glm4_moe",
    "deepseek_v3",
)
OTHERS = sorted(FAMILIES.keys() - set(POPULAR) - REFUSED)


def check(family: str) -> None:
    model = build(family)
    core = check_parity(model, family)
    assert prove(model, family, mx.float32).layout is core.cache_spec.layout
    assert recorded_rows()[family] == row_of(family, core.cache_spec), (
        "README's table is out of date: run scripts/supported_models.py"
    )


@pytest.mark.parametrize("family", POPULAR)
def test_popular_family(family: str) -> None:
    check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_family(family: str) -> None:
    check(family)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_refused_family(family: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        probe(build(family), family)
    assert family in caught.value.message
    assert recorded_rows()[family] == refused_row(family)
