"""A family's tiny model, built once, and what it answers by itself."""

from __future__ import annotations

import functools

import mlx.nn as nn

from tests import tiny
from tests.families.build import build


@functools.cache
def model(family: str) -> nn.Module:
    return build(family)


@functools.cache
def solo(family: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return tiny.solo(model(family), list(prompt), max_tokens)
