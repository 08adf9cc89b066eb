"""MetalBackend over the emulator against ReferenceBackend, and a whole engine running on it."""

from __future__ import annotations

import logging

import mlx.core as mx
import numpy as np
import pytest

from mlx_cb.attention.addresses import Slots
from mlx_cb.attention.kernels import KernelCall
from mlx_cb.attention.kv_storage import KVLayer, KVLayerSpec
from mlx_cb.attention.metadata import AttentionMetadata
from mlx_cb.attention.metal import MetalBackend, Variant, proof_cases
from mlx_cb.attention.reference import ReferenceBackend
from mlx_cb.attention.select import make_backend
from mlx_cb.attention.stored_form import stored_form
from mlx_cb.attention.tuning import Tuning
from mlx_cb.errors import MlxCbError
from tests import tiny

from .emulator import emulate

BLOCK = 16


def step(contexts: list[int], chunks: list[int], rng: np.random.Generator) -> AttentionMetadata:
    """Decodes of ascending `contexts`, then chunks of so many rows that end a context of +20."""
    seq_lens = np.array(sorted(contexts) + [n + 20 for n in chunks], np.int32)
    counts = np.array([1] * len(contexts) + chunks, np.int32)
    needed = -(-seq_lens // BLOCK)
    ids = rng.permutation(int(needed.sum()) + 2)
    tables = np.zeros((len(seq_lens), int(needed.max())), np.int32)
    for i, n in enumerate(needed):
        tables[i, :n], ids = ids[:n], ids[n:]
    entries = np.repeat(np.arange(len(counts)), counts)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.arange(starts[-1]) - starts[entries] + (seq_lens - counts)[entries]
    return AttentionMetadata(
        positions=mx.array(positions.astype(np.int32)),
        block_ids=mx.array(tables[entries, positions // BLOCK]),
        block_offsets=mx.array((positions % BLOCK).astype(np.int32)),
        num_decodes=len(contexts),
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_tables=tables,
        logit_rows=np.zeros(1, dtype=np.int32),
    )


def layer_of(spec: KVLayerSpec, rng: np.random.Generator) -> KVLayer:
    layer = KVLayer(spec, BLOCK)
    layer.resize(40)
    shape = (BLOCK, spec.num_kv_heads, spec.key_dim)
    for block in range(40):
        keys, values = (
            mx.array(rng.standard_normal(shape).astype(np.float32)).astype(spec.dtype)
            for _ in range(2)
        )
        slots = Slots(mx.full(BLOCK, block, dtype=mx.int32), mx.arange(BLOCK))
        layer.write(keys, values, slots)
    mx.eval(layer.arrays())
    return layer


@pytest.mark.parametrize(
    ("contexts", "chunks"),
    [([1, 5, 40, 100], []), ([], [3, 33]), ([2, 17, 70], [1, 20])],
    ids=["decodes", "chunks", "both"],
)
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (10, True)])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(mx.float32, "auto"), (mx.float16, "auto"), (mx.float32, "int8"), (mx.float16, "int4")],
)
def test_backend_agrees_with_reference(
    contexts: list[int],
    chunks: list[int],
    window: int | None,
    sinks: bool,
    dtype: mx.Dtype,
    kv_dtype: str,
) -> None:
    rng = np.random.default_rng(len(contexts))
    metadata = step(contexts, chunks, rng)
    stored = stored_form(kv_dtype, dtype, (64, 64))
    layer = layer_of(KVLayerSpec(2, 64, 64, dtype, window, stored), rng)
    rows = int(metadata.query_start_loc[-1])
    queries = mx.array(rng.standard_normal((rows, 6, 1, 64)).astype(np.float32)).astype(dtype)
    keys, values = (
        mx.array(rng.standard_normal((rows, 2, 1, 64)).astype(np.float32)).astype(dtype)
        for _ in range(2)
    )
    extra = mx.array(rng.standard_normal(6).astype(np.float32)).astype(dtype) if sinks else None
    answers = []
    metal = MetalBackend(BLOCK, emulate, Tuning(partition=32))
    for backend in (ReferenceBackend(BLOCK), metal):
        backend.begin(metadata)
        backend.write(layer, keys, values)
        answer = backend.attend(layer, queries, 0.125, extra)
        assert answer.shape == queries.shape
        assert answer.dtype == dtype
        answers.append(np.array(answer.astype(mx.float32)))
    assert metal.switched_off == {}
    assert np.abs(answers[0] - answers[1]).max() < (1e-5 if dtype == mx.float32 else 4e-3)


