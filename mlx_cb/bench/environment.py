"""Records what a figure depends on: machine, versions, model, and what else the machine was doing.

Knows nothing about workloads.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import psutil

_PACKAGES = (
    *("mlx-cb", "mlx", "mlx-cpu", "mlx-metal", "mlx-lm", "transformers", "tokenizers"),
    *("starlette", "uvicorn", "ngsolve-openblas", "numpy"),
)


def machine() -> dict[str, object]:
    """Processor, memory, system and versions."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "versions": versions(),
        "openblas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "1 (set by mlx_cb.blas)"),
    }


def versions() -> dict[str, str]:
    """Installed versions of everything that moves the figures."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    if sys.platform.startswith("linux"):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def model_facts(folder: Path, revision: str | None = None) -> dict[str, object]:
    """Identity of a model folder: architecture, quantization, hashes of weights and tokenizer.

    In a hub cache the revision is the snapshot folder's name.
    """
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    if revision is None and folder.parent.name == "snapshots":
        revision = folder.name
    quantization = config.get("quantization") or config.get("quantization_config")
    return {
        "path": str(folder),
        "revision": revision,
        "architecture": config.get("model_type"),
        "layers": config.get("num_hidden_layers"),
        "vocabulary": config.get("vocab_size"),
        "quantization": quantization,
        "weights_sha256": _hash(sorted(folder.glob("*.safetensors"))),
        "tokenizer_sha256": _hash([folder / "tokenizer.json"]),
    }


def _hash(files: list[Path]) -> str | None:
    digest = hashlib.sha256()
    present = [file for file in files if file.is_file()]
    for file in present:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest() if present else None


@dataclass(frozen=True, slots=True)
class Load:
    """What the machine did during a measurement.

    Attributes:
        average: one-minute load average at the end; it contains the measurement's own load.
        foreign_cores: cores kept busy by anything but the client and the servers under test; None
            when a server's own share is not known.
    """

    average: float
    foreign_cores: float | None

    def as_dict(self) -> dict[str, float | None]:
        """For the report."""
        return asdict(self)


class LoadWatch:
    """Measures the machine's load from its creation to `read`."""

    def __init__(self, servers_cpu_seconds: Callable[[], list[float | None]]) -> None:
        """Takes the CPU time of each server under test; the client's is added here."""
        self._servers = servers_cpu_seconds
        self._busy_before, self._own_before = _busy_seconds(), self._all_own()
        self._began = time.monotonic()

    def read(self) -> Load:
        """Load average now, and foreign work since the creation."""
        elapsed = max(time.monotonic() - self._began, 1e-3)
        busy = _busy_seconds() - self._busy_before
        own = self._all_own()
        if own is None or self._own_before is None:
            return Load(os.getloadavg()[0], None)
        foreign = (busy - (own - self._own_before)) / elapsed
        return Load(os.getloadavg()[0], max(0.0, foreign))

    def _all_own(self) -> float | None:
        servers = self._servers()
        known = [seconds for seconds in servers if seconds is not None]
        if len(known) < len(servers):
            return None
        times = os.times()
        return sum(known) + times.user + times.system


def _busy_seconds() -> float:
    """CPU seconds spent on all cores since boot."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # guest is contained in user, guest_nice in nice.
    counted = [value for name, value in times._asdict().items() if not name.startswith("guest")]
    return float(sum(counted) - idle)
