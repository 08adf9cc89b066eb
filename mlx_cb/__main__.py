"""`python -m mlx_cb` and the `mlx-cb` script: the same command line."""

from __future__ import annotations

import sys

from mlx_cb.cli import main

if __name__ == "__main__":
    sys.exit(main())
