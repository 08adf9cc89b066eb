"""`mlx-cb serve` as a process: settings, exit codes, signals: C105, C106."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from mlx_cb.cli.options import ConfiguredCommand
from mlx_cb.cli.serve import build_config, command
from mlx_cb.config import ServerConfig

SCRIPT = "replies: [{tokens: [x], repeat: true, delay_s: 0.02}]"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `mlx-cb serve` with these arguments in a process."""
    running: list[subprocess.Popen[str]] = []

    def run(*arguments: str, model: str | None = None, **environment: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.yaml"
        script.write_text(SCRIPT)
        process = subprocess.Popen(
            [sys.executable, "-m", "mlx_cb", "serve", model or f"scripted:{script}", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path), **environment},
        )  # fmt: skip
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    """Wait for the line that names the URL."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"listening on (\S+),", line):
            return found[1]
    pytest.fail("the server ended")


def ready(process: subprocess.Popen[str]) -> str:
    url = url_of(process)
    for _ in range(100):
        if httpx2.get(url + "/health").status_code == 200:
            return url
        time.sleep(0.05)
    pytest.fail("never ready")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_c105_signals_end_open_streams_soon_and_quietly(
    start: Start, number: signal.Signals, code: int
) -> None:
    process = start("--port", "0")
    url = ready(process)
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    with httpx2.stream("POST", url + "/v1/chat/completions", json=body, timeout=10) as answer:
        lines = answer.iter_lines()
        next(lines)
        started = time.monotonic()
        process.send_signal(number)
        rest = "\n".join(lines)
    _, errors = process.communicate(timeout=10)
    assert time.monotonic() - started < 5
    assert process.returncode == code
    assert "shutting down" in rest
    assert "Traceback" not in errors


def test_a_second_signal_ends_at_once(start: Start) -> None:
    process = start("--port", "0")
    url = ready(process)
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    with httpx2.stream("POST", url + "/v1/chat/completions", json=body, timeout=10) as answer:
        next(answer.iter_lines())
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(5)
        assert time.monotonic() - started < 1


def test_c106_a_busy_port_is_one_sentence_before_loading(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        process = start("--port", str(port), model="org/does-not-exist")
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 5
    assert errors.count("\n") == 1
    assert f"port {port}" in errors
    assert "in use" in errors
    assert output == ""


@pytest.mark.parametrize(
    ("arguments", "model", "code"),
    [
        (["--port", "99999"], None, 2),
        (["--scheduler", "magic"], None, 2),
        (["--kv-memory", "lots"], None, 2),
        (["--no-such-flag"], None, 2),
        (["--port", "0"], "scripted:/does/not/exist.yaml", 3),
    ],
)
def test_exit_codes(start: Start, arguments: list[str], model: str | None, code: int) -> None:
    process = start(*arguments, model=model)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in errors


def test_also_ports_serve_the_same(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start("--port", "0", "--also-port", str(port))
    url = ready(process)
    other = f"http://127.0.0.1:{port}"
    assert httpx2.get(other + "/api/version").json() == httpx2.get(url + "/api/version").json()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = busy.getsockname()[1]
        refused = start("--port", "0", "--also-port", f"{taken}")
        _, errors = refused.communicate(timeout=20)
    assert refused.returncode == 5
    assert str(taken) in errors


def test_the_printed_curl_line_works(start: Start) -> None:
    process = start("--port", "0")
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line.startswith("curl http://127.0.0.1:")
    with subprocess.Popen(line + " -s -N --max-time 1", shell=True, stdout=subprocess.PIPE) as curl:
        curl.wait(10)
    assert curl.returncode == 28  # the script never ends, so curl's time limit does
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert "POST" in errors


def parse(*arguments: str) -> object:
    assert isinstance(command, ConfiguredCommand)
    with command.make_context("serve", list(arguments)) as context:
        return build_config(context.params)


def test_flag_over_environment_over_file_over_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_CB_CONFIG", str(tmp_path / "config.toml"))
    assert parse().port == 8080  # type: ignore[attr-defined]
    (tmp_path / "config.toml").write_text('port = 1\n[serve]\nmax-num-seqs = 9\nkv-memory = "2GiB"')
    config = parse()
    assert config.port == 1  # type: ignore[attr-defined]
    assert config.engine.scheduler.max_num_seqs == 9  # type: ignore[attr-defined]
    assert config.engine.cache.kv_memory == 2 * 2**30  # type: ignore[attr-defined]
    monkeypatch.setenv("MLX_CB_PORT", "2")
    assert parse().port == 2  # type: ignore[attr-defined]
    assert parse("--port", "3").port == 3  # type: ignore[attr-defined]


def test_every_setting_reaches_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_CB_CONFIG", "/dev/null/none")
    config = parse(
        "org/m", "--host", "0.0.0.0", "--alias", "a=org/m", "--alias", "b=org/m",
        "--served-model-name", "s", "--max-num-batched-tokens", "99", "--max-model-len", "1000",
        "--kv-memory", "500MB", "--block-size", "32", "--dtype", "float16", "--attention",
        "reference", "--scheduler", "static", "--itl-target-ms", "50", "--max-queue-wait-s", "5",
        "--no-prefix-cache", "--log-format", "json", "--strict-model", "--revision", "r",
        "--ssd-cache", "/tmp/ssd", "--ssd-cache-size", "2GB", "--ssd-daily-writes", "1GB",
        "--keys", "k.json", "--tls", "c.pem,k.pem", "--allow-host", "h", "--allow-origin", "o",
        "--reasoning-key", "both", "--max-body-bytes", "1000", "--keep-alive-s", "3",
    )  # fmt: skip
    assert config.aliases == (("a", "org/m"), ("b", "org/m"))  # type: ignore[attr-defined]
    assert config.host == "0.0.0.0"  # type: ignore[attr-defined]
    assert config.keys_file == Path("k.json")  # type: ignore[attr-defined]
    assert config.tls == (Path("c.pem"), Path("k.pem"))  # type: ignore[attr-defined]
    assert (config.allowed_hosts, config.allowed_origins) == (("h",), ("o",))  # type: ignore[attr-defined]
    assert config.reasoning_key == "both"  # type: ignore[attr-defined]
    assert (config.max_body_bytes, config.keep_alive_s) == (1000, 3)  # type: ignore[attr-defined]
    assert parse().max_body_bytes == ServerConfig().max_body_bytes  # type: ignore[attr-defined]
    lan = parse("--lan")
    assert (lan.lan, lan.host, lan.tls) == (True, "0.0.0.0", "auto")  # type: ignore[attr-defined]
    engine = config.engine  # type: ignore[attr-defined]
    assert (engine.model.model, engine.model.revision) == ("org/m", "r")
    assert (engine.model.dtype, engine.model.max_model_len) == ("float16", 1000)
    assert (engine.cache.kv_memory, engine.cache.block_size) == (500_000_000, 32)
    assert engine.cache.prefix_cache is False
    assert engine.cache.ssd_cache == "/tmp/ssd"
    assert (engine.cache.ssd_cache_size, engine.cache.ssd_daily_writes) == (2 * 10**9, 10**9)
    assert parse().engine.cache.ssd_cache is None  # type: ignore[attr-defined]
    assert (engine.scheduler.policy, engine.scheduler.max_num_batched_tokens) == ("static", 99)
    assert (engine.scheduler.itl_target_ms, engine.scheduler.max_queue_wait_s) == (50, 5)
    assert engine.attention == "reference"


def test_a_tier_that_would_find_nothing_is_a_usage_error(start: Start, tmp_path: Path) -> None:
    process = start("--no-prefix-cache", "--ssd-cache", str(tmp_path / "ssd"))
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "--ssd-cache" in errors


def test_a_typo_in_the_file_is_a_usage_error(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mlx-cb").mkdir()
    (tmp_path / "mlx-cb" / "config.toml").write_text("prot = 1")
    process = start()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "prot" in errors
