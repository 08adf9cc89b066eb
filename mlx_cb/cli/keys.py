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

from mlx_cb.cli import invites
from mlx_cb.cli.accounts import FILE, account, account_options, default_file
from mlx_cb.cli.printing import show
from mlx_cb.server import keys
from mlx_cb.server.keys import KeyRecord
from mlx_cb.standing import CLASSES


@click.group("keys")
def command() -> None:
    """Give people keys, list them, take them away."""


@command.command("add")
@click.argument("name")
@account_options
@FILE
def add(name: str, file: Path | None, **given: Any) -> None:
    """Make a key for NAME and show it, this once."""
    show_once(name, keys.add(file or default_file(), account(name, given)))


@command.command("list")
@FILE
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
@FILE
def revoke(name: str, file: Path | None) -> None:
    """Take NAME's key away; answers that are being made go on to their end."""
    keys.revoke(file or default_file(), name)
    print(f"mlx-cb: {name} has no key any more", file=sys.stderr)


@command.command("rotate")
@click.argument("name")
@FILE
def rotate(name: str, file: Path | None) -> None:
    """Replace NAME's key; the old one ends at once."""
    show_once(name, keys.rotate(file or default_file(), name))


def show_once(name: str, key: str) -> None:
    """Print a new key: alone on standard output, so that it can be piped."""
    print(f"mlx-cb: the key of {name}; it is stored nowhere and not shown again:", file=sys.stderr)
    show(key)


for _command in invites.COMMANDS:
    command.add_command(_command)


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
        next(name for name, rank in CLASSES.items() if rank == record.rank),
        f"{record.weight:g}",
        str(record.max_running or "any"),
        str(record.daily_tokens or "any"),
        _day(record.created),
        ends,
    )


def _day(at: float) -> str:
    return datetime.fromtimestamp(at).date().isoformat()
