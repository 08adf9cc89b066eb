"""Runs mlx_lm.server in this process, under the same BLAS as ours: `python -m … --model PATH …`.

The BLAS must be there before mlx is imported, hence a module of its own. `--step-journal FILE` is
ours and is not passed on: it records the server's steps.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

from mlx_cb import blas
from mlx_cb.bench.peer_journal import record_steps

JOURNAL = "--step-journal"


def main() -> None:
    """Load the BLAS, then be mlx_lm.server with this process's arguments."""
    print(f"BLAS: {blas.load()}", flush=True)
    # The server warns that it is not meant for production; that is no news here.
    warnings.filterwarnings("ignore", message="mlx_lm.server is not recommended")
    if JOURNAL in sys.argv:
        place = sys.argv.index(JOURNAL)
        record_steps(Path(sys.argv[place + 1]))
        del sys.argv[place : place + 2]
    importlib.import_module("mlx_lm.server").main()


if __name__ == "__main__":
    main()
