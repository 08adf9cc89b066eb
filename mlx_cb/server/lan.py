"""Makes the server known in the local network by Bonjour, so that nobody types an address.

Owns the record's content. Knows nothing about TLS, keys or how the server listens.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from mlx_cb.errors import MlxCbError
from mlx_cb.server.tls import host_label, lan_addresses

SERVICE = "_mlx-cb._tcp.local."
ADDRESS_CHECK_S = 10.0
_log = logging.getLogger("mlx_cb.server")


class LanError(MlxCbError):
    """The server cannot be made known."""


def load() -> Any:
    """The zeroconf library. Raises LanError when it is not installed."""
    try:
        import zeroconf.asyncio
    except ImportError as error:
        raise LanError("--lan needs one more package: pip install 'mlx-cb[lan]'") from error
    return zeroconf


async def stay_known(port: int, model: str, scheme: str) -> None:
    """Answer who asks for `_mlx-cb._tcp` (and for web servers), until cancelled.

    A machine that changes networks is made known anew, with its new addresses. A network that
    allows no multicast is no reason not to serve: that is logged.
    """
    zeroconf = load()
    while True:
        addresses = lan_addresses()
        try:
            announcer = _announcer(zeroconf, addresses)
        except OSError as error:
            _log.warning("the server is not announced by Bonjour: %s", error)
            await _until_other_than(addresses)
            continue
        try:
            for service in (SERVICE, f"_{scheme}._tcp.local."):
                record = _record(zeroconf, service, port, model, scheme)
                await _register(zeroconf, announcer, record)
            await _until_other_than(addresses)
        finally:
            await announcer.async_unregister_all_services()
            await announcer.async_close()
        _log.info("this machine's addresses are now %s", ", ".join(lan_addresses()) or "none")


async def _until_other_than(addresses: list[str]) -> None:
    while lan_addresses() == addresses:
        await asyncio.sleep(ADDRESS_CHECK_S)


def _announcer(zeroconf: Any, addresses: list[str]) -> Any:
    """One that speaks on the addresses which others can reach. Raises OSError for a bad network."""
    if not addresses:
        raise OSError("this machine has no address in a network")
    has_ipv6 = any(":" in address for address in addresses)
    version = zeroconf.IPVersion.All if has_ipv6 else zeroconf.IPVersion.V4Only
    return zeroconf.asyncio.AsyncZeroconf(interfaces=addresses, ip_version=version)


def _record(zeroconf: Any, service: str, port: int, model: str, scheme: str) -> Any:
    label = host_label()
    return zeroconf.ServiceInfo(
        service,
        f"mlx-cb on {label}.{service}",
        port=port,
        addresses=[_packed(address) for address in lan_addresses()],
        properties={"scheme": scheme, "model": model[:200], "path": "/"},
        server=f"{label}.local.",
    )


def _packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


async def _register(zeroconf: Any, announcer: Any, record: Any) -> None:
    try:
        sending = await announcer.async_register_service(
            record, allow_name_change=True, cooperating_responders=True
        )
        await sending
    except (OSError, zeroconf.Error) as error:
        _log.warning("the server is not announced as %s: %s", record.type, error)
