"""`mlx-cb ctl`: what an operator asks and orders of a running server, over its admin API.

Owns the words for people. A target is a user's name, or a request's id as `x-request-id` has it.
"""

from __future__ import annotations

import re
import ssl
import time
from typing import Any

import click
import httpx2

from mlx_cb.cli.options import config_path, setting
from mlx_cb.errors import MlxCbError

_REQUEST_ID = re.compile(r"[0-9a-f]{32}(-\d+)?\Z")
_MOST_SHOWN = 10

_URL = setting("--url", default="http://127.0.0.1:8080", help="Where the server listens.")
_KEY = setting("--key", help="An admin's key, where the server has keys.")


class _Refused(MlxCbError):
    """The server, or the network, said no."""


@click.group("ctl")
def command() -> None:
    """Watch and override the control of a running server.

    \b
    mlx-cb ctl status
    mlx-cb ctl pause alice
    mlx-cb ctl cancel 0f3c2b1a…   (an id from x-request-id)
    """


@command.command("status")
@_URL
@_KEY
def status(url: str, key: str | None) -> None:
    """Show what the control sees, what is in force and why, and what was done before."""
    _show(_ask("GET", "/admin/control", url, key))


def _on_server(verb: str, text: str) -> None:
    @command.command(verb, help=text)
    @_URL
    @_KEY
    def run(url: str, key: str | None) -> None:
        _ask("POST", f"/admin/control/{verb}", url, key)
        click.echo(f"mlx-cb: {verb}: done", err=True)


_on_server("freeze", "Let the control loop watch, and act on nothing.")
_on_server("unfreeze", "Let the control loop act again.")
_on_server("drain", "Finish what is here and take nothing new.")


@command.command("resume")
@click.argument("target", required=False)
@_URL
@_KEY
def resume(target: str | None, url: str, key: str | None) -> None:
    """Take requests again after a drain; with a TARGET, let that user or request go on."""
    path = "/admin/control/resume" if target is None else f"{_place(target)}/resume"
    _ask("POST", path, url, key)
    click.echo(f"mlx-cb: resume {target or ''}".rstrip() + ": done", err=True)


def _on_target(verb: str, text: str) -> None:
    @command.command(verb, help=text)
    @click.argument("target")
    @_URL
    @_KEY
    def run(target: str, url: str, key: str | None) -> None:
        _ask("POST", f"{_place(target)}/{verb}", url, key)
        click.echo(f"mlx-cb: {verb} {target}: done", err=True)


_on_target("pause", "Stop TARGET, a user or a request, until it is resumed; nothing is lost.")
_on_target("cancel", "End a request, or all requests of a user, with an error that says so.")


def _place(target: str) -> str:
    kind = "requests" if _REQUEST_ID.match(target) else "users"
    return f"/admin/{kind}/{target}"


def _ask(method: str, path: str, url: str, key: str | None) -> dict[str, Any]:
    """The answer's content. Raises MlxCbError in words for people."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx2.request(
            method, url.rstrip("/") + path, headers=headers, timeout=30, verify=_trust()
        )
    except httpx2.HTTPError as error:
        raise _Refused(f"no answer from {url}: {error}; is the server running there?") from error
    try:
        content: dict[str, Any] = answer.json()
    except ValueError:
        content = {}
    if answer.status_code != 200:
        message = (content.get("error") or {}).get("message") or f"HTTP {answer.status_code}"
        hint = "; give an admin's key with --key" if answer.status_code in (401, 403) else ""
        raise _Refused(f"{message}{hint}")
    return content


def _trust() -> ssl.SSLContext:
    """The usual authorities, and the one that `serve --lan` made on this machine."""
    context = ssl.create_default_context()
    own = config_path().parent / "tls" / "ca.pem"
    if own.is_file():
        context.load_verify_locations(own)
    return context


def _show(control: dict[str, Any]) -> None:
    click.echo(f"control: {'frozen' if control.get('frozen') else 'acting'}")
    click.echo(f"taking requests: {'no, draining' if control.get('draining') else 'yes'}")
    now = control.get("now", 0.0)
    signs = control.get("signs")
    if signs:
        gap = "-" if signs["gap_p99_s"] is None else f"{signs['gap_p99_s'] * 1e3:.0f} ms"
        jain = "-" if signs["jain"] is None else f"{signs['jain']:.3f}"
        longest = max(signs["waits"].values(), default=0.0)
        click.echo(
            f"signs: token gap p99 {gap} (allowed {signs['gap_allowed_s'] * 1e3:.0f} ms), "
            f"stall {signs['stall_s']:.2f} s, longest wait {longest:.1f} s, Jain {jain}, "
            f"preemptions {signs['preemptions_per_s']:.2g}/s, failed steps {signs['failed_steps']}"
        )
    for title, acts in (("in force", control["in_force"]), ("before", _ended(control))):
        click.echo(f"{title}:" if acts else f"{title}: nothing")
        for act in acts:
            click.echo(f"  {_line(act, now)}")
    for restart in control.get("engine_restarts", []):
        when = time.strftime("%H:%M:%S", time.localtime(restart["time"]))
        click.echo(f"  engine restart at {when}: {restart['cause']}")


def _ended(control: dict[str, Any]) -> list[dict[str, Any]]:
    return [act for act in control["records"] if act["ended"] is not None][-_MOST_SHOWN:]


def _line(act: dict[str, Any], now: float) -> str:
    of = f" ({act['target']})" if act["target"] else ""
    line = f"{act['action']}{of} by {act['by']}, {now - act['began']:.0f} s ago: {act['cause']}"
    for name, why in act["alternatives"].items():
        line += f"\n      not {name}: {why}"
    if act["ended"] is not None:
        line += f"\n      ended {now - act['ended']:.0f} s ago: {act['ended_because']}"
    return line