def test_writes_do_not_copy_the_pool() -> None:
    """The pool is 64 MB; writing rows and attending twice must not need another one."""
    rng = np.random.default_rng(0)
    spec = KVLayerSpec(2, 64, 64, mx.float32, None)
    layer = KVLayer(spec, BLOCK)
    layer.resize(4096)
    metadata = step([5, 40], [3], rng)
    rows = mx.ones((5, 2, 1, 64))
    backend = MetalBackend(BLOCK, emulate, Tuning())
    backend.begin(metadata)
    backend.write(layer, rows, rows)
    mx.eval(layer.arrays())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        backend.write(layer, rows, rows)
        answer = backend.attend(layer, rows, 0.125, None)
        mx.eval(answer, layer.arrays())
    assert mx.get_peak_memory() - before < 4 << 20


def _broken(call: KernelCall) -> list[mx.array]:
    raise RuntimeError("[metal::Device] Unable to build metal library from source")


def _wrong(call: KernelCall) -> list[mx.array]:
    outputs = emulate(call)
    return [outputs[0] * 1.01, *outputs[1:]]


@pytest.mark.parametrize(("launch", "reason"), [(_broken, "Unable to build"), (_wrong, "error ")])
def test_a_bad_kernel_is_switched_off_loudly(
    launch: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    metadata = step([5, 40], [3], rng)
    layer = layer_of(KVLayerSpec(2, 64, 64, mx.float32, None), rng)
    queries = mx.array(rng.standard_normal((5, 4, 1, 64)).astype(np.float32))
    reference, metal = ReferenceBackend(BLOCK), MetalBackend(BLOCK, launch, Tuning())
    answers = []
    with caplog.at_level(logging.WARNING):
        for backend in (reference, metal):
            for _ in range(2):
                backend.begin(metadata)
                answers.append(np.array(backend.attend(layer, queries, 0.125, None)))
    for answer in answers[1:]:
        assert np.allclose(answer, answers[0], atol=1e-6)
    assert sorted(v.kernel for v in metal.switched_off) == ["paged_decode", "paged_prefill"]
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 2  # once per variant, not once per step
    assert "paged_decode[float32/float32 D=64/64 G=2]" in warnings[0]
    assert all(reason in text for text in warnings)


@pytest.mark.parametrize("window", [False, True])
def test_the_proof_covers_the_texts_that_are_used(window: bool) -> None:
    """Whole and split contexts compile different texts; both must have been proven."""
    variant = Variant("paged_decode", mx.float16, "float16", 64, 64, 4, window, False)
    calls = [c.build().calls for c in proof_cases(variant, BLOCK, Tuning(partition=64))]
    assert [len(c) for c in calls] == [1, 2]
    assert all(dict(c[0].template)["WINDOW"] == window for c in calls)


def test_unknown_and_impossible_backends_are_refused() -> None:
    with pytest.raises(MlxCbError, match="choose one of auto"):
        make_backend("fast", BLOCK)
    if not mx.metal.is_available():
        with pytest.raises(MlxCbError, match="needs a Metal GPU"):
            make_backend("metal", BLOCK)
        assert make_backend("auto", BLOCK).name == "reference"


@pytest.mark.parametrize("pipelined", [False, True])
def test_engine_on_the_emulator_gives_the_tokens_of_mlx_lm(pipelined: bool) -> None:
    """Requests that join late, chunked prefill, mixed steps: greedy tokens equal solo runs."""
    model = tiny.llama_model()
    core = tiny.engine(
        model,
        block_size=BLOCK,
        num_blocks=64,
        attention="emulator",
        max_num_batched_tokens=11,
        pipelined=pipelined,
    )
    backend = core.runner.backend
    assert backend.name == "emulator"
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, tiny.VOCAB_SIZE, n).tolist() for n in (1, 30, 17, 70)]
    collected = tiny.Collected()
    for i, prompt in enumerate(prompts):
        core.add(f"r{i}", prompt, tiny.greedy(12))
        collected.take(core.step())
    tiny.run(core, collected)
    assert core.counters.failed_steps == 0
    assert isinstance(backend, MetalBackend)
    assert backend.switched_off == {}
    for i, prompt in enumerate(prompts):
        wanted = tiny.solo(model, prompt, 12)
        tiny.same_tokens(model, prompt, collected.token_ids[f"r{i}"], wanted)
