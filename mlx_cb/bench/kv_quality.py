"""What `--kv-dtype` costs in quality, on one model: token agreement and log-probability drift.

The model answers with its keys and values kept as it computes them. Then each other form reads the
same answers (teacher forcing), and says at every token what it would have chosen and how probable
it finds what was said. Measures no speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlx_cb.bench.stats import summarize
from mlx_cb.config import EngineConfig
from mlx_cb.core.outputs import TokenLogprobs
from mlx_cb.engine.core import EngineCore
from mlx_cb.engine.llm import LLM
from mlx_cb.sampling_params import SamplingParams

CODE = "marigold-4711"
QUESTIONS = (
    "Explain in three sentences how rain forms.",
    "Write a short story about a lighthouse keeper and a cat.",
    "What is the difference between a list and a tuple in Python? Give an example of each.",
    "Name five rivers in Europe and say where each of them ends.",
    "How do I cook rice without a lid? Answer step by step.",
    "Summarize: a team shares one server; each of them sends long prompts; nobody wants to wait.",
    "Translate into French: The library opens at nine and closes at six.",
    "A train leaves at 14:20 and arrives at 17:05. How long does it travel? Show your work.",
)
_FILLER = "The caretaker walks through the house, counts the windows and writes the number down. "
NEEDLE = f"{_FILLER * 20}The code word is {CODE}. {_FILLER * 20}\nWhat is the code word?"


@dataclass(frozen=True, slots=True)
class Quality:
    """One form of storage against the model's own.

    Attributes:
        agreement: part of the answers' tokens that it would have chosen too, 0 to 1.
        drift_mean, drift_p99: |difference| of the log-probability of the tokens that were said.
        needle_drop: how much less log-probability the code word of a long prompt has, over all its
            tokens; negative when it has more.
        bytes_per_token: of keys and values over all layers.
        tokens: compared.
    """

    kv_dtype: str
    agreement: float
    drift_mean: float
    drift_p99: float
    needle_drop: float
    bytes_per_token: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """Token ids, of which the first `start` were the prompt."""

    ids: list[int]
    start: int


def measure_kv_quality(
    config: EngineConfig, forms: Sequence[str], max_tokens: int = 96
) -> Iterator[Quality]:
    """Compare each form with `auto`, which comes first. Raises what loading raises."""
    config = replace(config, cache=replace(config.cache, prefix_cache=False))
    answers = _answers(_with(config, "auto"), max_tokens)
    base, size = _read(_with(config, "auto"), answers)
    yield _compare("auto", answers, (base, base), size)
    for form in forms:
        found, size = _read(_with(config, form), answers)
        yield _compare(form, answers, (base, found), size)


def _with(config: EngineConfig, kv_dtype: str) -> EngineConfig:
    return replace(config, cache=replace(config.cache, kv_dtype=kv_dtype))


def _answers(config: EngineConfig, max_tokens: int) -> list[_Answer]:
    """What the model says to the questions, and the code word as the answer to the last."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with LLM(config) as llm:
        asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
        said = llm.generate(asked, params)
        needle = [{"role": "user", "content": NEEDLE}]
        (prompt,) = llm.generate([needle], replace(params, max_tokens=1))
        (word,) = llm.generate([f"The code word is {CODE}"], replace(params, max_tokens=1))
    answers = [_Answer(s.prompt_ids + s.token_ids, len(s.prompt_ids)) for s in said]
    return [*answers, _Answer(prompt.prompt_ids + word.prompt_ids, len(prompt.prompt_ids))]


def _read(config: EngineConfig, answers: list[_Answer]) -> tuple[list[list[TokenLogprobs]], int]:
    """What a form thinks of every token of the answers, and its bytes per token."""
    core = EngineCore.load(config)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    for index, answer in enumerate(answers):
        core.add(str(index), answer.ids, params)
    found: dict[str, list[TokenLogprobs]] = {}
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.prompt_logprobs is not None:
                found[output.request_id] = output.prompt_logprobs
    # Entry i is about token i + 1.
    said = [found[str(i)][answer.start - 1 :] for i, answer in enumerate(answers)]
    return said, core.info().kv_bytes_per_token


def _compare(
    form: str,
    answers: list[_Answer],
    read: tuple[list[list[TokenLogprobs]], list[list[TokenLogprobs]]],
    bytes_per_token: int,
) -> Quality:
    base, found = read
    pairs = [
        pair for ours, theirs in zip(base[:-1], found[:-1], strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]  # fmt: skip
    drifts = [abs(ours.logprob - theirs.logprob) for ours, theirs in pairs]
    drift = summarize(drifts)
    needle = [sum(entry.logprob for entry in side[-1]) for side in (base, found)]
    return Quality(
        kv_dtype=form,
        agreement=sum(a.top_ids[0] == b.top_ids[0] for a, b in pairs) / len(pairs),
        drift_mean=sum(drifts) / len(drifts),
        drift_p99=drift["p99"],
        needle_drop=needle[0] - needle[1],
        bytes_per_token=bytes_per_token,
        tokens=len(pairs),
    )
