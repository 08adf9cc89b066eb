"""Puts a real BLAS under MLX's CPU backend on Linux; knows nothing about models or servers.

The stock Linux wheel of MLX links the reference BLAS, whose matrix product is about fifty times
slower than OpenBLAS in fp32. The dynamic linker takes a symbol from the first library that was
loaded globally, so OpenBLAS has to be loaded *before* `mlx.core`. It comes from PyPI's
`ngsolve-openblas`, which picks its kernels at run time; `cmeel-openblas` is built for AVX-512 only
and ends the process with an illegal instruction on other processors.

OpenBLAS wants `libgfortran.so.5`, which a machine without a Fortran compiler does not have under
that name. MLX's own wheel carries one under a hashed name; a copy of it in memory, with the plain
name written back, satisfies the linker and nothing has to be installed by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path

_FORTRAN_SONAME = b"libgfortran.so.5"
_active: str | None = None


def active() -> str:
    """Name of the BLAS that serves this process's CPU matrix products, for `/status`."""
    return _active or ("accelerate" if sys.platform == "darwin" else "reference (slow)")


def load() -> str:
    """Load OpenBLAS globally and return the name of the BLAS in use.

    Must run before `mlx.core` is imported; later calls return the first call's answer. Does
    nothing on other systems than Linux. Without OpenBLAS the process works, slowly, and one
    warning says so.
    """
    global _active
    if _active is not None or not sys.platform.startswith("linux"):
        return active()
    if "mlx.core" in sys.modules:
        _active = "reference (slow)"
        warnings.warn(
            "mlx was imported before mlx_cb: its slow reference BLAS stays in use. "
            "Import mlx_cb first.",
            RuntimeWarning,
            stacklevel=2,
        )
        return _active
    # One thread: the other core belongs to the front and to MLX's own stream thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        _load_fortran_runtime()
        library = ctypes.CDLL(_openblas_path(), ctypes.RTLD_GLOBAL)
        library.openblas_get_config.restype = ctypes.c_char_p
        library.openblas_get_corename.restype = ctypes.c_char_p
        version = library.openblas_get_config().decode().split()[1]
        _active = f"openblas {version} ({library.openblas_get_corename().decode()})"
    except OSError as error:
        _active = "reference (slow)"
        warnings.warn(
            f"OpenBLAS cannot be loaded ({error}); matrix products on this CPU run about 50 times "
            "slower. Hint: pip install ngsolve-openblas",
            RuntimeWarning,
            stacklevel=2,
        )
    return _active


def _openblas_path() -> str:
    """Library of the installed wheel, else the system's by its usual name."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.distribution("ngsolve-openblas").files or []:
            if file.name.startswith("libopenblas"):
                return str(file.locate())
    return "libopenblas.so.0"


def _load_fortran_runtime() -> None:
    """Make `libgfortran.so.5` resolvable, from the system or from MLX's own wheel."""
    try:
        ctypes.CDLL(_FORTRAN_SONAME.decode(), ctypes.RTLD_GLOBAL)
        return
    except OSError as missing:
        bundled = _bundled_libraries()
        fortran = next((path for path in bundled if path.name.startswith("libgfortran")), None)
        if fortran is None:
            raise OSError("no libgfortran on this system or in the mlx wheel") from missing
    for path in bundled:
        if path.name.startswith("libquadmath"):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    image = re.sub(
        rb"libgfortran-[0-9a-f]+\.so\.5[0-9.]*(?=\0)",
        lambda match: _FORTRAN_SONAME.ljust(len(match.group()), b"\0"),
        fortran.read_bytes(),
    )
    descriptor = os.memfd_create("libgfortran")
    with os.fdopen(descriptor, "wb") as memory:
        memory.write(image)
        memory.flush()
        ctypes.CDLL(f"/proc/self/fd/{descriptor}", ctypes.RTLD_GLOBAL)


def _bundled_libraries() -> list[Path]:
    """Shared libraries that the mlx CPU wheel carries beside itself."""
    spec = importlib.util.find_spec("mlx")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return [path for root in roots for path in Path(root).parent.glob("mlx_cpu.libs/*.so*")]
