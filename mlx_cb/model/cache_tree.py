"""Walks the nested lists of cache objects that mlx-lm's models make for themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """Every cache that is not a list of others, in order."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def rebuild(caches: Sequence[Any], make_leaf: Callable[[Any], Any]) -> list[Any]:
    """The same nesting with every leaf replaced by what `make_leaf` gives for it, in order."""
    return [
        CacheList(*rebuild(cache.caches, make_leaf))
        if isinstance(cache, CacheList)
        else make_leaf(cache)
        for cache in caches
    ]
