"""The sampler: both ways to draw agree, and nobody disturbs a neighbour."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cb.core.request import Request
from mlx_cb.model import sampler
from mlx_cb.model.grammar import Mask
from mlx_cb.model.sampler import SampleRow
from mlx_cb.sampling_params import SamplingParams

VOCAB_SIZE = 600


def row(params: SamplingParams, seed: int = 0, prompt: tuple[int, ...] = (1, 2), **kw: object):
    request = Request("r", list(prompt), params, 100, frozenset({0}), params.seed or seed, **kw)
    return SampleRow(request, request.num_tokens)


def logits(rows: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, VOCAB_SIZE)) * spread).astype(np.float32)


def on_device(array: np.ndarray, rows: list[SampleRow]) -> list[int]:
    adjusted = sampler.adjust(mx.array(array), rows, mx)
    return np.array(sampler.choose_on_device(adjusted, rows)).tolist()


def on_host(array: np.ndarray, rows: list[SampleRow]) -> list[int]:
    return sampler.choose_on_host(sampler.adjust(array, rows, np), rows).tolist()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.01, 0.3, 0.7, 1.0, 1.5, 5.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 300, 10_000]),
    top_p=st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (599, -100.0)), ((7, 100.0),)]),
)


@given(
    st.lists(st.tuples(PARAMS, st.sampled_from([None, 0.003, 0.5, 0.99])), min_size=1, max_size=6),
    st.integers(0, 50),
)
@settings(max_examples=150, deadline=None)
def test_looking_up_what_is_allowed_is_as_good_as_banning_the_rest(
    asked: list[tuple[SamplingParams, float | None]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = [row(params, seed=seed + n) for n, (params, _) in enumerate(asked)]
    array = sampler.adjust(logits(len(rows), seed), rows, np)
    banned, masks = np.array(array), {}
    for index, (_, share) in enumerate(asked):
        if share is not None:
            allowed = rng.random(VOCAB_SIZE - 3) < share
            allowed[rng.integers(len(allowed))] = True
            masks[index] = Mask(np.packbits(allowed, bitorder="little"), VOCAB_SIZE)
            banned[index] = np.where(masks[index].as_bools(), array[index], sampler.BANNED)
            assert all(masks[index].allows(t) == (t < len(allowed) and allowed[t])
                       for t in rng.integers(VOCAB_SIZE + 20, size=30))  # fmt: skip
    got = sampler.choose_on_host(array, rows, masks)
    assert got.tolist() == sampler.choose_on_host(banned, rows).tolist()


@given(st.lists(PARAMS, min_size=1, max_size=8), st.integers(0, 50))
@settings(max_examples=150, deadline=None)
def test_host_and_device_draw_the_same_tokens(params: list[SamplingParams], seed: int) -> None:
    rows = [row(p, seed=seed + i, prompt=(1, 5, 5, 9)) for i, p in enumerate(params)]
    array = logits(len(rows), seed)
    got, wanted = on_host(array, rows), on_device(array, rows)
    adjusted = np.array(sampler.adjust(array, rows, np))
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if a != b:
            # float32 sums may put a number, or the nucleus, on the other side of a border.
            u, top_p = rows[index].uniform, params[index].top_p
            near = {
                sampler._draw(adjusted[index], replace(params[index], top_p=p), n)
                for p in (top_p * (1 - 1e-5), min(1.0, top_p * (1 + 1e-5)))
                for n in (max(0.0, u - 1e-5), min(1.0, u + 1e-5))
            }
            assert b in near


@given(PARAMS, st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(params: SamplingParams, seed: int) -> None:
    array = logits(9, seed)
    mine = row(params, seed=seed)
    others = [
        row(SamplingParams(temperature=1.0, logit_bias=((i, 100.0),)), seed=i) for i in range(8)
    ]
    alone = on_host(array[4:5], [mine])
    assert on_host(array, [*others[:4], mine, *others[4:]])[4] == alone[0]


def test_top_p_beyond_the_first_candidates_is_exact() -> None:
    """A flat distribution, whose nucleus is larger than the candidates looked at first."""
    array = np.linspace(0, -6, VOCAB_SIZE, dtype=np.float32)[None]
    params = SamplingParams(temperature=1.0, top_p=0.99)
    drawn = {on_host(array, [row(params, seed=s)])[0] for s in range(3000)}
    weights = np.exp(array[0].astype(np.float64))
    kept = int(np.searchsorted(np.cumsum(weights) / weights.sum(), 0.99)) + 1
    likely = int((weights >= sampler.CANDIDATE_WEIGHTS[0]).sum())
    assert likely < max(drawn) <= kept - 1


def test_draws_follow_the_distribution() -> None:
    array = np.full((1, VOCAB_SIZE), -50.0, dtype=np.float32)
    array[0, :4] = np.log([0.5, 0.25, 0.15, 0.1])
    counts = np.zeros(4)
    for seed in range(4000):
        counts[on_host(array, [row(SamplingParams(temperature=1.0), seed=seed)])[0]] += 1
    assert np.abs(counts / 4000 - [0.5, 0.25, 0.15, 0.1]).max() < 0.03


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1])
@pytest.mark.parametrize("min_p", [0.0, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 0.01])
def test_c038_extreme_parameters_are_greedy(
    temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    array = logits(4)
    array[:, 17] = 40.0
    assert on_host(array, [row(params, seed=s) for s in range(4)]) == [17] * 4
    assert on_device(array, [row(params, seed=s) for s in range(4)]) == [17] * 4


def test_c040_seeds_give_different_numbers_and_one_seed_the_same() -> None:
    numbers = [sampler.uniform(seed, 30) for seed in range(1, 1001)]
    assert len(set(numbers)) == 1000
    assert 0.45 < np.mean(numbers) < 0.55
    assert sampler.uniform(7, 30) == sampler.uniform(7, 30)
    assert sampler.uniform(7, 30) != sampler.uniform(7, 31)
    assert sampler.uniform(0, 5) != sampler.uniform(2**32, 5), "C042: not cut to 32 bits"
    walk = [sampler.uniform(3, position) for position in range(2000)]
    assert abs(np.corrcoef(walk[:-1], walk[1:])[0, 1]) < 0.06


def test_c039_bias_forces_and_bans() -> None:
    array = logits(1)
    best = int(array[0].argmax())
    assert on_host(array, [row(SamplingParams(temperature=0.0, logit_bias=((9, 100.0),)))]) == [9]
    banned = on_host(array, [row(SamplingParams(temperature=0.0, logit_bias=((best, -100.0),)))])
    assert banned != [best]


def test_penalties_count_output_and_prompt_apart() -> None:
    params = SamplingParams(
        temperature=0.0, presence_penalty=1.0, frequency_penalty=0.25, repetition_penalty=2.0
    )
    mine = row(params, prompt=(4, 5))
    mine.request.token_ids += [5, 6, 6]
    array = np.full((1, VOCAB_SIZE), 2.0, dtype=np.float32)
    array[0, 6] = -2.0
    adjusted = sampler.adjust(array, [mine], np)[0]
    assert adjusted[4] == pytest.approx(1.0), "prompt only: divided"
    assert adjusted[5] == pytest.approx(1.0 - 1.25), "once in the output"
    assert adjusted[6] == pytest.approx(-4.0 - 1.5), "negative: multiplied; twice in the output"
    assert adjusted[7] == 2.0
    assert array[0, 4] == 2.0, "the model's logits are not touched"


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    array = logits(1)[0]
    wanted = array - np.log(np.exp(array.astype(np.float64)).sum())
    got = sampler.logprobs_of(array, 12, 3)
    assert got.logprob == pytest.approx(wanted[12], abs=1e-5)
    assert got.top_ids == np.argsort(-array)[:3].tolist()
    assert got.top_logprobs == sorted(got.top_logprobs, reverse=True)
    assert got.rank == int((array > array[12]).sum()) + 1
    assert sampler.logprobs_of(array, 12, 0).top_ids == []
