"""Turns the name of an attention backend into the backend, and says why when it cannot."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType

import mlx.core as mx

from mlx_cb.attention.backend import AttentionBackend
from mlx_cb.attention.kernels import kernel_folder, launch_metal
from mlx_cb.attention.metal import MetalBackend
from mlx_cb.attention.reference import ReferenceBackend
from mlx_cb.attention.tuning import Tuning, default_tuning, gpu_architecture, load_tuning
from mlx_cb.errors import MlxCbError

_log = logging.getLogger(__name__)
NAMES = ("auto", "metal", "reference", "emulator")


def runs_on_metal() -> bool:
    """True when MLX computes on a Metal GPU by default."""
    return mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu


def make_backend(name: str, block_size: int) -> AttentionBackend:
    """The backend for `--attention NAME`; `auto` is metal where Metal is, else reference.

    Raises:
        MlxCbError: the name is unknown, or cannot work here.
    """
    if name == "auto":
        name = "metal" if runs_on_metal() else "reference"
    if name == "reference":
        return ReferenceBackend(block_size)
    if name == "metal":
        if not runs_on_metal():
            raise MlxCbError(
                "attention 'metal' needs a Metal GPU, which MLX does not find here; "
                "use 'auto' or 'reference'"
            )
        return MetalBackend(block_size, launch_metal, _tuning())
    if name == "emulator":
        launch = load_test_bench().emulator.emulate
        return MetalBackend(block_size, launch, Tuning(partition=64), name="emulator")
    raise MlxCbError(f"unknown attention backend {name!r}; choose one of {', '.join(NAMES)}")


def _tuning() -> Tuning:
    architecture = gpu_architecture()
    try:
        return load_tuning(architecture)
    except ValueError as error:
        _log.warning("default kernel tuning is used: %s", error)
        return default_tuning(architecture)


def load_test_bench() -> ModuleType:
    """tests/msl of the source checkout, under the name mlx_cb_msl.

    Raises:
        MlxCbError: this is not a source checkout, or has no clang.
    """
    if "mlx_cb_msl" in sys.modules:
        return sys.modules["mlx_cb_msl"]
    folder = kernel_folder().parent / "tests" / "msl"
    if not (folder / "__init__.py").is_file():
        raise MlxCbError("attention 'emulator' is for tests: it needs a source checkout of mlx-cb")
    spec = importlib.util.spec_from_file_location(
        "mlx_cb_msl", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mlx_cb_msl"] = module
    spec.loader.exec_module(module)
    toolchain = importlib.import_module("mlx_cb_msl.toolchain")
    try:
        toolchain.find_toolchain()
    except toolchain.MissingToolchainError as error:
        del sys.modules["mlx_cb_msl"]
        raise MlxCbError(f"attention 'emulator' cannot run here: {error}") from error
    importlib.import_module("mlx_cb_msl.emulator")
    return module
