"""Released packages for tests, from npm and PyPI, in folders that later runs use again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


def python_folder(requirement: str) -> Path:
    """A folder with a Python package that cannot stand beside those of this environment."""
    folder = CACHE.parent / "python" / requirement.replace("<", "-below-")
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder)]
        subprocess.run([*command, requirement], check=True, capture_output=True)
    return folder
