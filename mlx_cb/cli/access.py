"""How `serve` lets people in: its keys, certificates, URLs and Bonjour record, from the config.

Owns the words for people and what must hold before the network is let in.
"""

from __future__ import annotations

import getpass
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_cb.cli.options import config_path
from mlx_cb.config import ServerConfig
from mlx_cb.errors import InvalidRequest

_PAIRING_S = 86400.0  # how long the link holds that is shown at the start

if TYPE_CHECKING:
    from mlx_cb.server.tls import Certificates


def tls_folder() -> Path:
    """Where the local authority is kept."""
    return config_path().parent / "tls"


def check(config: ServerConfig, *, is_named: bool) -> None:
    """Refuse to open a server to the network without a key; `--lan` makes the first one.

    `is_named`: the keys file was asked for, so that an empty one is a mistake. Raises UsageError,
    KeysError.
    """
    from mlx_cb.server.auth import is_loopback
    from mlx_cb.server.keys import read

    assert config.keys_file is not None
    has_keys = any(not record.is_expired(time.time()) for record in read(config.keys_file))
    if has_keys or (is_loopback(config.host) and not is_named):
        return
    if config.lan and not is_named:
        _make_first_key(config.keys_file)
        return
    reason = "" if is_loopback(config.host) else f"--host {config.host} lets the network in, and "
    where = f" --keys {config.keys_file}" if is_named else ""
    raise click.UsageError(
        f"{reason}{config.keys_file} has no key that holds; "
        f"make one first: mlx-cb keys add NAME{where}"
    )


def _make_first_key(path: Path) -> None:
    from mlx_cb.cli.keys import show_once
    from mlx_cb.server import keys
    from mlx_cb.server.users import check_name

    name = getpass.getuser()
    try:
        check_name(name)
    except InvalidRequest:
        name = "admin"

    def record(sha256: str) -> keys.KeyRecord:
        return keys.KeyRecord(name=name, sha256=sha256, created=time.time(), admin=True)

    show_once(name, keys.add(path, record))


def certificates(config: ServerConfig) -> Certificates | None:
    """Where the server's certificate comes from; None without TLS. Raises TlsError, LanError."""
    from mlx_cb.server import lan, tls

    if config.lan:
        lan.load()
    if config.tls is None:
        return None
    if isinstance(config.tls, str):
        return tls.LocalAuthority(tls_folder())
    return tls.GivenCertificate(*config.tls)


def url(config: ServerConfig, port: int) -> str:
    """The address to show first."""
    if config.lan:
        from mlx_cb.server.tls import host_label

        return f"{_scheme(config)}://{host_label()}.local:{port}"
    shown = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return _with_port(config, shown, port)


def further_urls(config: ServerConfig, port: int) -> list[str]:
    """All others that reach a server for the network."""
    if not config.lan:
        return []
    from mlx_cb.server.tls import lan_addresses

    return [_with_port(config, address, port) for address in [*lan_addresses(), "localhost"]]


def _scheme(config: ServerConfig) -> str:
    return "http" if config.tls is None else "https"


def _with_port(config: ServerConfig, host: str, port: int) -> str:
    return (
        f"{_scheme(config)}://[{host}]:{port}"
        if ":" in host
        else (f"{_scheme(config)}://{host}:{port}")
    )


def curl_options(config: ServerConfig) -> str:
    """What curl needs besides the question: whom to trust, and a key."""
    from mlx_cb.server.keys import read

    trust = f" --cacert {tls_folder() / 'ca.pem'}" if config.tls == "auto" else ""
    needs_key = config.keys_file is not None and bool(read(config.keys_file))
    return trust + (' -H "authorization: Bearer $MLX_CB_KEY"' if needs_key else "")


async def announce(front: Any, port: int) -> None:
    """Make a server for the network known by Bonjour until cancelled."""
    if not front.config.lan:
        return
    from mlx_cb.server.lan import stay_known

    await stay_known(port, front.served_name, _scheme(front.config))


def open_doors(front: Any, address: str) -> None:
    """Remember the address for links that commands make; in a network show a first link."""
    doors = front.doors
    if doors is None or not doors.keys.ever_had_any:
        return
    doors.sign_ins.announce(address)
    if front.config.lan:
        from mlx_cb.cli.invites import show_link
        from mlx_cb.server.links import address_of

        made = address_of(address, doors.links.make(None, _PAIRING_S))
        show_link(made, "lets one person in, once you confirm (more: mlx-cb keys invite NAME)")
