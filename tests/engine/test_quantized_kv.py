"""`--kv-dtype int8|int4`: who shares the step changes nothing, and the unsupported is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cb.attention.kernel_cases import dequantized, quantize_reference
from mlx_cb.attention.stored_form import quantize_plainly, stored_form
from mlx_cb.bench.kv_quality import CODE, NEEDLE
from mlx_cb.config import CacheConfig, EngineConfig
from mlx_cb.engine.core import EngineCore
from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.cache_spec import layer_kinds
from mlx_cb.text.chat_template import ChatInput
from mlx_cb.text.model_text import ModelText
from tests import tiny
from tests.families.build import build
from tests.families.configs import config

NEAR_TIE = 0.02
"""Log-probability distance of two candidates that a code off by one may swap: sums of unequal
shape differ in the last bit, and one in some ten thousand numbers then rounds the other way."""

FAMILIES = {
    "llama": {"head_dim": 32},
    "gemma2": {"head_dim": 32},  # gathered
    "gemma3_text": {"head_dim": 32},  # windows
    "qwen3_next": {"head_dim": 32},  # recurrent layers beside
    "deepseek_v3": {"kv_lora_rank": 32, "qk_rope_head_dim": 32},  # latents
}


@functools.cache
def model() -> tiny.llama.Model:
    return tiny.llama_model(head_dim=32)


@functools.cache
def alone(kv_dtype: str, prompt: tuple[int, ...], max_tokens: int) -> tiny.Collected:
    core = tiny.engine(model(), kv_dtype=kv_dtype)
    core.add("alone", prompt, tiny.greedy(max_tokens, logprobs=2))
    return tiny.run(core)


def same_as_alone(kv_dtype: str, prompt: tuple[int, ...], got: list[int]) -> None:
    run = alone(kv_dtype, prompt, len(got))
    for index, (a, b) in enumerate(zip(got, run.token_ids["alone"], strict=True)):
        if a != b:
            logprobs = [x for o in run.outputs["alone"] for x in o.logprobs or []][index]
            candidates = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
            assert a in candidates, f"token {index}: {a} instead of {b}"
            gap = logprobs.logprob - candidates[a]
            assert gap <= NEAR_TIE, f"token {index}: {a} instead of {b}, {gap} apart"
            return


PREFIXES = st.sampled_from([(), tuple(range(20)), tuple(range(40))])
ENDS = st.lists(st.integers(0, tiny.VOCAB_SIZE - 1), min_size=1, max_size=24).map(tuple)
PROMPTS = st.tuples(PREFIXES, ENDS).map(lambda pair: pair[0] + pair[1])


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 8), PROMPTS, st.integers(1, 16)), min_size=2, max_size=6
    ),
    budget=st.integers(1, 60),
    pipelined=st.booleans(),
    spare_blocks=st.integers(0, 8),
)
@settings(max_examples=12, deadline=None)
def test_a_crowd_gets_the_tokens_of_each_alone(
    kv_dtype: str,
    arrivals: list[tuple[int, tuple[int, ...], int]],
    budget: int,
    pipelined: bool,
    spare_blocks: int,
) -> None:
    longest = max(len(prompt) + output for _, prompt, output in arrivals)
    core = tiny.engine(
        model(),
        kv_dtype=kv_dtype,
        num_blocks=-(-longest // 8) + 2 + spare_blocks,
        prefix_cache=True,
        max_num_batched_tokens=budget,
        pipelined=pipelined,
    )
    collected = tiny.run_arrivals(core, arrivals)
    for index, (_, prompt, output) in enumerate(arrivals):
        got = collected.token_ids[f"r{index}"]
        assert len(got) == output
        same_as_alone(kv_dtype, prompt, got)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "float16"])
def test_every_way_to_attend_reads_what_was_stored(family: str, kv_dtype: str) -> None:
    """Codes of 8 bits change log-probabilities a little, and those of 4 bits somewhat more."""
    built = build(family, config(family) | FAMILIES[family])
    prompt = [n * 7 % 200 for n in range(60)]
    answers = {}
    for name in ("auto", kv_dtype):
        cache = CacheConfig(block_size=8, kv_memory=2**26, kv_dtype=name)
        loaded = replace(tiny.loaded_model(built), architecture=family)
        core = EngineCore(EngineConfig(cache=cache), loaded)
        core.add("r", prompt, tiny.greedy(1, logprobs=20))
        (output,) = [o for o in tiny.run(core).outputs["r"] if o.logprobs]
        assert output.logprobs is not None
        entry = output.logprobs[0]
        answers[name] = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
        stored = {kind.stored_as for kind in layer_kinds(core.cache_spec)}
        assert stored == {"float32" if name == "auto" else name}
    shared = answers["auto"].keys() & answers[kv_dtype].keys()
    drift = [abs(answers["auto"][token] - answers[kv_dtype][token]) for token in shared]
    assert max(drift) > 0, "nothing was rounded"
    assert np.median(drift) < {"int8": 0.1, "int4": 1.0, "float16": 0.01}[kv_dtype]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_plain_quantizer_is_the_oracle_and_no_row_sees_another(bits: int) -> None:
    rows = mx.random.normal((9, 2, 64), key=mx.random.key(1)) * 3
    rows[0] = 0.0
    made = quantize_plainly(rows, bits)
    wanted = dequantized(quantize_reference(np.array(rows), bits))
    step = float(mx.max(mx.abs(rows))) * (1 / 127 if bits == 8 else 2 / 15)
    assert np.abs(dequantized(made) - wanted).max() <= step
    assert np.abs(dequantized(made) - np.array(rows)).max() <= step
    for row in range(9):
        lone = quantize_plainly(rows[row : row + 1], bits)
        assert mx.array_equal(lone.codes[0], made.codes[row])
        assert mx.array_equal(lone.scale[0], made.scale[row])


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_row"), [("int8", 64 + 4), ("int4", 32 + 8), ("float16", 128)]
)
def test_codes_take_the_bytes_that_are_planned(kv_dtype: str, bytes_per_row: int) -> None:
    assert stored_form(kv_dtype, mx.float32, (64,)).bytes_per_row(64) == bytes_per_row
    core = tiny.engine(model(), kv_dtype=kv_dtype)
    core.add("r", list(range(30)), tiny.greedy(2))
    tiny.run(core)
    storage = core.runner.storage
    assert storage.nbytes == storage.num_blocks * storage.bytes_per_block
    assert core.cache_spec.bytes_per_token * 8 == storage.bytes_per_block


def next_tokens(core: EngineCore, prompts: list[list[int]], name: str) -> list[dict[int, float]]:
    """What may come behind each prompt, asked all at once: log-probabilities of the best."""
    for index, ids in enumerate(prompts):
        core.add(f"{name}.{index}", ids, tiny.greedy(1, logprobs=20))
    outputs = tiny.run(core).outputs
    entries = [outputs[f"{name}.{index}"][-1].logprobs for index in range(len(prompts))]
    return [dict(zip(e[0].top_ids, e[0].top_logprobs, strict=True)) for e in entries if e]


@pytest.mark.slow
def test_c089_a_code_word_in_a_long_prompt_is_not_lost() -> None:
    """The demo model over 700 tokens: alone and in fours, computed and found again.

    Teacher forcing, a piece of the word at a time; the model's own form says what to expect, and
    the same prompt without the word how it would look if the prompt were lost.
    """
    cores = {
        form: EngineCore.load(EngineConfig(cache=CacheConfig(kv_memory=2**28, kv_dtype=form)))
        for form in ("auto", "int8", "int4")
    }
    text = ModelText.load(cores["auto"].loaded.path)
    word = text.tokenizer.encode(f"The code word is {CODE}")

    def prompts(needle: str) -> list[list[int]]:
        ids = text.encode_chat(ChatInput([{"role": "user", "content": needle}])).ids
        return [[*ids, *word[:count]] for count in range(4, len(word))]

    asked, lost = prompts(NEEDLE), prompts(NEEDLE.replace(CODE, "a secret"))
    pieces = word[4:]

    def worth(found: list[dict[int, float]]) -> np.ndarray[Any, Any]:
        """Log-probability of each piece; far below all others for one that is not among them."""
        return np.array([best.get(piece, -20) for best, piece in zip(found, pieces, strict=True)])

    wanted = worth(next_tokens(cores["auto"], asked, "told"))
    blind = worth(next_tokens(cores["auto"], lost, "lost"))
    assert wanted.sum() - blind.sum() > 20, "a lost prompt would be noticed"
    for form, most in (("int8", 0.2), ("int4", 1.5)):
        core = cores[form]
        together = next_tokens(core, asked, "cold")
        assert core.scheduler.kv_cache.stats.hit_tokens > 600 * (len(asked) - 1)
        alone = [next_tokens(core, [ids], f"warm{n}")[0] for n, ids in enumerate(asked)]
        for found in (together, alone):
            assert np.abs(worth(found) - wanted).max() < most, form
        agree = [
            max(b, key=b.__getitem__) == max(a, key=a.__getitem__)
            for a, b in zip(together, alone, strict=True)
        ]
        assert all(agree)


def test_what_cannot_be_stored_as_codes_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"groups of 32 .* values of 16\. Hint"):
        tiny.engine(tiny.llama_model(), kv_dtype="int8")
    loaded = replace(tiny.loaded_model(build("mamba")), architecture="mamba")
    with pytest.raises(UnsupportedModel, match="keeps states and no keys"):
        EngineCore(EngineConfig(cache=CacheConfig(kv_memory=2**24, kv_dtype="int4")), loaded)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_the_kernels_give_the_tokens_of_the_reference(kv_dtype: str) -> None:
    """Codes are written by kv_quantize and read by paged_decode and paged_prefill, emulated."""
    prompts = [tuple(range(3, 33)), (5,), tuple(range(90, 107))]
    cores = {
        attention: tiny.engine(
            model(),
            kv_dtype=kv_dtype,
            block_size=16,
            attention=attention,
            max_num_batched_tokens=11,
        )
        for attention in ("reference", "emulator")
    }
    for core in cores.values():
        for index, prompt in enumerate(prompts):
            core.add(f"r{index}", prompt, tiny.greedy(6))
        collected = tiny.run(core)
        assert core.counters.failed_steps == 0
        for index, prompt in enumerate(prompts):
            same_as_alone(kv_dtype, prompt, collected.token_ids[f"r{index}"])
    kernels = cores["emulator"].runner.backend
    assert kernels.switched_off == {}
    used = {variant.kernel for variant in kernels.proven}
    assert used == {"kv_quantize", "paged_decode", "paged_prefill"}
