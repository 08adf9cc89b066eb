"""Embedding checkpoints: how their files say that a text's states become one vector.

Owns the reading of sentence-transformers' files and the checks that such a model can be served.
Knows nothing about batches: `embedding_runner` pools.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.checkpoint import read_json
from mlx_cb.model.logit_rows import trunks

MEAN, LAST = "mean", "last"
POOLINGS = (MEAN, LAST)
# sentence-transformers' names: an own key for each way, and in newer files one key for all.
_WAYS = {
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_lasttoken": LAST,
    "mean": MEAN,
    "lasttoken": LAST,
}
_HARMLESS = ("Transformer", "Pooling", "Normalize")


def pooling_of(folder: Path, wanted: str) -> str | None:
    """`mean` or `last` for an embedding checkpoint, None for one that generates.

    `wanted` is `auto` (the files decide) or a way to pool. Raises UnsupportedModel for an
    embedding checkpoint whose vectors would come out wrong here.
    """
    modules = folder / "modules.json"
    listed = json.loads(modules.read_text("utf-8")) if modules.is_file() else []
    places = [one["path"] for one in listed if str(one.get("type", "")).endswith(".Pooling")]
    own = read_json(folder / (places[0] if places else "1_Pooling") / "config.json")
    if wanted == "auto" and not listed and not own:
        return None
    for module in listed:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        if kind not in _HARMLESS:
            raise UnsupportedModel(
                f"{folder.name} is an embedding model with a {kind} module, which is not served."
            )
    config = read_json(folder / "config.json")
    config = {**config, **(config.get("text_config") or {})}
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise UnsupportedModel(
            f"{folder.name} is an embedding model that attends both ways, and only models that "
            f"read from left to right are served."
        )
    if wanted != "auto":
        return wanted
    return _way(own, folder)


def _way(config: dict[str, Any], folder: Path) -> str:
    named = config.get("pooling_mode")
    flags = [
        key for key, value in config.items() if key.startswith("pooling_mode_") and value is True
    ]
    chosen = [named] if isinstance(named, str) else flags
    if not chosen:
        return MEAN  # what sentence-transformers does when nothing is said
    ways = [_WAYS.get(key) for key in chosen]
    if len(ways) != 1 or ways[0] is None:
        raise UnsupportedModel(
            f"{folder.name} pools by {', '.join(chosen)}; mean and lasttoken are served. "
            f"Hint: --embeddings mean or last overrides it."
        )
    return ways[0]


def as_generating(folder: Path) -> dict[str, Any]:
    """What mlx-lm's `load_model` has to be told to read an embedding checkpoint.

    Its weights may be saved without the generating model around the trunk: then they lack the
    prefix `model.` and the head.
    """
    from mlx_lm.utils import _get_classes

    names = weight_names(folder)
    has_head = any("lm_head" in name for name in names)
    is_bare = any(name.startswith(("layers.", "embed_tokens.")) for name in names)

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, args_class = _get_classes(config)
        return (_with_prefix(model_class) if is_bare else model_class), args_class

    changes = {} if has_head else {"tie_word_embeddings": True}
    return {"model_config": changes, "get_model_classes": classes}


def _with_prefix(model_class: Any) -> type[nn.Module]:
    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        weights = {f"model.{name}": array for name, array in weights.items()}
        inner = getattr(model_class, "sanitize", None)
        return inner(self, weights) if inner is not None else weights

    # The module stays the family's own: attention is bound by it.
    members = {"sanitize": sanitize, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)


def weight_names(folder: Path) -> list[str]:
    """Names of all arrays in a folder's safetensors files."""
    found: list[str] = []
    for file in sorted(folder.glob("model*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            found += [name for name in json.loads(opened.read(length)) if name != "__metadata__"]
    return found


def trunk_of(model: nn.Module) -> nn.Module:
    """The part of a model that turns tokens into states, without its head.

    Raises UnsupportedModel when there is none.
    """
    for trunk in trunks(model):
        try:
            states: Any = trunk(mx.array([[0]]), cache=None)
            if isinstance(states, mx.array) and states.ndim == 3:
                return trunk
        except (TypeError, ValueError, AttributeError):
            continue  # it only holds the layers and is never called itself
    raise UnsupportedModel("this family has no trunk apart from its head, so it cannot embed.")
