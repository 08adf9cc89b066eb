"""How the kernels are cut into simdgroups, tiles and partitions on each GPU generation.

Owns: the numbers, their defaults, and the JSON file that `mlx-cb selftest --bench` writes with
what it measured on this machine. The defaults come from published work on other kernels
(reference/metal.md §2); none was measured by us. Knows nothing about kernels' texts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Tuning:
    """Numbers that change speed and never results.

    Attributes:
        registers: floats of output one simdgroup accumulates in paged_decode (heads x rows x dim).
        key_simdgroups: simdgroups that share the keys of one head in paged_decode.
        keys_per_step: keys that a simdgroup of paged_decode takes at once at head dim <= 128.
        partition: tokens of context per threadgroup once the context is split.
        fill: split while a launch has fewer threadgroups than this (8 per GPU core).
        prefill_rows: query rows per threadgroup of paged_prefill at head dim <= 128.
        qmm_max_rows: most rows for which qmm_small is preferred to MLX's own matmul; 0 is never.
    """

    registers: int = 512
    key_simdgroups: int = 8
    keys_per_step: int = 4
    partition: int = 512
    fill: int = 80
    prefill_rows: int = 32
    qmm_max_rows: int = 0


# The architecture string ends in the chip's size: p phone, g base, s Pro/Max, c Max, d Ultra.
# MLX reads quantized weights once per row before generation 15 (reference/peers.md §0).
_FILL_BY_SIZE = {"p": 40, "g": 80, "s": 160, "c": 320, "d": 640}
_RE_READS_WEIGHTS = ("applegpu_g13", "applegpu_g14")
QMM_ROWS = 8


def default_tuning(architecture: str) -> Tuning:
    """Tuning for an architecture string such as `applegpu_g14s`; any string is accepted."""
    return Tuning(
        fill=_FILL_BY_SIZE.get(architecture[-1:], Tuning().fill),
        qmm_max_rows=QMM_ROWS if architecture.startswith(_RE_READS_WEIGHTS) else 0,
    )


def tuning_file() -> Path:
    return Path.home() / ".cache" / "mlx-cb" / "tuning.json"


def load_tuning(architecture: str, path: Path | None = None) -> Tuning:
    """Defaults for `architecture`, overridden by what the file measured for it.

    Raises:
        ValueError: the file is not ours: bad JSON, an unknown name, or not a whole number.
    """
    tuning = default_tuning(architecture)
    path = path or tuning_file()
    if not path.exists():
        return tuning
    try:
        measured = json.loads(path.read_text()).get(architecture, {})
        if not all(isinstance(v, int) for v in measured.values()):
            raise TypeError("every value is a whole number")
        return replace(tuning, **measured)
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}; delete it or run `mlx-cb selftest --bench`") from error


def save_tuning(architecture: str, tuning: Tuning, path: Path | None = None) -> Path:
    """Write `tuning` for this architecture, keeping the other rows. Returns the file."""
    path = path or tuning_file()
    rows = json.loads(path.read_text()) if path.exists() else {}
    rows[architecture] = asdict(tuning)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=2, sort_keys=True) + "\n")
    return path


def gpu_architecture() -> str:
    """Architecture of this machine's GPU, or `none`."""
    if not mx.metal.is_available():
        return "none"
    return str(mx.device_info().get("architecture", "unknown"))
