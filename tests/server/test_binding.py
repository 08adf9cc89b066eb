"""Where the server listens, and which names of this machine reach it: C107."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from mlx_cb.server import serving
from mlx_cb.server.serving import PortBusy, bind_host
from tests.server.test_serve_command import Start, ready, start

__all__ = ["start"]


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("localhost", ("localhost", "127.0.0.1", "[::1]")),
        ("127.0.0.1", ("localhost", "127.0.0.1")),
        ("::1", ("[::1]",)),
    ],
)
def test_c107_every_name_of_a_loopback_reaches_it(
    start: Start, host: str, reached: tuple[str, ...]
) -> None:
    url = ready(start("--port", "0", "--host", host))
    port = url.rsplit(":", 1)[1]
    assert httpx2.get(url + "/health").status_code == 200
    for name in reached:
        assert httpx2.get(f"http://{name}:{port}/health").status_code == 200


def test_c107_a_machine_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = serving.bind

    def without(host: str, port: int) -> socket.socket:
        if ":" in host:
            raise OSError(errno.EADDRNOTAVAIL, "no such address")
        return bind(host, port)

    monkeypatch.setattr(serving, "bind", without)
    (listener,) = bind_host("localhost", 0)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_c107_a_port_that_is_busy_in_one_family_is_busy() -> None:
    with socket.socket(socket.AF_INET6) as busy:
        busy.bind(("::1", 0))
        busy.listen()
        with pytest.raises(PortBusy):
            bind_host("localhost", busy.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.name.invalid", "2001:db8::1"])
def test_c107_an_address_of_another_machine_is_one_line(tmp_path: Path, host: str) -> None:
    command = [sys.executable, "-m", "mlx_cb", "serve", "demo", "--port", "0", "--host", host]
    key = [sys.executable, "-m", "mlx_cb", "keys", "add", "ann", "--keys", str(tmp_path / "k")]
    subprocess.run(key, check=True, capture_output=True, timeout=60)
    command += ["--keys", str(tmp_path / "k")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"cannot listen on {host}" in done.stderr
