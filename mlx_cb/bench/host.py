"""What a step costs beside the model's arithmetic, measured inside this process.

Drives the real scheduler, block pool and EngineCore, the latter on the tiny random model. Host time
is the CPU time of the engine's thread: MLX computes in threads of its own, so waiting for it does
not count, and neither does other work on the machine. Run alone: `python -m mlx_cb.bench.host DIR`.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mlx_cb import blas
from mlx_cb.bench.distributions import MIXES
from mlx_cb.bench.stats import linear_fit, median
from mlx_cb.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_cb.core.block_pool import BlockPool
from mlx_cb.core.kv_cache_manager import KVCacheManager
from mlx_cb.core.outputs import SampledToken
from mlx_cb.core.request import Request
from mlx_cb.core.scheduler import Scheduler
from mlx_cb.engine.worker import let_threads_finish
from mlx_cb.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mlx_cb.engine.core import EngineCore

BLOCK_SIZE = CacheConfig().block_size
_ENDLESS = 10**6
_VOCABULARY = 49152


def measure_host(tiny: Path) -> dict[str, float]:
    """All host figures; names end in their unit. `tiny` is the tiny model's folder."""
    figures = scheduler_figures()
    figures |= allocation_figures()
    figures |= kv_overhead_figures()
    figures |= engine_figures(tiny)
    figures |= constrained_figures(tiny)
    return figures


def scheduler_figures(steps: int = 60) -> dict[str, float]:
    """One scheduler pass, and one update, with N requests decoding; µs, medians."""
    figures = {}
    for count in (8, 256, 1024):
        scheduler = _scheduler(max_num_seqs=count, capacity=16 * count)
        for number in range(count):
            scheduler.add(_request(number, 16, _ENDLESS))
        while scheduler.waiting or scheduler.prefilling:
            _advance(scheduler)
        passes, updates = [], []
        for _ in range(steps):
            began = time.perf_counter()
            plan = scheduler.schedule()
            formed = time.perf_counter()
            tokens = [SampledToken(7) for _ in plan.sampling()]
            ready = time.perf_counter()
            scheduler.update(plan, tokens, 0.01)
            updates.append(time.perf_counter() - ready)
            passes.append(formed - began)
        figures[f"schedule_us_{count}"] = median(passes) * 1e6
        figures[f"update_us_{count}"] = median(updates) * 1e6
    extra = figures["schedule_us_1024"] - figures["schedule_us_256"]
    figures["schedule_us_per_request_above_256"] = extra / (1024 - 256)
    return figures


def allocation_figures() -> dict[str, float]:
    """Prefix look-up, allocation and freeing of one request, with few and many cached blocks."""
    few, many = _allocation_us(1_000), _allocation_us(100_000)
    return {
        "allocate_us_1k": few,
        "allocate_us_100k": many,
        "allocate_100k_over_1k": many / few,
    }


