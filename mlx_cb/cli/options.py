"""Where a setting comes from: flag, else `MLX_CB_<FLAG>`, else the config file, else default.

Owns the config file's place and the types of values that people write (sizes, name=model).
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# Variables that are no setting of a command with a config file.
_OTHER_VARIABLES = frozenset({"MLX_CB_CONFIG", "MLX_CB_KEY", "MLX_CB_URL"})
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*\Z", re.IGNORECASE)


def setting(flag: str, **options: Any) -> Callable[[Any], Any]:
    """A click option that also reads `MLX_CB_<FLAG>`; its default is shown in the help."""
    variable = "MLX_CB_" + flag.split("/")[0].lstrip("-").replace("-", "_").upper()
    options.setdefault("show_default", options.get("default") is not None)
    return click.option(flag, envvar=variable, show_envvar=False, **options)


def config_path() -> Path:
    """`config.toml` in the user's configuration folder, or where `MLX_CB_CONFIG` says."""
    if named := os.environ.get("MLX_CB_CONFIG"):
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "mlx-cb" / "config.toml"


def read_config(command: click.Command, path: Path) -> dict[str, Any]:
    """The file's settings for a command: its own table, else the top level.

    Raises UsageError for a file that is not TOML or names a setting that does not exist.
    """
    if not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"{path}: {error}") from error
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    found = {name: value for name, value in content.items() if name not in tables}
    found |= tables.get(command.name or "", {})
    known = {parameter.name for parameter in command.params}
    settings = {name.replace("-", "_"): value for name, value in found.items()}
    if unknown := sorted(set(settings) - known):
        raise click.UsageError(f"{path} has settings that {command.name} does not know: {unknown}")
    return settings


class ConfiguredCommand(click.Command):
    """A command whose defaults come from the config file. A variable that means nothing is told."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> click.Context:
        extra.setdefault("default_map", read_config(self, config_path()))
        context = super().make_context(info_name, args, parent, **extra)
        for sentence in unknown_variables(self, os.environ):
            print(f"mlx-cb: {sentence}", file=sys.stderr)
        return context


def unknown_variables(command: click.Command, environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable with our prefix that is no setting of this command."""
    settings = [str(parameter.envvar) for parameter in command.params if parameter.envvar]
    sentences = []
    for name in sorted(environment):
        if not name.startswith("MLX_CB_") or name in _OTHER_VARIABLES or name in settings:
            continue
        near = difflib.get_close_matches(name, settings, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        sentences.append(f"the variable {name} is no setting and is ignored{hint}")
    return sentences


def told_settings(context: click.Context) -> str:
    """What was set and where, `port=1 (MLX_CB_PORT)`; empty when everything is at its default."""
    sources = click.core.ParameterSource
    found = []
    for parameter in context.command.params:
        name = parameter.name or ""
        place = {
            sources.COMMANDLINE: "command line",
            sources.ENVIRONMENT: str(parameter.envvar),
            sources.DEFAULT_MAP: str(config_path()),
        }.get(context.get_parameter_source(name) or sources.DEFAULT)
        if place is not None:
            found.append(f"{name.replace('_', '-')}={context.params[name]} ({place})")
    return ", ".join(found)


class Size(click.ParamType[Any]):
    """Bytes: `8GB`, `512MiB`, `auto` for None."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | None:
        if value is None or isinstance(value, int):
            return value
        if value == "auto":
            return None
        match = _SIZE.match(value)
        if match is None:
            self.fail(f"{value!r} is not a size like 8GB, 512MiB or auto", param, ctx)
        unit = match[2].lower()
        return int(float(match[1]) * (_UNITS | _BINARY_UNITS)[unit])


class CountOrAuto(click.ParamType[Any]):
    """A whole number above 0, or `auto` for None."""

    name = "n|auto"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | None:
        if value == "auto" or value is None:
            return None
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"{value!r} is neither a number above 0 nor auto", param, ctx)
        return int(value)


class Ports(click.ParamType[Any]):
    """Port numbers with commas between them."""

    name = "port,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers = [part.strip() for part in str(value).split(",") if part.strip()]
        if not all(part.isdecimal() and 0 < int(part) < 65536 for part in numbers):
            self.fail(f"{value!r} must be port numbers like 11434,1234", param, ctx)
        return tuple(map(int, numbers))


class Alias(click.ParamType[Any]):
    """`NAME=MODEL`."""

    name = "name=model"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        name, equals, model = value.partition("=")
        if not (name and equals and model):
            self.fail(f"{value!r} must have the form NAME=MODEL", param, ctx)
        return name, model


AUTO = "auto"


class TlsFiles(click.ParamType[Any]):
    """`auto`, or the files `CERT,KEY`."""

    name = "auto|cert,key"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == AUTO or isinstance(value, tuple):
            return value
        certificate, comma, key = str(value).partition(",")
        if not (certificate and comma and key):
            self.fail(f"{value!r} must be auto or two files like CERT,KEY", param, ctx)
        return Path(certificate), Path(key)
