"""A small set of cases in which every two values of different parameters meet at least once."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

Row = dict[str, Any]


def pairwise(parameters: dict[str, list[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Greedy all-pairs: each row is the best of 40 random ones. The result never changes.

    `allowed` judges complete rows; pairs with no allowed row in 400 tries are dropped.
    """
    rng = random.Random(7)
    names = list(parameters)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i in range(len(parameters[a]))
        for j in range(len(parameters[b]))
    }
    rows: list[Row] = []
    while missing:
        seed = min(missing)
        best, covered = None, set()
        for attempt in range(400):
            index = {name: rng.randrange(len(parameters[name])) for name in names}
            index.update(dict(seed))
            if not allowed({name: parameters[name][i] for name, i in index.items()}):
                continue
            pairs = set(combinations([(name, index[name]) for name in names], 2)) & missing
            if len(pairs) > len(covered):
                best, covered = index, pairs
            if best is not None and attempt >= 40:
                break
        if best is None:
            missing.discard(seed)
            continue
        missing -= covered
        rows.append({name: parameters[name][i] for name, i in best.items()})
    return rows
