"""`--explain-memory`: where the memory would go, worked out from the model's files alone.

Shapes are known before weights are read: nothing is computed here and no weight is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from mlx_cb.config import EngineConfig
from mlx_cb.errors import MlxCbError
from mlx_cb.model.cache_spec import layer_kinds, store_as
from mlx_cb.model.loader import LoadedModel, check_memory, open_model
from mlx_cb.model.machine_memory import Machine, request_memory
from mlx_cb.model.memory_plan import Limits, MemoryPlan, plan_memory, workspace_bytes
from mlx_cb.model.probe import probe

CONTEXTS = (2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The plan, line by line, and why it cannot be carried out; `refusal` is None when it can."""

    lines: list[str]
    refusal: MlxCbError | None


def explain_memory(config: EngineConfig) -> MemoryReport:
    """Plan a model without loading it. Raises ModelNotFound or UnsupportedModel."""
    opened = open_model(config.model)
    spec = store_as(probe(opened.model, opened.architecture), config.cache.kv_dtype)
    limits = Limits(config.cache.block_size, config.scheduler.max_num_seqs, opened.max_model_len)
    available = psutil.virtual_memory().available
    lines = [
        f"{config.model.model} ({opened.architecture}, {_dtype(opened)}), "
        f"{opened.num_parameters:,} parameters",
        _row("memory available", size(available)),
        _row("weights", size(opened.weights_bytes)),
        _row(
            "workspace of a step",
            f"about {size(workspace_bytes(opened.config, opened.dtype.size))}",
        ),
    ]
    memory = request_memory(config, Machine.read(), opened.weights_bytes)
    how = "--kv-memory" if config.cache.kv_memory is not None else "a share of the rest"
    lines.append(_row("for requests", f"{size(memory)} ({how})"))
    stored = ", ".join(
        f"{kind.num_layers} layers of {kind.kind} as {kind.stored_as}"
        + (f" in a window of {kind.window}" if kind.window else "")
        for kind in layer_kinds(spec)
    )
    lines.append(_row("a token keeps", f"{size(spec.bytes_per_token)} ({stored or 'nothing'})"))
    if spec.state_bytes:
        lines.append(_row("a request keeps", f"{size(spec.state_bytes)} of recurrent state"))
    try:
        check_memory(config.model.model, opened.weights_bytes)
        plan = plan_memory(memory, spec, limits)
    except MlxCbError as error:
        return MemoryReport(lines, error)
    return MemoryReport(lines + _room(plan, limits), None)


def _room(plan: MemoryPlan, limits: Limits) -> list[str]:
    tokens = plan.num_blocks * limits.block_size
    lines = [
        _row("blocks", f"{plan.num_blocks:,} of {limits.block_size} tokens = {tokens:,} tokens"),
        _row("running at once", f"{plan.max_num_seqs} requests"),
    ]
    for context in CONTEXTS:
        if context > limits.max_model_len:
            lines.append(_row(f"users at {context:,}", f"the model ends at {limits.max_model_len}"))
            continue
        lines.append(_row(f"users at {context:,}", str(plan.num_users(context, limits.block_size))))
    return lines


def _row(name: str, value: str) -> str:
    return f"  {name:<20} {value}"


def _dtype(opened: LoadedModel) -> str:
    return opened.quantization or str(opened.dtype).removeprefix("mlx.core.")


def size(count: int) -> str:
    """Bytes for people."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
