"""What is refused by name is wrong in mlx-lm itself, so that no layout could make it right."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_cb.model.cache_tree import leaves
from tests.families.build import build
from tests.families.configs import VOCAB_SIZE


def test_olmo_cannot_run_two_tokens() -> None:
    model = build("olmo")
    with pytest.raises(ValueError, match=r"(?i)add|str|array"):
        mx.eval(model(mx.array([[1, 2]]), cache=make_prompt_cache(model)))


def test_a_token_of_phi3small_sees_the_tokens_behind_it() -> None:
    model = build("phi3small")
    # It bans ids that a tiny vocabulary has not, and writes behind its logits.
    model._dummy_tokenizer_ids = mx.array([VOCAB_SIZE - 1])
    first, second = (
        np.array(model(mx.array([[1, 2, 3, last]]), cache=make_prompt_cache(model)))[0, :3, :200]
        for last in (4, 99)
    )
    assert np.abs(first - second).max() > 1e-3


def test_plamo3_gives_a_text_and_its_chunks_different_logits() -> None:
    model = build("plamo3")
    text = mx.array([[n % 97 for n in range(60)]])
    whole = np.array(model(text, cache=make_prompt_cache(model)))[0, -1]
    caches = make_prompt_cache(model)
    for start in range(60):
        by_token = model(text[:, start : start + 1], cache=caches)
    assert np.abs(whole - np.array(by_token)[0, -1]).max() > 1e-3


def test_deepseek_v41_keeps_caches_of_its_own() -> None:
    kinds = {type(cache).__name__ for cache in leaves(make_prompt_cache(build("deepseek_v41")))}
    assert "LayerCache" in kinds


@pytest.mark.skipif(mx.metal.is_available(), reason="it runs where there is Metal")
def test_muse_spark_needs_metal() -> None:
    model = build("muse_spark")
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        mx.eval(model(mx.array([[1, 2]]), cache=make_prompt_cache(model)))