def _allocation_us(cached_blocks: int, rounds: int = 400) -> float:
    """Median µs for a request of 8 known and 8 new blocks, the pool full of cached blocks."""
    pool = BlockPool(cached_blocks + 64)
    kv_cache = KVCacheManager(pool, BLOCK_SIZE, prefix_cache=True)
    per_prompt = 8
    for number in range(cached_blocks // per_prompt):
        _pass_through(kv_cache, _request(number, per_prompt * BLOCK_SIZE, 1))
    times = []
    for number in range(rounds):
        known = _request(number % 64 + (cached_blocks // per_prompt - 64), 8 * BLOCK_SIZE, 1)
        fresh = _request(10**6 + number, 8 * BLOCK_SIZE, 1)
        known.token_ids += fresh.token_ids
        began = time.perf_counter()
        _pass_through(kv_cache, known)
        times.append(time.perf_counter() - began)
    return median(times) * 1e6


def _pass_through(kv_cache: KVCacheManager, request: Request) -> None:
    kv_cache.take_prefix(request)
    if not kv_cache.allocate_slots(request, request.num_tokens):
        raise RuntimeError("the pool is too small for this measurement")
    kv_cache.remember(request, request.num_tokens)
    kv_cache.free(request)


def kv_overhead_figures() -> dict[str, float]:
    """Slots in requests' blocks over tokens in them, averaged over the steps of two loads.

    Chat: conversation lengths of the public trace, undivided. Churn: 15 short requests that come
    and go beside one of 768 tokens.
    """
    rng = random.Random(1)
    conv = MIXES["conv"]
    chat = [_request(n, conv.prompt.draw(rng), conv.output.draw(rng)) for n in range(96)]
    churn = [_request(1000 + n, 24, rng.randint(6, 20)) for n in range(400)]
    return {
        "kv_overhead_chat": _kv_overhead(chat, None, 32),
        "kv_overhead_churn": _kv_overhead(churn, _request(9999, 768, _ENDLESS), 16),
    }


def _kv_overhead(requests: list[Request], resident: Request | None, places: int) -> float:
    scheduler = _scheduler(max_num_seqs=places, capacity=32_768, prefix_cache=False)
    if resident is not None:
        scheduler.add(resident)
        while not scheduler.decoding:  # before the short ones come, who would go first
            _advance(scheduler)
    for request in requests:
        scheduler.add(request)
    allocated = live = 0
    while scheduler.waiting:
        _advance(scheduler)
        running = [*scheduler.prefilling, *scheduler.decoding]
        allocated += sum(len(request.block_table) for request in running) * BLOCK_SIZE
        live += sum(request.num_computed_tokens for request in running)
    return allocated / live


def engine_figures(tiny: Path, steps: int = 40) -> dict[str, float]:
    """Host time of whole engine steps at 8 and 256 requests, and how linear step time is."""
    from mlx_cb.engine.core import EngineCore

    figures = {}
    for count in (8, 256):
        core = EngineCore.load(_engine_config(tiny))
        # The arg max over the vocabulary is the model's arithmetic: on a GPU it never leaves it.
        core.runner.choose_late = False
        _fill(core, count, 32)
        host = median([_thread_seconds(core.step) for _ in range(steps)])
        figures[f"host_step_ms_{count}"] = host * 1e3
    per_request = {count: figures[f"host_step_ms_{count}"] / count for count in (8, 256)}
    figures["host_per_request_256_over_8"] = per_request[256] / per_request[8]
    figures |= _linearity(tiny)
    return figures


def constrained_figures(tiny: Path, steps: int = 40) -> dict[str, float]:
    """Host time of a step of 16 rows that must be JSON, over that of 16 plain rows."""
    from llguidance import LLMatcher

    from mlx_cb.engine.core import EngineCore

    schema = {"type": "array", "items": {"type": "string"}}
    plain = SamplingParams(temperature=0, ignore_eos=True)
    bound = replace(plain, grammar=LLMatcher.grammar_from_json_schema(schema))
    host = {}
    for name, params in (("plain", plain), ("constrained", bound)):
        core = EngineCore.load(_engine_config(tiny))
        _fill(core, 16, 32, params)
        host[name] = median([_thread_seconds(core.step) for _ in range(steps)])
    return {
        "host_step_ms_16": host["plain"] * 1e3,
        "host_step_ms_16_constrained": host["constrained"] * 1e3,
        "constrained_over_plain_16": host["constrained"] / host["plain"],
    }


def _linearity(tiny: Path) -> dict[str, float]:
    """Least squares of the step's time on its rows and its context sum, over a grid of both."""
    from mlx_cb.engine.core import EngineCore

    rows, contexts, seconds = [], [], []
    for count in (8, 32, 64, 128, 256):
        for context in (32, 256, 512):
            core = EngineCore.load(_engine_config(tiny))
            _fill(core, count, context)
            elapsed = median([_wall_seconds(core.step) for _ in range(12)])
            record = core.scheduler.journal.records[-1]
            rows.append(float(record.rows_decode))
            contexts.append(float(record.context_sum))
            seconds.append(elapsed)
    fit = linear_fit([rows, contexts], seconds)
    constant, per_row, per_context = fit.coefficients
    return {
        "step_linear_r2": fit.r2,
        "step_constant_us": constant * 1e6,
        "step_per_row_us": per_row * 1e6,
        "step_per_context_token_ns": per_context * 1e9,
    }


def _engine_config(tiny: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(tiny)),
        cache=CacheConfig(kv_memory=512 * 2**20),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048),
    )


def _fill(
    core: EngineCore,
    count: int,
    context: int,
    params: SamplingParams = SamplingParams(temperature=0, ignore_eos=True),  # noqa: B008 - frozen
) -> None:
    """Bring `count` requests of this context to where all of them decode, and settle."""
    rng = random.Random(count)
    for number in range(count):
        prompt = [rng.randrange(_VOCABULARY) for _ in range(context)]
        core.add(f"r{number}", prompt, params)
    while core.scheduler.waiting or core.scheduler.prefilling:
        core.step()
    for _ in range(4):
        core.step()


def _scheduler(*, max_num_seqs: int, capacity: int, prefix_cache: bool = True) -> Scheduler:
    kv_cache = KVCacheManager(BlockPool(capacity), BLOCK_SIZE, prefix_cache=prefix_cache)
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=2048)
    return Scheduler(config, kv_cache, clock=time.monotonic)


def _request(number: int, prompt: int, output: int) -> Request:
    rng = random.Random(number)
    return Request(
        f"r{number}",
        [rng.randrange(_VOCABULARY) for _ in range(prompt)],
        SamplingParams(temperature=0, ignore_eos=True),
        max_output_tokens=output,
        eos_token_ids=frozenset(),
        seed=0,
    )


def _advance(scheduler: Scheduler) -> None:
    """One step with a token for everybody; a plan without rows would never end the loop around."""
    plan = scheduler.schedule()
    if plan.is_empty:
        raise RuntimeError("the scheduler has waiting requests and forms no step")
    scheduler.update(plan, [SampledToken(7) for _ in plan.sampling()], 0.01)


def _thread_seconds(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return time.thread_time() - began


def _wall_seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    let_threads_finish()  # as the engine's process does
    blas.load()
    sys.stdout.write(msgspec.json.encode(measure_host(Path(sys.argv[1]))).decode())
