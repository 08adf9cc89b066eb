"""Powers of two of many float32 numbers; for MLX's CPU backend, whose power takes 6 to 12 ns each.

The exponent is split into an integer, which is added to the result's exponent bits, and a rest
within a half, whose power is a polynomial: additions and products only, which `mx.compile` makes
one loop of, 3 ns each. Without a C++ compiler on the machine MLX runs them one by
one, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx

#: Of 2 ** f = 1 + f * (...), |f| <= 1/2: the largest relative error is 2e-9. Least squares,
#: reweighted until no point's error stands out (Lawson); tests/attention/test_exponential.py.
COEFFICIENTS = (
    0.6931472028559706,
    0.24022647913498282,
    0.055503324696932796,
    0.009618437366491359,
    0.0013398874866857487,
    0.00015353360611573656,
)
ROUND = 1.5 * 2.0**23  # float32 above this has no bits left for a fraction
LOWEST, HIGHEST = -127.0, 128.0  # their powers come out as zero and infinity
MIN_SIZE = 8192  # numbers; below, starting two loops takes longer than MLX's own one


def exp2(x: mx.array) -> mx.array:
    """2 ** x for float32 `x`, within 1e-7 of it; 0 from -127 and infinity from 128 on.

    Elsewhere than on a CPU, and for few numbers, this is MLX's own power.
    """
    if not is_worthwhile(x):
        return mx.power(2.0, x)
    split, join = _loops()
    # Views are outside of the loops: MLX cannot compile them for any shape.
    fraction, rounded = (array.view(mx.int32) for array in split(x))
    return join(fraction, rounded).view(mx.float32)


def is_worthwhile(x: mx.array) -> bool:
    """True when the loops here are faster than MLX's for `x`."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return bool(on_cpu and x.dtype == mx.float32 and x.size >= MIN_SIZE)


def _split(x: mx.array) -> tuple[mx.array, mx.array]:
    """2 ** (x - n), and n + ROUND, n being the integer next to x."""
    x = mx.minimum(mx.maximum(x, LOWEST), HIGHEST)
    rounded = x + ROUND
    rest = x - (rounded - ROUND)
    power = rest * COEFFICIENTS[-1] + COEFFICIENTS[-2]
    for coefficient in COEFFICIENTS[-3::-1]:
        power = power * rest + coefficient
    return power * rest + 1.0, rounded


def _join(fraction: mx.array, rounded: mx.array) -> mx.array:
    """Bits of the product of `fraction` and 2 ** n: n is in the low bits of `rounded`."""
    return fraction + mx.left_shift(rounded, 23)


@cache
def _loops() -> tuple[
    Callable[[mx.array], tuple[mx.array, mx.array]], Callable[[mx.array, mx.array], mx.array]
]:
    return mx.compile(_split, shapeless=True), mx.compile(_join, shapeless=True)
