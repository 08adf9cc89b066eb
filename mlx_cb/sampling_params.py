"""How one request's tokens are chosen and when it ends; knows nothing about models or batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_cb.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
GREEDY_BELOW = 1e-5  # temperatures that count as 0
#: Fields for which a model's makers may have a setting of their own.
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and ending of one generation. Every field has the range that `__post_init__` checks.

    Attributes:
        temperature: 0 is greedy, whatever the other fields say.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this.
        min_p: keep tokens at least this fraction as probable as the most probable one.
        seed: makes the text repeatable, whoever shares the batch; None draws one per request.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens already
            generated (once, and per occurrence).
        repetition_penalty: divides positive and multiplies negative logits of tokens in the
            prompt or the output (Keskar et al. 2019, CTRL).
        logit_bias: added to the logits of these token ids, -100 to 100.
        logprobs: number of most probable alternatives reported per token; 0 reports the chosen
            token alone, None reports nothing.
        prompt_logprobs: the same for the tokens of the prompt (from the second on).
        max_tokens: most tokens to generate; None runs to the end of the context.
        min_tokens: end-of-sequence ids cannot be chosen before this many tokens.
        stop: strings that end the text; not part of it.
        stop_token_ids: token ids that end the generation beside the model's own.
        ignore_eos: the model's own end-of-sequence ids do not end the generation.
        grammar: llguidance grammar that the text has to follow.
        left_to_model: fields of MODEL_DEFAULTS that nobody named; see `with_defaults`.

    Raises InvalidRequest, naming the field, from the constructor.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None
    left_to_model: tuple[str, ...] = ()

    @classmethod
    def asked(cls, named: Mapping[str, Any], **others: Any) -> SamplingParams:
        """What a client asked for; a value of None in `named` was left out by it.

        Raises InvalidRequest naming the field.
        """
        given = {name: value for name, value in named.items() if value is not None}
        left = tuple(name for name in MODEL_DEFAULTS if name not in given)
        return cls(**given, **others, left_to_model=left)

    def with_defaults(self, defaults: Mapping[str, float]) -> SamplingParams:
        """Fill in the model's own settings where nobody named one.

        At temperature 0 nothing else is filled in: greedy is the arg max of the model's own logits.
        """
        found = {name: defaults[name] for name in self.left_to_model if name in defaults}
        if found.get("temperature", self.temperature) < GREEDY_BELOW:
            found = {name: value for name, value in found.items() if name == "temperature"}
        return replace(self, **found, left_to_model=()) if found else self  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_range("seed", self.seed, 0, MAX_SEED)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for token_id, bias in self.logit_bias:
            _check_range("logit_bias", token_id, 0, 2**31 - 1)
            _check_range("logit_bias", bias, -100.0, 100.0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if any(not text for text in self.stop):
            raise InvalidRequest("stop strings cannot be empty; leave them out", param="stop")
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id, 0, 2**31 - 1)

    @property
    def is_greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def is_plain_greedy(self) -> bool:
        """True when the token is the arg max of the model's own logits, at every position."""
        adjusted = self.logit_bias or self.depends_on_history or self.min_tokens
        return self.is_greedy and not adjusted

    @property
    def depends_on_history(self) -> bool:
        """True when the choice of a token needs the tokens before it to be read first."""
        return self.has_penalties or self.grammar is not None

    @property
    def has_penalties(self) -> bool:
        """True when the logits depend on the tokens generated so far."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{name} must be a number, not {type(value).__name__}", param=name)
    if isinstance(low, int) and not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {value}", param=name)
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}", param=name)
