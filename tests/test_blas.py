"""The BLAS under MLX's CPU backend: there, missing, or too late."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=False
    )


def test_openblas_serves_matrix_products() -> None:
    done = run(
        "from mlx_cb import blas; print(blas.load()); print(blas.load())\n"
        "import mlx.core as mx, numpy as np\n"
        "a = np.random.default_rng(0).standard_normal((7, 300)).astype('f4')\n"
        "print(np.abs(np.array(mx.array(a) @ mx.array(a).T) - a @ a.T).max() < 1e-3)\n"
        "from pathlib import Path\n"
        "print('libopenblas' in Path('/proc/self/maps').read_text())"
    )
    first, second, right, mapped = done.stdout.split("\n")[:4]
    assert first == second
    assert first.startswith("openblas ")
    assert (right, mapped) == ("True", "True")
    assert done.stderr == ""


def test_without_openblas_it_works_slowly_with_one_warning() -> None:
    done = run(
        "from mlx_cb import blas\n"
        "blas._openblas_path = lambda: '/no/such/library.so'\n"
        "print(blas.load()); print(blas.load()); print(blas.active())\n"
        "import mlx.core as mx; print((mx.ones((3, 3)) @ mx.ones((3, 3))).sum().item())"
    )
    assert done.stdout.split("\n")[:4] == ["reference (slow)"] * 3 + ["27.0"]
    assert done.stderr.count("Warning") == 1
    assert "about 50 times slower" in done.stderr


def test_too_late_is_said() -> None:
    done = run("import mlx.core; from mlx_cb import blas; print(blas.load())")
    assert done.stdout == "reference (slow)\n"
    assert "Import mlx_cb first" in done.stderr
