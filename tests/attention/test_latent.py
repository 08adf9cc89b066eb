"""Latent attention: the kernel's path against the reference, and whole engines on the emulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_cb.attention import reference
from mlx_cb.attention.kernels import KernelCall, Launcher
from mlx_cb.attention.kv_storage import KVLayer, KVLayerSpec
from mlx_cb.attention.metal import MetalBackend
from mlx_cb.attention.reference import ReferenceBackend
from mlx_cb.attention.select import load_test_bench
from mlx_cb.attention.tuning import Tuning
from mlx_cb.config import CacheConfig, EngineConfig, SchedulerConfig
from mlx_cb.engine.core import EngineCore
from tests import tiny
from tests.attention.test_reference import metadata
from tests.families.build import build
from tests.families.configs import VOCAB_SIZE

BLOCK = 16


@pytest.fixture(scope="module")
def emulate() -> Launcher:
    return load_test_bench().emulator.emulate


def latents(rank: int, rope: int, dtype: mx.Dtype, rng: np.random.Generator) -> KVLayer:
    """A layer of 40 blocks full of random latents and rotated keys."""
    layer = KVLayer(KVLayerSpec(1, rank, rope, dtype), BLOCK)
    layer.resize(40)
    for tiles in (layer.keys, layer.values):
        shape = tiles.arrays[0].shape
        tiles.arrays[0] = mx.array(rng.standard_normal(shape).astype("f4")).astype(dtype)
    return layer


def attend_both(
    launch: Launcher, entries: list[tuple[int, int]], heads: int, widths: tuple[int, int]
) -> tuple[MetalBackend, float]:
    """The kernel's backend and its largest difference from the reference."""
    rng = np.random.default_rng(heads)
    step = metadata(entries, BLOCK, rng)
    layer = latents(*widths, mx.float32, rng)
    rows = int(step.query_start_loc[-1])
    queries, rotated = (
        mx.array(rng.standard_normal((rows, heads, 1, width)).astype("f4") * 0.3)
        for width in widths
    )
    metal = MetalBackend(BLOCK, launch, Tuning(partition=32))
    answers = []
    for backend in (ReferenceBackend(BLOCK), metal):
        backend.begin(step)
        answers.append(np.array(backend.attend_latent(layer, queries, rotated, 0.2)))
    assert answers[0].shape == (rows, heads, 1, widths[0])
    return metal, float(np.abs(answers[0] - answers[1]).max())


DECODES = [(0, 1), (16, 1), (69, 1)]


@pytest.mark.parametrize(
    ("entries", "heads", "widths"),
    [
        (DECODES, 4, (16, 8)),
        (DECODES, 20, (64, 32)),
        ([*DECODES, (20, 3)], 4, (32, 16)),
        ([(5, 9)], 4, (16, 8)),
    ],
    ids=["one slice", "four slices", "beside a chunk", "a chunk alone"],
)
def test_the_kernel_agrees_with_the_reference(
    emulate: Launcher, entries: list[tuple[int, int]], heads: int, widths: tuple[int, int]
) -> None:
    metal, difference = attend_both(emulate, entries, heads, widths)
    assert metal.switched_off == {}
    assert difference < 1e-5


@pytest.mark.parametrize(("factor", "reason"), [(0.0, "Unable to build"), (1.01, "error ")])
def test_a_bad_kernel_is_switched_off(emulate: Launcher, factor: float, reason: str) -> None:
    def launch(call: KernelCall) -> list[mx.array]:
        if not factor:
            raise RuntimeError("Unable to build metal library from source")
        outputs = emulate(call)
        return [outputs[0] * factor, *outputs[1:]]

    metal, difference = attend_both(launch, DECODES, 4, (16, 8))
    ((variant, why),) = metal.switched_off.items()
    assert str(variant) == "mla_decode[float32/float32 D=24/16 G=4]"
    assert reason in why
    assert difference == 0.0


def test_widths_that_no_tile_fits_are_served_by_the_reference(emulate: Launcher) -> None:
    metal, difference = attend_both(emulate, DECODES, 4, (12, 4))
    ((_, why),) = metal.switched_off.items()
    assert "no tile for keys of 16 and latents of 12 columns" in why
    assert difference == 0.0


def test_a_chunk_of_many_scores_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    step = metadata([(30, 1), (20, 9)], BLOCK, rng)
    layer = latents(16, 8, mx.float32, rng)
    queries, rotated = (
        mx.array(rng.standard_normal((10, 4, 1, width)).astype("f4")) for width in (16, 8)
    )
    answers = []
    for most in (reference.MAX_SCORES, 4 * 32 * 2, 1):  # whole, two rows each, a row each
        monkeypatch.setattr(reference, "MAX_SCORES", most)
        backend = ReferenceBackend(BLOCK)
        backend.begin(step)
        answers.append(np.array(backend.attend_latent(layer, queries, rotated, 0.2)))
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], atol=1e-6)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_an_engine_on_the_emulator_gives_the_tokens_of_mlx_lm(family: str) -> None:
    """PACKED and GROUPED: the kernel serves every decode row, and greedy tokens equal solo runs."""
    model = build(family)
    config = EngineConfig(
        cache=CacheConfig(block_size=BLOCK, kv_memory=2**24),
        scheduler=SchedulerConfig(max_num_batched_tokens=11),
        attention="emulator",
    )
    core = EngineCore(config, tiny.loaded_model(model))
    backend = core.runner.backend
    assert isinstance(backend, MetalBackend)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (1, 30, 17)]
    collected = tiny.Collected()
    for index, prompt in enumerate(prompts):
        core.add(f"r{index}", prompt, tiny.greedy(12))
        collected.take(core.step())
    tiny.run(core, collected)
    assert core.counters.failed_steps == 0
    assert backend.switched_off == {}
    assert [variant.kernel for variant in backend.proven] == ["mla_decode"]
    for index, prompt in enumerate(prompts):
        wanted = tiny.solo(model, prompt, 12)
        tiny.same_tokens(model, prompt, collected.token_ids[f"r{index}"], wanted)
