"""Sampled text depends on the request alone: same seed, same text, in any company."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest

from mlx_cb.core.outputs import FinishReason
from mlx_cb.sampling_params import SamplingParams
from tests import tiny


@functools.cache
def model() -> tiny.llama.Model:
    return tiny.llama_model()


SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=42, max_tokens=24)
PROMPT = list(range(20))


@functools.cache
def alone() -> list[int]:
    core = tiny.engine(model())
    core.add("mine", PROMPT, SEEDED)
    return tiny.run(core).token_ids["mine"]


def crowd_params(index: int) -> SamplingParams:
    rng = random.Random(index)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 20]),
        seed=rng.choice([None, index]),
        presence_penalty=rng.choice([0.0, 1.0]),
        logit_bias=rng.choice([(), ((7, 100.0),)]),
        logprobs=rng.choice([None, 2]),
        max_tokens=rng.randint(1, 40),
    )


@pytest.mark.parametrize("joins_at", [0, 3, 9])
def test_same_seed_same_text_in_a_crowd_of_31(joins_at: int) -> None:
    """Acceptance e; C004, C041."""
    core = tiny.engine(model(), max_num_seqs=32, max_num_batched_tokens=40)
    collected = tiny.Collected()
    for index in range(31):
        core.add(f"other{index}", [index + 1] * (index % 9 + 1), crowd_params(index))
    for _ in range(joins_at):
        collected.take(core.step())
    core.add("mine", PROMPT, SEEDED)
    tiny.run(core, collected)
    assert collected.token_ids["mine"] == alone()
    for index in range(31):
        forced = dict(crowd_params(index).logit_bias).get(7)
        got = set(collected.token_ids[f"other{index}"])
        assert (got == {7}) == (forced is not None)


def test_same_seed_same_text_after_a_preemption() -> None:
    core = tiny.engine(model(), num_blocks=8, max_num_batched_tokens=16)
    for index in range(3):
        core.add(f"other{index}", [index] * 18, SamplingParams(seed=index, max_tokens=30))
    core.add("mine", PROMPT, SEEDED)
    collected = tiny.run(core)
    assert core.scheduler.explain("mine")["num_preemptions"] > 0
    assert collected.token_ids["mine"] == alone()


def test_unseeded_requests_differ() -> None:
    core = tiny.engine(model())
    for index in range(4):
        core.add(f"r{index}", PROMPT, SamplingParams(temperature=1.5, max_tokens=12))
    collected = tiny.run(core)
    assert len({tuple(tokens) for tokens in collected.token_ids.values()}) == 4


def test_logprobs_are_the_same_alone_and_in_a_batch() -> None:
    """C044."""
    params = tiny.greedy(8, logprobs=3)

    def logprobs(core: tiny.EngineCore) -> list[list[float]]:
        outputs = tiny.run(core).outputs["mine"]
        entries = [entry for output in outputs for entry in output.logprobs or []]
        assert [entry.token_id for entry in entries] == [
            token for output in outputs for token in output.token_ids
        ]
        return [[entry.logprob, *entry.top_logprobs] for entry in entries]

    single = tiny.engine(model())
    single.add("mine", PROMPT, params)
    crowded = tiny.engine(model(), max_num_batched_tokens=12)
    for index in range(4):
        crowded.add(f"other{index}", [index] * 9, SamplingParams(max_tokens=20))
    crowded.add("mine", PROMPT, params)
    first, second = logprobs(single), logprobs(crowded)
    assert len(first) == 8
    np.testing.assert_allclose(first, second, atol=1e-4)


def test_prompt_logprobs_cover_the_prompt_over_chunks() -> None:
    params = tiny.greedy(2, prompt_logprobs=1)
    core = tiny.engine(model(), max_num_batched_tokens=8, prefix_cache=True)
    core.add("first", PROMPT, tiny.greedy(1))
    tiny.run(core)
    core.add("mine", PROMPT, params)
    (entries,) = (
        output.prompt_logprobs
        for output in tiny.run(core).outputs["mine"]
        if output.prompt_logprobs is not None
    )
    assert [entry.token_id for entry in entries] == PROMPT[1:]
    logits = np.array(model()(tiny.mx.array([PROMPT]))[0], dtype=np.float64)
    wanted = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(
        [entry.logprob for entry in entries],
        [wanted[index, token] for index, token in enumerate(PROMPT[1:])],
        atol=1e-4,
    )


def test_repetition_penalty_joins_plain_rows_without_harm() -> None:
    """C006: the combination that kills a peer's worker, in every order of arrival."""
    rng = random.Random(1)
    plain = tiny.solo(model(), PROMPT, 12)
    for _ in range(20):
        kinds = [
            ("plain", PROMPT, tiny.greedy(12)),
            ("penalty", [3] * 5, SamplingParams(repetition_penalty=1.2, max_tokens=9)),
            ("bias", [4] * 7, SamplingParams(logit_bias=((1, 3.0),), max_tokens=9)),
        ]
        rng.shuffle(kinds)
        core = tiny.engine(model(), max_num_batched_tokens=6)
        collected = tiny.Collected()
        for name, prompt, params in kinds:
            core.add(name, prompt, params)
            for _ in range(rng.randint(0, 3)):
                collected.take(core.step())
        tiny.run(core, collected)
        assert collected.token_ids["plain"] == plain
        assert set(collected.finish_reasons.values()) == {FinishReason.LENGTH}
