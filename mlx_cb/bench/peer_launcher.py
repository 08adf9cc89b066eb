"""Runs mlx_lm.server in this process, under the same BLAS as ours: `python -m … --model PATH …`.

The BLAS must be there before mlx is imported, hence a module of its own. Knows nothing about
measuring.
"""

from __future__ import annotations

import importlib
import warnings

from mlx_cb import blas


def main() -> None:
    """Load the BLAS, then be mlx_lm.server with this process's arguments."""
    print(f"BLAS: {blas.load()}", flush=True)
    # The server warns that it is not meant for production; that is no news here.
    warnings.filterwarnings("ignore", message="mlx_lm.server is not recommended")
    importlib.import_module("mlx_lm.server").main()


if __name__ == "__main__":
    main()
