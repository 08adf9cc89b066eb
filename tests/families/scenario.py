"""One eventful run of the engine, compared with mlx-lm's own single-sequence answers."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_cb.config import CacheConfig, EngineConfig, SchedulerConfig
from mlx_cb.core.outputs import FinishReason
from mlx_cb.engine.core import EngineCore
from tests import tiny
from tests.families.configs import VOCAB_SIZE

BLOCK_SIZE = 8
LOGPROB_TOLERANCE = 1e-4


def engine(model: nn.Module, family: str, num_blocks: int, **scheduler: object) -> EngineCore:
    """An engine over a tiny model whose pool has exactly `num_blocks` blocks."""
    loaded = replace(tiny.loaded_model(model), architecture=family)
    roomy = EngineConfig(
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_memory=2**26, prefix_cache=True),
        scheduler=SchedulerConfig(**scheduler),
    )
    ticks = itertools.count()
    core = EngineCore(roomy, loaded, clock=lambda: next(ticks) / 100)  # the same run every time
    core.scheduler.kv_cache.pool.capacity = num_blocks
    core.scheduler.growth.output_tokens = 0.0  # lets in more than will fit
    return core


def check_parity(model: nn.Module, family: str, seed: int = 0) -> EngineCore:
    """Joins, chunks, leaves, aborts and preemption; raises AssertionError at the first difference.

    Greedy tokens equal the single run's up to near-ties; the first step's log-probabilities are
    within LOGPROB_TOLERANCE.
    """
    rng = random.Random(seed)
    lengths = (15, 1, 18, 52, 9, 26)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    prompts.append([*prompts[3][:40], 5, 6, 7])  # begins like another one
    outputs = [20, 24, 18, 9, 15, 10, 8]
    core = engine(model, family, num_blocks=11, max_num_batched_tokens=19, max_num_seqs=5)
    collected = tiny.Collected()
    for tick in range(600):
        if tick % 2 == 0 and tick // 2 < len(prompts):
            index = tick // 2
            core.add(f"r{index}", prompts[index], tiny.greedy(outputs[index], logprobs=3))
        if tick == 9:
            core.abort("r1")
        if tick > 20 and not core.has_work:
            break
        collected.take(core.step())
        core.scheduler.check_integrity()
    assert core.counters.failed_steps == 0, [
        output.error for outputs in collected.outputs.values() for output in outputs if output.error
    ]
    assert not core.has_work
    assert core.scheduler.num_preemptions > 0
    for index, prompt in enumerate(prompts):
        name = f"r{index}"
        got, wanted = collected.token_ids[name], tiny.solo(model, prompt, outputs[index])
        aborted = collected.finish_reasons[name] is FinishReason.ABORT
        assert aborted == (index == 1)
        tiny.same_tokens(model, prompt, got, wanted[: len(got)] if aborted else wanted)
        _check_logprobs(model, prompt, collected, name)
    return core


def _check_logprobs(
    model: nn.Module, prompt: list[int], collected: tiny.Collected, name: str
) -> None:
    logits = model(mx.array([prompt]), cache=make_prompt_cache(model))[0, -1].astype(mx.float32)
    wanted = logits - mx.logsumexp(logits)
    first = next(output for output in collected.outputs[name] if output.logprobs)
    assert first.logprobs is not None
    entry = first.logprobs[0]
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        distance = abs(float(wanted[token_id]) - logprob)
        assert distance <= LOGPROB_TOLERANCE, f"{name}: log-probability off by {distance}"
