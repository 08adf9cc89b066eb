"""Finds clang (the PyPI package `ziglang`, else Debian's), compiles, and caches on disk.

Owns: which compiler, its flags for runtime, kernels and lint. Knows nothing about kernels'
contents.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent.parent / ".cache" / "msl"
MIN_CLANG = 17  # bfloat arithmetic in C++

KERNEL_FLAGS = [
    "-x",
    "c++",
    "-std=c++20",
    "-O1",
    "-march=haswell",
    "-fPIC",
    "-ffreestanding",
    "-nostdinc",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-w",
    "-ftrivial-auto-var-init=pattern",
    f"-I{HERE / 'shim'}",
]
CHECK_FLAGS = [
    "-g1",
    "-fsanitize=thread",
    "-fsanitize=signed-integer-overflow,shift,array-bounds,alignment,null,float-cast-overflow,"
    "integer-divide-by-zero,bool",
    "-fsanitize-recover=all",
]
LINT_EXTENSIONS = (
    "-cl-ext=+cl_khr_fp16,-cl_khr_fp64,-__opencl_c_fp64,-__opencl_c_generic_address_space,"
    "-__opencl_c_pipes,-__opencl_c_device_enqueue"
)


class MissingToolchainError(RuntimeError):
    """No usable clang on this machine."""


@dataclass(frozen=True)
class Toolchain:
    """Commands that compile a translation unit and link a shared library."""

    compile: tuple[str, ...]
    link: tuple[str, ...]
    c_driver: tuple[str, ...]
    version: str


@cache
def find_toolchain() -> Toolchain:
    """Raises MissingToolchainError with what to install."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise MissingToolchainError("the emulator's fiber switch is written for Linux on x86-64")
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.submodule_search_locations:
        zig = str(Path(next(iter(spec.submodule_search_locations))) / "zig")
        version = _version([zig, "clang", "--version"])
        return Toolchain((zig, "clang"), (zig, "ld.lld"), (zig, "cc"), f"zig {version}")
    for name in [f"clang-{n}" for n in range(24, MIN_CLANG - 1, -1)] + ["clang"]:
        path = shutil.which(name)
        if path and _major(path) >= MIN_CLANG:
            linker = shutil.which("ld") or shutil.which("ld.lld") or path
            return Toolchain((path,), (linker,), (path,), _version([path, "--version"]))
    raise MissingToolchainError(
        f"the Metal test bench needs clang >= {MIN_CLANG}: pip install ziglang (no root needed)"
    )


def _version(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def _major(path: str) -> int:
    run = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=True)
    return int(run.stdout.split(".")[0])


@cache
def _shim_digest() -> str:
    digest = hashlib.sha256()
    files = sorted(p for p in (HERE / "shim").rglob("*") if p.is_file())
    for path in [*files, *sorted((HERE / "runtime").iterdir())]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cached(key: str, suffix: str) -> Path:
    parts = [key, _shim_digest(), find_toolchain().version]
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE / (hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + suffix)


def _run(command: list[str], text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} failed:\n{done.stderr[-6000:]}")


@cache
def load_runtime() -> ctypes.CDLL:
    """runtime/*.c, compiled once per machine and opened so that kernels find its symbols."""
    target = _cached("runtime", ".so")
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}.tmp")
        driver = list(find_toolchain().c_driver)
        sources = [str(path) for path in sorted((HERE / "runtime").glob("*.c"))]
        _run([*driver, "-shared", "-fPIC", "-O2", "-Wall", *sources, "-o", str(part)])
        part.replace(target)
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def compile_kernel(text: str, check: bool, flags: tuple[str, ...] = ()) -> Path:
    """Compile C++ text to a shared library. Raises RuntimeError with clang's words."""
    all_flags = KERNEL_FLAGS + (CHECK_FLAGS if check else []) + list(flags)
    target = _cached("\0".join([text, *all_flags]), ".so")
    if target.exists():
        return target
    tools = find_toolchain()
    with tempfile.TemporaryDirectory() as folder:
        obj = str(Path(folder) / "kernel.o")
        _run([*tools.compile, *all_flags, "-c", "-", "-o", obj], text)
        part = target.with_suffix(f".{os.getpid()}.tmp")
        _run([*tools.link, "-shared", obj, "-o", str(part)])
        part.replace(target)
    return target


def syntax_check(text: str) -> str:
    """clang's complaints about `text` read as C++ for OpenCL 2021; empty when it is clean."""
    marker = _cached("lint\0" + text, ".ok")
    if marker.exists():
        return ""
    tools = find_toolchain()
    no_headers = ["-cl-no-stdinc"]  # the prelude declares all that Metal has
    command = [
        *tools.compile,
        "-x",
        "cl",
        "-cl-std=clc++2021",
        "-fsyntax-only",
        *no_headers,
        "-Xclang",
        LINT_EXTENSIONS,
        "-",
    ]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode == 0:
        marker.touch()
        return ""
    return done.stderr or "clang failed without a word"
