"""Finds the layout of a model: tries each on a tiny plan, the fastest first.

A trial builds the graph of a forward and computes nothing, so that it costs no time on any model.
It catches what cannot run. What would run and be wrong is found by `proof`, which computes, and
named in a table here where it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from mlx_cb.attention.backend import AttentionBackend
from mlx_cb.attention.binding import bind
from mlx_cb.attention.kv_storage import KVStorage
from mlx_cb.attention.reference import ReferenceBackend
from mlx_cb.core.journal import StepRecord
from mlx_cb.core.request import Request, RequestStatus
from mlx_cb.core.scheduler_output import ScheduledChunk, SchedulerOutput
from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.cache_spec import Access, CacheSpec, Layout, read_caches
from mlx_cb.model.forward_batch import ForwardBatch
from mlx_cb.model.layouts.base import Forward
from mlx_cb.model.layouts.grouped import GroupedForward
from mlx_cb.model.layouts.packed import PackedForward
from mlx_cb.model.window_places import WindowPlaces
from mlx_cb.sampling_params import SamplingParams

MakeBackend = Callable[[int], AttentionBackend]

TRIAL_BLOCK_SIZE = 8

#: Families whose own file is wrong, by any layout.
REFUSED = {
    "olmo": "mlx-lm's file adds a mask that is a word, and cannot run a prompt of two tokens",
    "plamo3": "mlx-lm's file masks a prompt with a window of one token more than its cache keeps, "
    "so that a text and its recomputation differ",
    "phi3small": "mlx-lm's file adds its mask of truth values to the scores, which hides nothing",
}

#: Families whose attention scores have more axes than usual: where the batch stands in a mask.
MASK_AXES = {"gemma2": 5}

#: Families that would run in a faster layout and be wrong there.
SERIAL_ONLY = {
    "afm7": "derives positions from the shape of the keys",
    "minimax_m3_vl": "derives the positions of queries from the length of the batch",
}


def make_forward(
    model: nn.Module, spec: CacheSpec, storage: KVStorage, backend: AttentionBackend
) -> Forward:
    """The way through the model that its spec names."""
    if spec.layout is Layout.PACKED:
        return PackedForward(model, spec, storage, backend)
    return GroupedForward(model, spec, storage, backend)


def probe(
    model: nn.Module, architecture: str, make_backend: MakeBackend = ReferenceBackend
) -> CacheSpec:
    """The fastest layout that the model runs in; binds the attention of its own modules.

    Raises UnsupportedModel with the family's name and the reason.
    """
    return next(layouts(model, architecture, make_backend))


def layouts(
    model: nn.Module, architecture: str, make_backend: MakeBackend = ReferenceBackend
) -> Iterator[CacheSpec]:
    """Every layout that the model runs in, the fastest first; at least one.

    Raises UnsupportedModel with the family's name and the reason.
    """
    if architecture in REFUSED:
        raise UnsupportedModel(f"{architecture} is not served: {REFUSED[architecture]}")
    try:
        read = read_caches(model, architecture)
        read = replace(read, mask_axes=MASK_AXES.get(architecture, read.mask_axes))
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{architecture} does not run here: {_reason(error)}") from error
    can_bind = bind(model) > 0
    reasons, can_run = [], False
    for spec in _candidates(read, architecture, can_bind):
        try:
            found = _trial(model, spec, make_backend(TRIAL_BLOCK_SIZE))
        except Exception as error:
            reasons.append(f"{spec.layout.value}: {error}")
        else:
            can_run = True
            yield found
    if not can_run:
        raise UnsupportedModel(f"{architecture} is not served: {'; '.join(reasons)}")


def _reason(error: Exception) -> str:
    if "No Metal back-end" in str(error):
        return "mlx-lm's file has Metal kernels of its own, and there is no Metal GPU"
    return str(error)


def _candidates(read: CacheSpec, architecture: str, can_bind: bool) -> Iterator[CacheSpec]:
    """Specs to try, fastest first."""
    has_attention = bool(read.layers)
    paged = (Access.PAGED,) if can_bind or not has_attention else ()
    if architecture not in SERIAL_ONLY:
        if paged and not read.is_recurrent:
            yield replace(read, layout=Layout.PACKED)
        for decode in (*paged, Access.GATHERED):
            for chunk in (*paged, Access.GATHERED):
                yield replace(read, layout=Layout.GROUPED, decode_access=decode, chunk_access=chunk)
    for chunk in (*paged, Access.GATHERED):
        yield replace(read, layout=Layout.SERIAL, chunk_access=chunk)


def _trial(model: nn.Module, spec: CacheSpec, backend: AttentionBackend) -> CacheSpec:
    """Build the graph of three steps. Returns the spec as it turned out; raises if it cannot be."""
    run = TrialRun(model, spec, backend)
    width = None
    for step in run.steps(([0] * 9, [0] * 9)):
        logits = step.logits
        if logits.ndim != 2 or logits.shape[0] != max(1, len(step.seen)):
            raise UnsupportedModel(f"its logits have the shape {logits.shape}")
        if width not in (None, logits.shape[1]):
            raise UnsupportedModel("the width of its logits changes")
        width = logits.shape[1]
    return replace(spec, late_logits=run.forward.has_late_logits)


@dataclass(frozen=True, slots=True)
class TrialStep:
    """Lazy logits (R, vocabulary) of a step.

    `seen` says what each row follows: the index of its text, and how many of its tokens.
    """

    logits: mx.array
    seen: list[tuple[int, int]]


class TrialRun:
    """A model in one layout over a few blocks, run by a short made-up plan."""

    def __init__(self, model: nn.Module, spec: CacheSpec, backend: AttentionBackend) -> None:
        self._storage = KVStorage(list(spec.layers), TRIAL_BLOCK_SIZE)
        self._storage.resize(4)
        self.forward = make_forward(model, spec, self._storage, backend)

    def steps(self, texts: tuple[list[int], list[int]]) -> Iterator[TrialStep]:
        """Two texts of at least 8 tokens, of which the first 7 and 8 are run."""
        places = WindowPlaces(self._storage)
        requests = [
            Request(name, text, SamplingParams(max_tokens=1), 1, frozenset(), 0)
            for name, text in zip("ab", texts, strict=True)
        ]
        for plan in _plans(requests):
            places.prepare(plan)
            batch = ForwardBatch.build(plan, TRIAL_BLOCK_SIZE, None)
            seen = [
                (requests.index(request), request.num_computed_tokens) for request in plan.decodes
            ]
            seen += [
                (requests.index(chunk.request), chunk.start + chunk.num_tokens)
                for chunk in plan.prefills
                if chunk.samples
            ]
            yield TrialStep(self.forward.run(batch), seen)


def _plans(requests: list[Request]) -> Iterator[SchedulerOutput]:
    """Chunks that begin, chunks that go on beside a decode, and decodes of unequal context."""
    first, second = requests
    for index, request in enumerate(requests):
        request.status = RequestStatus.RUNNING
        request.block_table = [2 * index, 2 * index + 1]
    yield _plan([], [ScheduledChunk(first, 0, 5, True), ScheduledChunk(second, 0, 2, False)])
    first.num_computed_tokens = 6
    yield _plan([first], [ScheduledChunk(second, 2, 1, False)])
    yield _plan([], [ScheduledChunk(second, 3, 4, True)])
    first.num_computed_tokens, second.num_computed_tokens = 7, 8
    yield _plan([first, second], [])


def _plan(decodes: list[Request], prefills: list[ScheduledChunk]) -> SchedulerOutput:
    return SchedulerOutput(StepRecord(0, 0.0), decodes=decodes, prefills=prefills)
