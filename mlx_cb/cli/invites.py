"""`mlx-cb keys invite`, `pair`, `asking`, `confirm`, `refuse`: people come in by a link.

Owns the words for people and the picture of a link in the terminal. What a link does is
`server.links`' business.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from mlx_cb.cli.accounts import FILE, account, account_options, default_file
from mlx_cb.cli.printing import show
from mlx_cb.server import keys
from mlx_cb.server.keys import parse_expiry
from mlx_cb.server.links import Links, address_of
from mlx_cb.server.sign_ins import file_beside

_URL = click.option("--url", help="Where the server is reached; without this, where it last was.")
_VALID = click.option("--valid", default="7d", show_default=True, help="How long the link lasts.")


@click.command("invite")
@click.argument("name")
@account_options
@_VALID
@_URL
@FILE
def invite(name: str, file: Path | None, url: str | None, valid: str, **given: Any) -> None:
    """Make a link that signs NAME's browser in, once; NAME gets an account if there is none."""
    path = file or default_file()
    base = _server_url(path, url)
    valid_s = _seconds(valid)
    if not any(record.name == name for record in keys.read(path)):
        keys.add(path, account(name, given))
    show_link(address_of(base, Links(path).make(name, valid_s)), f"lets {name} in, once")


@click.command("pair")
@_VALID
@_URL
@FILE
def pair(file: Path | None, url: str | None, valid: str) -> None:
    """Make a link for whoever opens it; `confirm` then lets him in."""
    path = file or default_file()
    base = _server_url(path, url)
    made = address_of(base, Links(path).make(None, _seconds(valid)))
    show_link(made, "lets one person in, once you confirm")


@click.command("asking")
@FILE
def asking(file: Path | None) -> None:
    """Show who waits to be let in."""
    waiting = Links(file or default_file()).asking()
    if not waiting:
        print("mlx-cb: nobody waits to be let in", file=sys.stderr)
    for one in waiting:
        until = datetime.fromtimestamp(one.ends).strftime("%H:%M")
        print(f"{one.code}  {one.name}  from {one.address}, until {until}")


@click.command("confirm")
@click.argument("code")
@FILE
def confirm(code: str, file: Path | None) -> None:
    """Let in who has the number CODE on his screen."""
    name = Links(file or default_file()).confirm(code)
    print(f"mlx-cb: {name} is let in", file=sys.stderr)


@click.command("refuse")
@click.argument("code")
@FILE
def refuse(code: str, file: Path | None) -> None:
    """Do not let in who has the number CODE."""
    name = Links(file or default_file()).refuse(code)
    print(f"mlx-cb: {name} is not let in", file=sys.stderr)


COMMANDS = (invite, pair, asking, confirm, refuse)


def show_link(address: str, what_for: str) -> None:
    """Print a link as text and, for a camera, as a picture; standard output has the text alone."""
    import segno

    print(f"mlx-cb: this link {what_for}; it is not shown again:", file=sys.stderr)
    if sys.stderr.isatty():
        segno.make(address, error="l").terminal(sys.stderr, compact=True)
    show(address)


def _server_url(path: Path, given: str | None) -> str:
    """Where the link leads. Raises UsageError while that is unknown."""
    url = given or file_beside(path).read().url
    if url is None:
        raise click.UsageError("no server has run with these keys yet; say --url https://…")
    return url.rstrip("/")


def _seconds(valid: str) -> float:
    now = time.time()
    left = parse_expiry(valid, now) - now
    if left <= 0:
        raise click.BadParameter(f"{valid} is past", param_hint="--valid")
    return left
