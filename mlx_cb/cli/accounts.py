"""What `mlx-cb keys` and its invitations share: the options of an account, and the file's place."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mlx_cb.cli.options import config_path
from mlx_cb.server import keys
from mlx_cb.server.keys import KeyRecord
from mlx_cb.standing import CLASSES

FILE = click.option(
    "--keys",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="MLX_CB_KEYS",
    help="The keys file; without this, keys.json beside the configuration.",
)
_ACCOUNT = (
    click.option(
        "--weight",
        default=1.0,
        show_default=True,
        type=click.FloatRange(0.001, 1000),
        help="Part of a busy machine beside others' weights.",
    ),
    click.option(
        "--class",
        "rank",
        default="interactive",
        show_default=True,
        type=click.Choice(list(CLASSES)),
        help="batch: goes after everyone who waits.",
    ),
    click.option(
        "--cache-group",
        default="",
        help="Share the prefix cache with the holders of keys of this group; they can tell by "
        "time what was asked before.",
    ),
    click.option(
        "--max-running", type=click.IntRange(1), help="Most answers at once; others wait."
    ),
    click.option("--max-queued", type=click.IntRange(1), help="Most requests that wait; then 429."),
    click.option("--max-input-tokens", type=click.IntRange(1), help="Longest prompt, tokens."),
    click.option("--max-output-tokens", type=click.IntRange(1), help="Longest answer, tokens."),
    click.option("--daily-tokens", type=click.IntRange(1), help="Prompt plus answer tokens a day."),
    click.option("--expires", help="When the key ends: 90d, 12h, or a date like 2027-01-31."),
    click.option("--admin", is_flag=True, help="May see all users, status and metrics."),
    click.option("--no-inference", is_flag=True, help="May not use the model (a monitor's key)."),
)


def account_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what somebody may."""
    for option in reversed(_ACCOUNT):
        command = option(command)
    return command


def default_file() -> Path:
    """The keys file of this person's servers."""
    return config_path().parent / "keys.json"


def account(name: str, given: dict[str, Any]) -> Callable[[str], KeyRecord]:
    """An account by its options, given its key's digest. Raises BadParameter."""
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
            rank=CLASSES[given["rank"]],
            cache_group=given["cache_group"],
            max_running=given["max_running"],
            daily_tokens=given["daily_tokens"],
            max_queued=given["max_queued"],
            max_input_tokens=given["max_input_tokens"],
            max_output_tokens=given["max_output_tokens"],
        )

    return record
