"""Lets the C heap keep what a step's arrays were in, for the next step; Linux with glibc only.

MLX's CPU backend takes every array from malloc. glibc maps arrays of 32 MB and more anew each
time, such as the logits of 171 rows of the demo model: the system clears every page of them, step
after step. Kept memory is given back when the engine rests.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 2**30  # bytes; what is larger is mapped


def keep_arrays() -> None:
    """From now on freed arrays of up to `LARGEST` bytes stay in the heap."""
    library = _glibc()
    if library is not None:
        library.mallopt(M_MMAP_THRESHOLD, LARGEST)
        library.mallopt(M_TRIM_THRESHOLD, LARGEST)


def give_back() -> None:
    """Return free memory of the heap to the system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
