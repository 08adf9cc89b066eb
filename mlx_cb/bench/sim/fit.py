"""Fits the cost of passes to measured ones: least relative squares, no term below zero.

Errors are relative to what is predicted, not to what was measured: the latter would make slow
passes count less than fast ones, and the fit predict 6 % too little where passes differ by 18 %.
Knows shapes and seconds, not where they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mlx_cb.bench.sim.cost import KNOTS, FittedCost, PassShape, features

FIRST_ROWS = 1  # the constant is the first feature, the rows' slopes follow
ROUNDS = 8  # of fitting, leaving out, and weighing anew; nothing moves after six
LEAST_S = 1e-6  # no pass is shorter
OUTLIER = 2.0  # a pass that took so many times as long, or as short, did something else too
SMOOTH = 0.1  # relative error that a row costing twice its neighbour is worth: slopes seldom jump


@dataclass(slots=True)
class Measured:
    """One step: the passes in it, and the seconds they took together.

    Attributes:
        started: seconds of the machine's monotonic clock.
        tokens: handed out by the step.
    """

    shapes: list[PassShape]
    seconds: float
    started: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """What was found.

    Attributes:
        cost: of passes, in the middle of all probes.
        paces: how much longer the passes of each probe took than `cost` says; around 1.
    """

    cost: FittedCost
    paces: list[float]


def fit_cost(probes: Sequence[Sequence[Measured]]) -> Fit:
    """The cost that fits these steps best, each probe at a pace of its own: a shared machine is
    faster at one time than at another. Raises ValueError for fewer than ten steps.
    """
    steps = list(chain.from_iterable(probes))
    if len(steps) < 10:
        raise ValueError(f"{len(steps)} steps are too few to fit")
    probe_of = np.repeat(np.arange(len(probes)), [len(probe) for probe in probes])
    matrix = np.asarray([np.sum([features(s) for s in step.shapes], axis=0) for step in steps])
    seconds = np.asarray([step.seconds for step in steps])
    smooth = _smoothness(steps, matrix.shape[1])
    keep, paces, predicted = np.ones(len(steps), dtype=bool), np.ones(len(probes)), seconds
    for _ in range(ROUNDS):
        weight = 1 / predicted[keep]
        relative = np.vstack([matrix[keep] * weight[:, None], smooth])
        steady = (seconds / paces[probe_of])[keep] * weight
        coefficients = _non_negative(relative, np.concatenate([steady, np.zeros(len(smooth))]))
        predicted = np.maximum(matrix @ coefficients, LEAST_S)
        ratio = seconds / predicted
        keep = np.abs(np.log(ratio / paces[probe_of])) < np.log(OUTLIER)
        paces = _paces(ratio[keep], probe_of[keep], len(probes))
    spread = float(np.std(np.log((ratio / paces[probe_of])[keep])))
    coefficients = _extend(coefficients, steps)
    return Fit(FittedCost(tuple(float(value) for value in coefficients), spread), paces.tolist())


def _paces(ratio: np.ndarray, probe_of: np.ndarray, count: int) -> np.ndarray:
    """Mean ratio of each probe over the mean of these; 1 for a probe without steps."""
    own = [ratio[probe_of == probe] for probe in range(count)]
    paces = np.asarray([part.mean() if part.size else 1.0 for part in own])
    return paces / paces.mean()


def _smoothness(steps: Sequence[Measured], width: int) -> np.ndarray:
    """Equations that ask of each slope to be like the next one, weakly."""
    per_row = np.median([s.seconds / max(1, sum(p.rows for p in s.shapes)) for s in steps])
    equations = np.zeros((len(KNOTS) - 1, width))
    for index in range(len(KNOTS) - 1):
        equations[index, FIRST_ROWS + index : FIRST_ROWS + index + 2] = (1.0, -1.0)
    return SMOOTH * equations / per_row


def _extend(coefficients: np.ndarray, steps: Sequence[Measured]) -> np.ndarray:
    """Beyond the largest pass that was measured a row costs what it cost before."""
    largest = max(shape.rows for step in steps for shape in step.shapes)
    known = [index for index, knot in enumerate(KNOTS) if knot < largest]
    last = known[-1] if known else 0
    extended = coefficients.copy()
    for index in range(last + 1, len(KNOTS)):
        extended[FIRST_ROWS + index] = extended[FIRST_ROWS + last]
    return extended


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with coefficients of at least 0 (Lawson and Hanson 1974, algorithm NNLS)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    count = matrix.shape[1]
    passive = np.zeros(count, dtype=bool)
    solution = np.zeros(count)
    for _ in range(3 * count):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[passive] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-9:
            break
        passive[best] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            if trial[passive].min() > 0:
                solution = trial
                break
            # Go as far towards the trial as no coefficient falls below zero; drop the one at zero.
            falling = passive & (trial <= 0)
            share = (solution[falling] / (solution[falling] - trial[falling])).min()
            solution += share * (trial - solution)
            passive &= solution > 1e-12
            solution[~passive] = 0.0
            if not passive.any():
                break
    return solution / scale
