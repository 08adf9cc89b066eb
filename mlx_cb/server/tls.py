"""TLS with certificates of our own making, or given ones.

Owns a local authority (kept for good, since people trust it) and the server's certificate from
it, which is made anew before it ends or when the machine's addresses change. The folder is private.
Knows nothing about HTTP or Bonjour.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import psutil

from mlx_cb.errors import MlxCbError
from mlx_cb.server.private_file import write_private

# iOS and macOS refuse certificates that hold longer than 825 days.
_HOLDS = timedelta(days=397)
_RENEW_BEFORE = timedelta(days=30)


class TlsError(MlxCbError):
    """No certificate can be made or read."""


class Certificates(Protocol):
    """Where the server's certificate comes from."""

    def load_into(self, context: ssl.SSLContext) -> None:
        """Put the certificate into a context; new connections use it. Raises TlsError."""
        ...

    def renew(self) -> bool:
        """Bring it up to date; True when it changed."""
        ...


class GivenCertificate:
    """A certificate and key from elsewhere; read again when the files change."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self._stamp = self._look()

    def load_into(self, context: ssl.SSLContext) -> None:
        """See Certificates."""
        try:
            context.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as error:
            files = f"{self._certificate} and {self._key}"
            raise TlsError(f"cannot use the certificate in {files}: {error}") from error

    def renew(self) -> bool:
        """See Certificates."""
        before, self._stamp = self._stamp, self._look()
        return self._stamp != before

    def _look(self) -> list[int]:
        files = (self._certificate, self._key)
        return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]


class LocalAuthority:
    """Our own authority in a folder: `ca.pem` is what others trust."""

    def __init__(self, folder: Path) -> None:
        """Make the authority if there is none yet. Raises TlsError."""
        self.certificate = folder / "ca.pem"
        self._key = folder / "ca-key.pem"
        self._server = folder / "server.pem"
        trustme = _trustme()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not (self.certificate.exists() and self._key.exists()):
                made = trustme.CA(
                    organization_name="mlx-cb", organization_unit_name=f"mlx-cb on {host_label()}"
                )
                write_private(self._key, made.private_key_pem.bytes())
                write_private(self.certificate, made.cert_pem.bytes())
            self._authority = trustme.CA.from_pem(
                self.certificate.read_bytes(), self._key.read_bytes()
            )
        except (OSError, ValueError) as error:
            raise TlsError(f"cannot use the local authority in {folder}: {error}") from error

    def load_into(self, context: ssl.SSLContext) -> None:
        """See Certificates."""
        self.renew()
        context.load_cert_chain(self._server)

    def renew(self) -> bool:
        """See Certificates."""
        names = host_names()
        if self._holds(names):
            return False
        now = datetime.now(UTC)
        leaf = self._authority.issue_cert(
            *names,
            common_name=names[0],
            organization_name="mlx-cb",
            not_before=now - timedelta(days=1),  # clocks of phones are off
            not_after=now + _HOLDS,
        )
        write_private(self._server, leaf.private_key_and_cert_chain_pem.bytes())
        return True

    def _holds(self, names: list[str]) -> bool:
        """Whether the server's certificate is ours, for these names, and for long enough."""
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature

        try:
            leaf = x509.load_pem_x509_certificate(self._server.read_bytes())
            authority = x509.load_pem_x509_certificate(self.certificate.read_bytes())
            leaf.verify_directly_issued_by(authority)
            covered = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (OSError, ValueError, InvalidSignature, x509.ExtensionNotFound):
            return False
        found = {
            *covered.get_values_for_type(x509.DNSName),
            *map(str, covered.get_values_for_type(x509.IPAddress)),
        }
        lasts = leaf.not_valid_after_utc - datetime.now(UTC) > _RENEW_BEFORE
        return lasts and set(names) <= found


def host_label() -> str:
    """This machine's name without a domain."""
    label = socket.gethostname().partition(".")[0].lower()
    return label.encode("idna").decode() if label else "localhost"


def host_names() -> list[str]:
    """All that this machine is called: `label.local` first, its own names, all its addresses."""
    label = host_label()
    names = [f"{label}.local", label, "localhost", "127.0.0.1", "::1", *lan_addresses()]
    return list(dict.fromkeys(names))


def lan_addresses() -> list[str]:
    """Addresses of this machine that others can reach, IPv4 first."""
    found: list[str] = []
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                found.append(address.address.partition("%")[0])
    usable = {
        text
        for text in found
        if not (ipaddress.ip_address(text).is_loopback or ipaddress.ip_address(text).is_link_local)
    }
    return sorted(usable, key=lambda text: (":" in text, text))


def _trustme() -> Any:
    try:
        import trustme
    except ImportError as error:
        raise TlsError(
            "making certificates needs two more packages: pip install 'mlx-cb[tls]' "
            "(or give your own: --tls CERT,KEY)"
        ) from error
    return trustme
