"""Writes every captured kernel text to a folder, so that Apple's compiler can judge it on a Mac.

    python -m tests.msl.export FOLDER

Each file is what MLX compiles: its own prefix is included from the installed wheel's headers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mlx_cb.attention.tuning import Tuning
from mlx_cb.model.selftest import kernel_cases

from .capture import capture

PREFIX = '#include "mlx/backend/metal/kernels/utils.h"\n'


def export(folder: Path) -> int:
    """Write one .metal file per distinct text of the self-test. Returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    for case in kernel_cases(Tuning()):
        for call in case.build().calls[:1]:
            text = capture(call)
            if text in seen:
                continue
            seen.add(text)
            (folder / f"{len(seen):03d}_{call.kernel.name}.metal").write_text(PREFIX + text)
    return len(seen)


if __name__ == "__main__":
    print(export(Path(sys.argv[1])), "kernels written to", sys.argv[1])
