"""The text of our Metal kernels, and one call of one of them as a value.

Owns: finding and reading `metal/`, what a kernel's file header declares, and the launcher that
hands a call to MLX. Knows nothing about attention. A launcher is any function from a KernelCall
to output arrays; the Metal one is here, the emulator (tests/msl) is another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

MIN_ELEMENTS = 8
"""MLX passes arrays of fewer elements as `constant T*`: another signature, another compilation."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A file of metal/kernels: `source` is the body that mx.fast.metal_kernel takes."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One dispatch. `grid` and `threadgroup` are in threads, as in mx.fast.metal_kernel."""

    kernel: Kernel
    inputs: tuple[mx.array, ...]
    template: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]


Launcher = Callable[[KernelCall], list[mx.array]]


def kernel_folder() -> Path:
    """metal/ of a source checkout, or `_metal` inside the installed package."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_metal"
    return installed if installed.is_dir() else package.parent / "metal"


def strip_comments(text: str) -> str:
    """MLX rebuilds and hashes the text on every call: shorter text is a cheaper call."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    lines = (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def kernel_names() -> list[str]:
    return sorted(path.stem for path in (kernel_folder() / "kernels").glob("*.metal"))


@cache
def load_kernel(name: str) -> Kernel:
    """Read metal/kernels/<name>.metal.

    Its comment header declares `// inputs:` and `// outputs:`, and `// header:` the parts of
    common.metal (marked `// part: x`) that it needs.

    Raises:
        ValueError: the file lacks a declaration, or is longer than 8 KB without comments.
    """
    text = (kernel_folder() / "kernels" / f"{name}.metal").read_text()
    declared = {}
    for field in ("inputs", "outputs", "header"):
        found = re.search(rf"^// {field}:(.*)$", text, flags=re.M)
        if found is None:
            raise ValueError(f"{name}.metal declares no `// {field}:` line")
        declared[field] = tuple(found.group(1).split())
    parts = _common_parts()
    header = strip_comments("".join(parts[part] for part in declared["header"]))
    source = strip_comments(text)
    if len(source) + len(header) > 8192:
        raise ValueError(f"{name}.metal is {len(source) + len(header)} bytes; the limit is 8192")
    return Kernel(name, declared["inputs"], declared["outputs"], source, header)


@cache
def _common_parts() -> dict[str, str]:
    text = (kernel_folder() / "common.metal").read_text()
    pieces = re.split(r"^// part: (\w+).*$", text, flags=re.M)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


@cache
def _metal_function(kernel: Kernel) -> Callable[..., list[mx.array]]:
    function: Callable[..., list[mx.array]] = mx.fast.metal_kernel(  # type: ignore[assignment]
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=kernel.header,
    )
    return function


def launch_metal(call: KernelCall, verbose: bool = False) -> list[mx.array]:
    """Add the call to MLX's graph. Raises RuntimeError where MLX has no Metal backend."""
    return _metal_function(call.kernel)(
        inputs=list(call.inputs),
        template=list(call.template),
        grid=call.grid,
        threadgroup=call.threadgroup,
        output_shapes=list(call.output_shapes),
        output_dtypes=list(call.output_dtypes),
        verbose=verbose,
    )


def pad_elements(array: mx.array) -> mx.array:
    """Extend a 1-d array with zeros to MIN_ELEMENTS."""
    missing = MIN_ELEMENTS - array.size
    return array if missing <= 0 else mx.concatenate([array, mx.zeros((missing,), array.dtype)])
