"""`mlx-cb tls`: how other devices come to trust this server's certificates. Words for people."""

from __future__ import annotations

import hashlib
import ssl

import click

from mlx_cb.cli.access import tls_folder

_HOW = """\
This machine's own authority is in {path}
SHA-256 {fingerprint}

Copy that file (never ca-key.pem) to each device, compare the SHA-256, then:

macOS    sudo security add-trusted-cert -d -r trustRoot \\
           -k /Library/Keychains/System.keychain ca.pem
iOS      send ca.pem by AirDrop; Settings > Profile Downloaded > Install;
         then Settings > General > About > Certificate Trust Settings: switch it on
Windows  certutil -addstore -f Root ca.pem          (as administrator)
Debian   sudo cp ca.pem /usr/local/share/ca-certificates/mlx-cb.crt && sudo update-ca-certificates
Fedora   sudo cp ca.pem /etc/pki/ca-trust/source/anchors/ && sudo update-ca-trust
Firefox  Settings > Privacy & Security > View Certificates > Authorities > Import

Programs with lists of their own:
curl     --cacert ca.pem
Python   SSL_CERT_FILE=ca.pem
Node     NODE_EXTRA_CA_CERTS=ca.pem
"""


@click.group("tls")
def command() -> None:
    """Trust this server's certificates on other devices."""


@command.command("trust")
def trust() -> None:
    """Print how to trust this server on macOS, iOS, Windows and Linux."""
    from mlx_cb.server.tls import LocalAuthority

    path = LocalAuthority(tls_folder()).certificate
    der = ssl.PEM_cert_to_DER_cert(path.read_text())
    print(_HOW.format(path=path, fingerprint=hashlib.sha256(der).digest().hex(":").upper()), end="")
