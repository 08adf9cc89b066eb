"""What a workload is, and the registry of all of them; adding one is one class.

A workload turns its parameters and a seed into a Plan: which calls, when, by whom. The same
parameters and seed give the same plan, whatever server it goes to. A parameter called `scale`
divides the lengths of the public traces, for machines far slower than the traces' own.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from mlx_cb.bench.calls import CallRecord, Plan, Run
from mlx_cb.bench.metrics import Figures, Slo
from mlx_cb.errors import InvalidRequest


@dataclass(frozen=True)
class Workload:
    """Parameters of a load (the dataclass fields of a subclass) and how to plan it."""

    name: ClassVar[str] = ""
    slo: ClassVar[Slo] = Slo()

    def plan(self, seed: int) -> Plan:
        """Draw up all calls."""
        raise NotImplementedError

    def figures(self, run: Run) -> Figures:
        """Figures that only this workload has, beside those of every workload."""
        return {}

    def parameters(self) -> dict[str, object]:
        """All parameters, for the report."""
        return dataclasses.asdict(self)


WORKLOADS: dict[str, type[Workload]] = {}
_Class = TypeVar("_Class", bound=type[Workload])


def workload(name: str) -> Callable[[_Class], _Class]:
    """Register a workload under its name."""

    def register(cls: _Class) -> _Class:
        cls.name = name
        WORKLOADS[name] = cls
        return cls

    return register


def make(name: str, parameters: Mapping[str, object]) -> Workload:
    """Build a workload by name; values may be strings, as from the command line.

    `steady16` is short for `steady` with `streams=16`, for every workload with `streams`.
    Raises InvalidRequest for an unknown name or parameter, or a value of the wrong type.
    """
    base, digits = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
    cls = WORKLOADS.get(base)
    if cls is None:
        raise InvalidRequest(f"no workload {name!r}; there are: {', '.join(sorted(WORKLOADS))}")
    given = dict(parameters)
    if digits:
        given["streams"] = digits
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values: dict[str, object] = {}
    for key, value in given.items():
        if key not in fields:
            raise InvalidRequest(f"{base} has no parameter {key!r}; it has: {', '.join(fields)}")
        kind: type = type(fields[key].default)
        try:
            values[key] = kind(value)
        except ValueError as error:
            raise InvalidRequest(
                f"{base}: {key} must be a {kind.__name__}, not {value!r}"
            ) from error
    return cls(**values)


def seeds(seed: int) -> Callable[[], int]:
    """A source of distinct seeds for the prompts of one plan."""
    rng = random.Random(f"prompts-{seed}")
    return lambda: rng.getrandbits(48)


def in_group(records: Sequence[CallRecord], group: str) -> list[CallRecord]:
    """Records of a group that were heard from, in the order they were sent."""
    found = [r for r in records if r.call.group == group and r.chunk_times_s]
    return sorted(found, key=lambda record: record.sent_s)
