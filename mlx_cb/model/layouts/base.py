"""What every layout does: run a step's tokens through the model and return the wanted logits."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx

from mlx_cb.model.forward_batch import ForwardBatch
from mlx_cb.model.recurrent import RecurrentStates


class Forward(ABC):
    """One way through one model.

    Attributes:
        states: what the model remembers of requests beside the blocks; empty for most models.
        has_late_logits: the head computes every row, because the model has no trunk to cut at.
    """

    states: RecurrentStates
    has_late_logits: bool

    @abstractmethod
    def run(self, batch: ForwardBatch) -> mx.array:
        """Advance every entry of a step.

        Returns: (R, vocabulary), lazily, in the order of the batch's logit rows; R is at least 1
        (a step without logit rows gives a row that nobody needs to evaluate).
        """
