"""Released npm packages for tests, in a folder that later runs use again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-cb-tests" / "npm"
CLIENTS = ("openai", "@anthropic-ai/sdk", "ollama", "ai", "@ai-sdk/openai-compatible")


def install(folder: Path, *packages: str) -> None:
    """Install packages into a folder; skips the test on a machine without npm."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
    made = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]


def npm_package(name: str, version: str) -> Path:
    """The folder of one package in one version."""
    home = CACHE / f"{name.replace('/', '+')}@{version}"
    folder = home / "node_modules" / name
    if not folder.is_dir():
        install(home, f"{name}@{version}")
    return folder


def clients_folder() -> Path:
    """A folder in which node finds the released clients."""
    folder = CACHE / "clients"
    if not all((folder / "node_modules" / name).is_dir() for name in CLIENTS):
        install(folder, *CLIENTS)
    return folder
