"""Makes a model's trunk return only the rows whose logits are wanted.

The model's own head, soft-cap and scale then run on few rows. The trunk's class is replaced by a
subclass, so that weights, names and tied embeddings stay where they are.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_cb.errors import UnsupportedModel


class LogitRows:
    """Runs a model for some of its rows.

    `is_late` is True when the model has no trunk to cut at: its head then computes every row.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._trunks = trunks(model)

    @property
    def is_late(self) -> bool:
        """True when the rows are taken from the finished logits."""
        return not self._trunks

    def __call__(self, token_ids: mx.array, cache: list[Any], rows: mx.array) -> mx.array:
        """Logits (R, vocabulary) of the rows (R,) of (B, L) token ids, counted row by row.

        Raises UnsupportedModel when the trunk runs more than once per forward.
        """
        if self._trunks:
            selection = _Selection.of(self._trunks[0])
            selection.rows, selection.num_taken = rows, 0
            try:
                logits = self._model(token_ids, cache=cache)
            finally:
                selection.rows = None
            if selection.num_taken == 1:
                return logits[:, 0]
            if selection.num_taken > 1:
                raise UnsupportedModel("its trunk runs more than once per forward")
            # Some modules only hold the layers and are never called: look further out next time.
            del self._trunks[0]
            return logits.reshape(-1, logits.shape[-1])[rows]
        logits = self._model(token_ids, cache=cache)
        return logits.reshape(-1, logits.shape[-1])[rows]


class _Selection:
    """Rows for a trunk to return while a step runs; None lets it return everything."""

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self.num_taken = 0

    @classmethod
    def of(cls, trunk: nn.Module) -> _Selection:
        """The trunk's selection; its class is replaced the first time."""
        original: Any = type(trunk)
        present = getattr(original, "logit_row_selection", None)
        if present is not None:
            return present
        selection = cls()

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = original.__call__(self, *args, **kwargs)  # (B, L, D)
            if selection.rows is None:
                return hidden
            selection.num_taken += 1
            return hidden.reshape(-1, 1, hidden.shape[-1])[selection.rows]

        trunk.__class__ = type(
            original.__name__,
            (original,),
            {"__call__": call, "logit_row_selection": selection},
        )
        return selection


def trunks(model: Any) -> list[nn.Module]:
    """Modules around the list of layers, innermost first, without the whole model."""
    layers = getattr(model, "layers", None)
    if not layers:
        return []
    first = layers[0]
    around = [
        module
        for module in model.modules()
        if module is not model and any(inner is first for inner in module.modules())
    ]
    outside = [m for m in around if not any(inner is m for inner in first.modules())]
    return sorted(outside, key=lambda module: len(module.modules()))
