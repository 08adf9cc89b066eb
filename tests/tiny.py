"""A tiny random llama, the engine over it, and mlx-lm's own answer to compare with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_cb.attention.stored_form import stored_form
from mlx_cb.config import CacheConfig, EngineConfig, SchedulerConfig
from mlx_cb.core.outputs import FinishReason, RequestOutput
from mlx_cb.engine.core import EngineCore
from mlx_cb.model.loader import LoadedModel
from mlx_cb.sampling_params import SamplingParams

VOCAB_SIZE = 211
WEIGHT_SCALE = 4.0
NEAR_TIE = 1e-4  # log-probability distance under which two candidates may swap


def llama_model(seed: int = 0, **changes: object) -> llama.Model:
    """Two layers, grouped KV heads, float32, random weights."""
    settings = {
        "model_type": "llama",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(**(settings | changes)))
    # Larger weights than the default, so that what was attended to decides the next token.
    model.update(tree_map(lambda array: array * WEIGHT_SCALE, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def loaded_model(model: llama.Model, eos_token_ids: frozenset[int] = frozenset()) -> LoadedModel:
    """What the loader would say of a model made here."""
    return LoadedModel(
        model=model,
        config={"vocab_size": VOCAB_SIZE},
        path=Path(__file__).parent,
        architecture="llama",
        dtype=mx.float32,
        quantization=None,
        num_parameters=0,
        weights_bytes=0,
        max_model_len=512,
        eos_token_ids=eos_token_ids,
    )


def engine(
    model: llama.Model,
    *,
    block_size: int = 8,
    num_blocks: int = 256,
    prefix_cache: bool = False,
    eos_token_ids: frozenset[int] = frozenset(),
    attention: str = "reference",
    kv_dtype: str = "auto",
    **scheduler: object,
) -> EngineCore:
    """An engine in this process with exactly `num_blocks` blocks.

    It expects answers to end at once, and so lets in more than will fit: somebody has to give way.
    """
    form = stored_form(kv_dtype, mx.float32, (model.args.head_dim,))
    bytes_per_token = 2 * 2 * form.bytes_per_row(model.args.head_dim) * len(model.layers)
    config = EngineConfig(
        cache=CacheConfig(
            block_size=block_size,
            kv_memory=num_blocks * block_size * bytes_per_token,
            prefix_cache=prefix_cache,
            kv_dtype=kv_dtype,
        ),
        scheduler=SchedulerConfig(**scheduler),
        attention=attention,
    )
    core = EngineCore(config, loaded_model(model, eos_token_ids))
    core.scheduler.growth.output_tokens = 0.0
    return core


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)


class Collected:
    """Outputs by request, merged as a client would."""

    def __init__(self) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, FinishReason] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}

    def take(self, outputs: list[RequestOutput]) -> None:
        """Add a step's outputs; a request may end only once."""
        for output in outputs:
            assert output.request_id not in self.finish_reasons, "an output after the last one"
            self.outputs.setdefault(output.request_id, []).append(output)
            self.token_ids.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finish_reasons[output.request_id] = output.finish_reason


def run(core: EngineCore, collected: Collected | None = None, max_steps: int = 5000) -> Collected:
    """Step until nothing is left."""
    collected = collected or Collected()
    for _ in range(max_steps):
        if not core.has_work:
            return collected
        collected.take(core.step())
    raise AssertionError(f"not done after {max_steps} steps: {core.scheduler.requests}")


def run_arrivals(
    core: EngineCore,
    arrivals: Sequence[tuple[int, Sequence[int], int]],
    aborts: Sequence[tuple[int, int]] = (),
    max_ticks: int = 3000,
) -> Collected:
    """Run requests `r0`, `r1`, ... that come at given ticks, and some that are aborted, to the end.

    Arrivals are (tick, prompt, output tokens), aborts (tick, index). Every tick is a step, after
    which all requests and blocks are accounted for.
    """
    collected = Collected()
    last = max(when for when, *_ in [*arrivals, *aborts])
    for tick in range(max_ticks):
        for index, (when, prompt, output) in enumerate(arrivals):
            if when == tick:
                core.add(f"r{index}", prompt, greedy(output))
        for when, index in aborts:
            if when == tick:
                core.abort(f"r{index}")
        if tick > last and not core.has_work:
            break
        collected.take(core.step())
        core.scheduler.check_integrity()
    assert not core.has_work
    assert core.counters.failed_steps == 0
    return collected


def like_alone(
    model: llama.Model,
    collected: Collected,
    arrivals: Sequence[tuple[int, Sequence[int], int]],
    alone: Callable[[tuple[int, ...], int], list[int]],
) -> None:
    """Assert that what `run_arrivals` collected is what `alone` gives, or its start if aborted."""
    for index, (_, prompt, output) in enumerate(arrivals):
        got = collected.token_ids.get(f"r{index}", [])
        reason, wanted = collected.finish_reasons[f"r{index}"], alone(tuple(prompt), output)
        assert reason in (FinishReason.ABORT, FinishReason.LENGTH)
        if reason is FinishReason.ABORT:
            wanted = wanted[: len(got)]
        same_tokens(model, list(prompt), got, wanted)


@contextmanager
def as_mlx_lm_has_it(model: nn.Module) -> Iterator[None]:
    """For a while no layer of the model is a class of ours: a reference must not run our code."""
    bound = [(m, type(m)) for m in model.modules() if type(m).__module__.startswith("mlx_cb.")]
    for layer, ours in bound:
        layer.__class__ = ours.__bases__[0]
    try:
        yield
    finally:
        for layer, ours in bound:
            layer.__class__ = ours


def solo(model: llama.Model, prompt: list[int], max_tokens: int) -> list[int]:
    """What mlx-lm's own single-sequence generation answers, greedily."""
    with as_mlx_lm_has_it(model):
        steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens)
        return [int(token) for token, _ in steps]


def same_tokens(model: llama.Model, prompt: list[int], got: list[int], wanted: list[int]) -> int:
    """Assert equality up to near-ties; returns the number of near-ties met (0 or 1)."""
    for index, (a, b) in enumerate(zip(got, wanted, strict=False)):
        if a != b:
            with as_mlx_lm_has_it(model):
                logits = model(mx.array([prompt + wanted[:index]]), cache=make_prompt_cache(model))
                gap = abs(float(logits[0, -1, a]) - float(logits[0, -1, b]))
            assert gap <= NEAR_TIE, f"token {index}: {a} instead of {b}, {gap} apart"
            return 1
    assert len(got) == len(wanted)
    return 0


def save(model: llama.Model, folder: Path) -> Path:
    """Write a model made here as a checkpoint that the loader reads."""
    config = {key: value for key, value in vars(model.args).items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
