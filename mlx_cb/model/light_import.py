"""Imports mlx-lm's models without the rest of mlx-lm.

`import mlx_lm` reads its converter, its generator, the hub's client and transformers: more than a
second of processor time in which nobody is served. A process that only runs models needs none of
it. For the engine's own process alone: whoever imports mlx-lm afterwards finds no `mlx_lm.load`.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

_PACKAGE = "mlx_lm"
_TOKENIZERS = "mlx_lm.tokenizer_utils"


def skip_mlx_lm_init() -> None:
    """Make `mlx_lm.models` and `mlx_lm.utils` importable at a fifth of the cost.

    Does nothing when mlx-lm is imported already, or is not installed (importing it will say so).
    """
    spec = importlib.util.find_spec(_PACKAGE) if _PACKAGE not in sys.modules else None
    if spec is None or spec.submodule_search_locations is None:
        return
    package = ModuleType(_PACKAGE)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    tokenizers: Any = ModuleType(_TOKENIZERS)
    tokenizers.TokenizerWrapper = object  # utils names it in annotations
    tokenizers.load = _no_tokenizers
    sys.modules[_PACKAGE] = package
    sys.modules[_TOKENIZERS] = tokenizers


def _no_tokenizers(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("mlx-lm's tokenizers are not imported in the engine's process")
