"""`--tls` and `--lan`: our own authority, given certificates, another machine that looks for us.

The other machine is a network namespace with a cable to this one.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest
import trustme
from cryptography import x509

from mlx_cb.cli import main
from mlx_cb.server import lan, serving, tls
from mlx_cb.server.serving import bind_all
from mlx_cb.server.tls import GivenCertificate, LocalAuthority, TlsError, host_label, host_names
from tests.team.conftest import Serve, Team

SCRIPT = "replies: [{text: a}]"
Start = Callable[..., "Running"]


class Running:
    """`mlx-cb serve` as a process that said where it listens."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "script.yaml").write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlx_cb", "serve", f"scripted:{folder / 'script.yaml'}",
             "--port", "0", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "XDG_CONFIG_HOME": str(folder)},
        )  # fmt: skip
        assert self.process.stderr is not None
        self.said: list[str] = []
        for line in self.process.stderr:
            self.said.append(line)
            if "ready after" in line:
                break
        self.text = "".join(self.said)
        found = re.search(r"listening on (https?)://(\S+):(\d+),", self.text)
        assert found is not None, self.text
        self.scheme, self.host, self.port = found[1], found[2], int(found[3])
        self.authority = folder / "mlx-cb" / "tls" / "ca.pem"

    def end(self) -> tuple[str, str]:
        """Stop as an operator does; returns what was written since it was ready."""
        self.process.send_signal(signal.SIGTERM)
        out, errors = self.process.communicate(timeout=15)
        assert self.process.returncode == 0
        return out, errors


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Running] = []

    def run(*arguments: str) -> Running:
        running.append(Running(tmp_path, *arguments))
        return running[-1]

    yield run
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def curl(url: str, *arguments: str, inside: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code, and status code or nothing."""
    done = subprocess.run(
        [*inside, "curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "--max-time", "10",
         *arguments, url],
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    return done.returncode, done.stdout


UNTRUSTED = 60  # curl's code for an authority that is not trusted


def test_the_authority_stays_and_its_certificate_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tls"
    first = LocalAuthority(folder)
    assert first.renew()
    assert not first.renew()
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = first.certificate.read_bytes()
    server = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert f"{host_label()}.local" in names.get_values_for_type(x509.DNSName)
    assert "127.0.0.1" in map(str, names.get_values_for_type(x509.IPAddress))
    assert server.not_valid_after_utc - datetime.now(UTC) < timedelta(days=398)
    again = LocalAuthority(folder)
    assert not again.renew()
    assert again.certificate.read_bytes() == before
    monkeypatch.setattr(tls, "lan_addresses", lambda: ["203.0.113.9"])
    assert again.renew()
    assert not again.renew()
    monkeypatch.setattr(tls, "_RENEW_BEFORE", timedelta(days=398))
    assert again.renew()
    assert again.certificate.read_bytes() == before
    (folder / "server.pem").write_text("broken")
    monkeypatch.undo()
    assert again.renew()
    (folder / "ca.pem").write_text("broken")
    with pytest.raises(TlsError, match="local authority"):
        LocalAuthority(folder)


def test_names_of_this_machine() -> None:
    names = host_names()
    assert names[0] == f"{host_label()}.local"
    assert {"localhost", "127.0.0.1", "::1"} <= set(names)
    assert not any("%" in name or name.startswith("fe80") for name in names)


@pytest.mark.parametrize(("library", "extra"), [("trustme", "tls"), ("zeroconf.asyncio", "lan")])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises((TlsError, lan.LanError), match=rf"pip install 'mlx-cb\[{extra}\]'"):
        LocalAuthority(tmp_path) if extra == "tls" else lan.load()


def test_one_port_for_ipv4_and_ipv6() -> None:
    listeners = bind_all(0)
    ports = {listener.getsockname()[1] for listener in listeners}
    families = [listener.family for listener in listeners]
    for listener in listeners:
        listener.close()
    assert len(ports) == 1
    assert families == [socket.AF_INET, socket.AF_INET6]


def test_tls_on_loopback_is_trusted_by_its_authority_only(start: Start) -> None:
    server = start("--tls", "auto")
    url = f"https://localhost:{server.port}/health"
    assert server.scheme == "https"
    assert curl(url, "--cacert", str(server.authority)) == (0, "200")
    assert curl(url)[0] == UNTRUSTED
    other = trustme.CA()
    with other.cert_pem.tempfile() as path:
        assert curl(url, "--cacert", path)[0] == UNTRUSTED
    assert curl(url, "--cacert", str(server.authority), "--tls-max", "1.1")[0] == 35
    server.end()


def test_own_certificates(start: Start, tmp_path: Path) -> None:
    authority = trustme.CA()
    files = tmp_path / "cert.pem", tmp_path / "key.pem"

    def write() -> None:
        leaf = authority.issue_cert("localhost")
        files[0].write_bytes(leaf.cert_chain_pems[0].bytes())
        files[1].write_bytes(leaf.private_key_pem.bytes())

    write()
    given = GivenCertificate(*files)
    assert not given.renew()
    server = start("--tls", f"{files[0]},{files[1]}")
    with authority.cert_pem.tempfile() as path:
        url = f"https://localhost:{server.port}/health"
        assert curl(url, "--cacert", path) == (0, "200")
    write()
    os.utime(files[0], (1, 1))
    assert given.renew()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    given.load_into(context)
    files[1].write_text("broken")
    with pytest.raises(TlsError, match="cannot use the certificate"):
        given.load_into(context)
    server.end()


def test_a_new_certificate_is_used_while_old_connections_go_on(
    serve: Serve, team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_CERTIFICATE_CHECK_S", 0.05)
    authority = LocalAuthority(tmp_path / "tls")
    reply = {"tokens": ["x"], "repeat": True, "delay_s": 0.01}
    server = serve(reply, certificates=authority, keys_file=team.path)
    host, port = server.url.removeprefix("https://").split(":")
    address = (host, int(port))
    first = ssl.get_server_certificate(address)
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    with httpx2.stream(
        "POST", server.url + "/v1/chat/completions", json=body, headers=team.as_("alice"),
        verify=False,
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        assert next(lines)
        monkeypatch.setattr(tls, "lan_addresses", lambda: ["203.0.113.9"])
        deadline = time.monotonic() + 20
        while (second := ssl.get_server_certificate(address)) == first:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for _ in range(20):
            next(lines)
    made = x509.load_pem_x509_certificate(second.encode())
    made.verify_directly_issued_by(
        x509.load_pem_x509_certificate(authority.certificate.read_bytes())
    )
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "203.0.113.9" in map(str, names.get_values_for_type(x509.IPAddress))
    # By TLS the cookie is bound to this very host.
    signed_in = httpx2.post(
        server.url + "/sign-in", json={"key": team.keys["alice"]}, verify=False
    ).headers["set-cookie"]
    assert signed_in.startswith("__Host-mlx-cb=")
    assert signed_in.endswith("; Secure")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--lan", "--host", "192.0.2.1"), 2, "leave --host away"),
        (("--tls", "cert.pem"), 2, "CERT,KEY"),
        (("--tls", "/nowhere/a,/nowhere/b"), 1, "cannot use the certificate"),
    ],
)
def test_settings_that_do_not_fit(
    tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "mlx_cb", "serve", "demo", "--port", "0", *arguments],
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert ended.returncode == code
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_how_to_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["tls", "trust"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "mlx-cb" / "tls" / "ca.pem"
    told = subprocess.run(
        ["openssl", "x509", "-in", path, "-noout", "-fingerprint", "-sha256"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert told.strip().rpartition("=")[2] in text
    for system in ("macOS", "iOS", "Windows", "Debian"):
        assert system in text


BROWSER = """
import sys, time
from zeroconf import IPVersion, ServiceBrowser, Zeroconf
found = []
class Listener:
    def add_service(self, zc, kind, name):
        info = zc.get_service_info(kind, name, 3000)
        print(info.server, info.port, info.properties[b"scheme"].decode(),
              *info.parsed_addresses(), flush=True)
        found.append(name)
    def update_service(self, *_): pass
    def remove_service(self, *_): pass
zc = Zeroconf(ip_version=IPVersion.V4Only)
ServiceBrowser(zc, sys.argv[1], Listener())
deadline = time.monotonic() + 8
while not found and time.monotonic() < deadline:
    time.sleep(0.05)
zc.close()
"""


@pytest.fixture
def other_machine() -> Iterator[tuple[str, ...]]:
    """Words that run a command on another machine: 198.51.100.2, we are 198.51.100.1."""
    name, ours, theirs = f"mcb{os.getpid()}", f"mca{os.getpid()}", f"mcz{os.getpid()}"
    inside = ("ip", "netns", "exec", name)
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no right to make network namespaces")

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    try:
        run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        run("ip", "addr", "add", "198.51.100.1/24", "dev", ours)
        run("ip", "addr", "add", "2001:db8:77::1/64", "dev", ours, "nodad")
        run("ip", "link", "set", ours, "up")
        run(*inside, "ip", "addr", "add", "198.51.100.2/24", "dev", theirs)
        run(*inside, "ip", "addr", "add", "2001:db8:77::2/64", "dev", theirs, "nodad")
        run(*inside, "ip", "link", "set", theirs, "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        run(*inside, "ip", "route", "add", "default", "via", "198.51.100.1")
        yield inside
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True)


def test_another_machine_finds_trusts_and_uses_the_server(
    start: Start, other_machine: tuple[str, ...]
) -> None:
    server = start("--lan")
    port, inside = server.port, other_machine
    name = f"{host_label()}.local"
    assert f"https://{name}:{port}" in server.text
    assert f"https://198.51.100.1:{port}" in server.text
    assert f"https://[2001:db8:77::1]:{port}" in server.text
    found = subprocess.run(
        [*inside, sys.executable, "-c", BROWSER, lan.SERVICE],
        capture_output=True, text=True, timeout=30, check=True,
    ).stdout.split()  # fmt: skip
    assert found[:3] == [f"{name}.", str(port), "https"]
    assert "198.51.100.1" in found[3:]
    trust = ("--cacert", str(server.authority), "--resolve", f"{name}:{port}:198.51.100.1")
    for host in (name, "198.51.100.1", "[2001:db8:77::1]"):
        url = f"https://{host}:{port}"
        assert curl(f"{url}/health", *trust, inside=inside) == (0, "200")
        assert curl(f"{url}/health", *trust[2:], inside=inside)[0] == UNTRUSTED
        assert curl(f"{url}/v1/models", *trust, inside=inside) == (0, "401")
    assert curl(f"http://198.51.100.1:{port}/health", inside=inside) == (0, "307")
    out, errors = server.end()
    key, link = out.splitlines()[:2]
    assert key.startswith("mcb_")
    assert link.startswith(f"https://{name}:{port}/sign-in#")
    assert link.partition("#")[2] not in errors
    assert key not in server.text + errors
    assert "Traceback" not in server.text + errors
    # The key that was shown is the one that holds, also after a restart, which makes no other.
    again = start("--lan")
    url = f"https://198.51.100.1:{again.port}/v1/models"
    header = ("-H", f"x-api-key: {key}")
    assert curl(url, "--cacert", str(server.authority), *header, inside=inside) == (0, "200")
    assert "mcb_" not in again.end()[0]


@pytest.mark.slow
def test_a_machine_with_a_new_address_is_announced_anew(
    other_machine: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lan, "ADDRESS_CHECK_S", 0.1)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(lan.stay_known(4711, "m", "https"))

    async def end() -> None:
        known.cancel()
        await asyncio.gather(known, return_exceptions=True)

    known = asyncio.run_coroutine_threadsafe(begin(), loop).result()

    def addresses() -> list[str]:
        command = [*other_machine, sys.executable, "-c", BROWSER, lan.SERVICE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.split()[3:]

    def add(*words: str) -> None:
        words = (*words, "dev", f"mca{os.getpid()}")
        subprocess.run(["ip", "addr", *words], check=True, capture_output=True)

    try:
        assert "198.51.100.1" in addresses()
        add("add", "198.51.100.77/24")
        deadline = time.monotonic() + 40
        while "198.51.100.77" not in addresses():
            assert time.monotonic() < deadline
            assert not known.done()
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
