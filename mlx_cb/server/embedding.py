"""Embeddings: texts in, one vector each out, by the path that all answers take.

Owns who may ask for them and how a vector is shortened. Knows nothing about any dialect.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

from mlx_cb.errors import EngineDead, InvalidRequest
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.server.answering import Answering
from mlx_cb.server.front import Front
from mlx_cb.server.generate_input import GenerateInput, PromptInput


def embedding_input(
    front: Front, model: str | None, prompts: Sequence[PromptInput], dimensions: int | None
) -> GenerateInput:
    """The input that embeds these texts.

    Raises InvalidRequest for a model that makes no embeddings, and for `dimensions` it has not.
    """
    info = front.model_info
    if info.pooling is None:
        raise InvalidRequest(
            f"{front.served_name} generates text and makes no embeddings; serve an embedding "
            f"model for that, or start mlx-cb with --embeddings mean or last",
            param="model",
        )
    if dimensions is not None and not 1 <= dimensions <= info.hidden_size:
        raise InvalidRequest(
            f"dimensions must be between 1 and {info.hidden_size}, not {dimensions}",
            param="dimensions",
        )
    # For a mean every token's state is needed, so nothing may come from the prefix cache.
    wants_all = 0 if info.pooling == "mean" else None
    return GenerateInput(
        prompts=tuple(prompts),
        params=SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=wants_all),
        model=front.resolve_name(model),
        is_embedding=True,
        prompt_field="input",
        details={"dimensions": dimensions},
    )


async def vectors(answering: Answering) -> list[array[float]]:
    """One vector of length 1 for each text, in the order of the texts."""
    async for _ in answering.generation.events():
        pass
    dimensions = answering.given.details["dimensions"]
    made = []
    for choice in answering.generation.choices:
        if choice.embedding is None:
            raise EngineDead("the engine gave no vector for a text", retry_after=1.0)
        made.append(_shortened(array("f", choice.embedding), dimensions))
    return made


def _shortened(vector: array[float], dimensions: int | None) -> array[float]:
    """The first numbers, scaled to length 1 again, as models trained for that want it."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in kept)) or 1.0
    return array("f", [value / length for value in kept])


def usage(answering: Answering) -> dict[str, Any]:
    """OpenAI's `usage` of an embedding."""
    tokens = answering.generation.usage.prompt_tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}
