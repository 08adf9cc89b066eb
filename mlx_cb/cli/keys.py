"""`mlx-cb keys`: who may use the server. A key is shown once, when it is made.

A running server notices changes by itself. Owns the words for people; the file is `server.keys`'.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from mlx_cb.cli.options import config_path
from mlx_cb.server import keys
from mlx_cb.server.keys import KeyRecord

# What a class is called, and the rank that the scheduler goes by.
_CLASSES = {"interactive": 0, "batch": 1}

_FILE = click.option(
    "--keys",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="MLX_CB_KEYS",
    help="The keys file; without this, keys.json beside the configuration.",
)


def default_file() -> Path:
    """The keys file of this person's servers."""
    return config_path().parent / "keys.json"


@click.group("keys")
def command() -> None:
    """Give people keys, list them, take them away."""


@command.command("add")
@click.argument("name")
@click.option(
    "--weight",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.001, 1000),
    help="Part of a busy machine beside others' weights.",
)
@click.option(
    "--class",
    "rank",
    default="interactive",
    show_default=True,
    type=click.Choice(list(_CLASSES)),
    help="batch: goes after everyone who waits.",
)
@click.option(
    "--cache-group",
    default="",
    help="Share the prefix cache with the holders of keys of this group; they can tell by time "
    "what was asked before.",
)
@click.option("--max-running", type=click.IntRange(1), help="Most answers at once; others wait.")
@click.option("--daily-tokens", type=click.IntRange(1), help="Prompt plus answer tokens a day.")
@click.option("--expires", help="When the key ends: 90d, 12h, or a date like 2027-01-31.")
@click.option("--admin", is_flag=True, help="May see all users, status and metrics.")
@click.option("--no-inference", is_flag=True, help="May not use the model (a monitor's key).")
@_FILE
def add(name: str, file: Path | None, **given: Any) -> None:
    """Make a key for NAME and show it, this once."""
    now = time.time()
    expires = keys.parse_expiry(given["expires"], now) if given["expires"] else None
    if expires is not None and expires <= now:
        raise click.BadParameter(f"{given['expires']} is past", param_hint="--expires")

    def record(sha256: str) -> KeyRecord:
        return KeyRecord(
            name=name,
            sha256=sha256,
            created=now,
            expires=expires,
            admin=given["admin"],
            inference=not given["no_inference"],
            weight=given["weight"],
            rank=_CLASSES[given["rank"]],
            cache_group=given["cache_group"],
            max_running=given["max_running"],
            daily_tokens=given["daily_tokens"],
        )

    show_once(name, keys.add(file or default_file(), record))


@command.command("list")
@_FILE
def list_all(file: Path | None) -> None:
    """Show who has a key, and what it allows."""
    path = file or default_file()
    records = keys.read(path)
    if not records:
        print(f"{path} has no keys; make one with: mlx-cb keys add NAME", file=sys.stderr)
        return
    rows: list[tuple[str, ...]] = [
        ("NAME", "RIGHTS", "CLASS", "WEIGHT", "RUNNING", "TOKENS/DAY", "MADE", "ENDS")
    ]
    rows += [_row(record) for record in sorted(records, key=lambda record: record.name)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


@command.command("revoke")
@click.argument("name")
@_FILE
def revoke(name: str, file: Path | None) -> None:
    """Take NAME's key away; answers that are being made go on to their end."""
    keys.revoke(file or default_file(), name)
    print(f"mlx-cb: {name} has no key any more", file=sys.stderr)


@command.command("rotate")
@click.argument("name")
@_FILE
def rotate(name: str, file: Path | None) -> None:
    """Replace NAME's key; the old one ends at once."""
    show_once(name, keys.rotate(file or default_file(), name))


def show_once(name: str, key: str) -> None:
    """Print a new key: alone on standard output, so that it can be piped."""
    print(f"mlx-cb: the key of {name}; it is stored nowhere and not shown again:", file=sys.stderr)
    print(key, flush=True)


def _row(record: KeyRecord) -> tuple[str, ...]:
    rights = [
        name for name, has in (("model", record.inference), ("admin", record.admin)) if has
    ] or ["none"]
    ends = "never" if record.expires is None else _day(record.expires)
    if record.is_expired(time.time()):
        ends += " (over)"
    return (
        record.name,
        "+".join(rights),
        next(name for name, rank in _CLASSES.items() if rank == record.rank),
        f"{record.weight:g}",
        str(record.max_running or "any"),
        str(record.daily_tokens or "any"),
        _day(record.created),
        ends,
    )


def _day(at: float) -> str:
    return datetime.fromtimestamp(at).date().isoformat()
