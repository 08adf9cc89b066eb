"""What can never be served, said at once and by name. Knows one request, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_cb.errors import ContextLengthExceeded, InvalidRequest
from mlx_cb.sampling_params import SamplingParams


def check_request(
    prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int, max_tokens: int
) -> None:
    """Raise for ids outside of the vocabulary, and for a prompt that leaves no room for a token.

    `max_tokens` is the longest prompt and answer together. Raises InvalidRequest or
    ContextLengthExceeded.
    """
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise InvalidRequest(f"a prompt token id is not below {vocab_size}", param="prompt")
    for token_id, _ in params.logit_bias:
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token_id}; the vocabulary has {vocab_size}",
                param="logit_bias",
            )
    if len(prompt_ids) >= max_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt_ids)} tokens and at most {max_tokens - 1} fit",
            param="prompt",
        )
