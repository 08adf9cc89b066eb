"""The server as a service: a bare environment, a clock that jumps, settings that are told.

C108, C109, C110.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_cb.cli.options import unknown_variables
from mlx_cb.cli.serve import command
from tests.server.test_serve_command import Start, ready, start
from tests.team.conftest import Serve, Team, serve, stopping, team

__all__ = ["serve", "start", "stopping", "team"]

REPLY = 'replies: [{text: "é漢🎉"}]'
CHAT = {"messages": [{"role": "user", "content": "é漢🎉"}]}
ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize("how", ["bare", "no home", "closed input", "closed output", "umask"])
def test_c108_a_bare_environment_changes_nothing(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.yaml"
    script.write_text(REPLY, encoding="utf-8")
    # The interpreter's name is absolute; nothing else of the shell's is left.
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ROOT, "LC_ALL": "C"}
    if how != "no home":
        environment["HOME"] = str(tmp_path)
    else:
        environment["MLX_CB_CONFIG"] = str(tmp_path / "config.toml")
    read, write = os.pipe()
    os.close(read)  # whoever read it has gone
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_cb", "serve", f"scripted:{script}", "--port", "0"],
        cwd="/",
        env=environment,
        stdin=subprocess.DEVNULL if how != "closed input" else None,
        stdout=write if how == "closed output" else subprocess.PIPE,
        stderr=subprocess.PIPE,
        umask=0o077 if how == "umask" else -1,
        preexec_fn=(lambda: os.close(0)) if how == "closed input" else None,
    )
    os.close(write)
    try:
        assert process.stderr is not None
        said = b""
        while b"ready after" not in said:
            line = process.stderr.readline()
            assert line, said.decode()
            said += line
        found = re.search(rb"listening on (\S+),", said)
        assert found is not None
        url = found[1].decode()
        time.sleep(0.2)  # what it prints last is printed by then
        answer = httpx2.post(url + "/v1/chat/completions", json=CHAT, timeout=20)
        assert answer.json()["choices"][0]["message"]["content"] == "é漢🎉"
    finally:
        process.terminate()
        _, rest = process.communicate(timeout=20)
    assert b"Traceback" not in said + rest
    assert process.returncode == 0


def test_c109_a_jump_of_the_wall_clock_is_not_noticed(
    serve: Serve, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve({"tokens": ["x"] * 40, "delay_s": 0.02}, keys_file=team.path)
    alice = team.as_("alice")
    right, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: right() + ahead[0])
    answers: list[Any] = []

    def ask() -> None:
        body = CHAT | {"stream": True}
        answers.append(server.post("/v1/chat/completions", body, headers=alice).text)

    thread = threading.Thread(target=ask)
    thread.start()
    for jump in (86400.0, -3600.0):
        time.sleep(0.2)
        ahead[0] += jump
        assert server.get("/health").status_code == 200
    thread.join()
    assert answers[0].count('"content":"x"') == 40
    assert answers[0].rstrip().endswith("[DONE]")
    assert server.post("/v1/chat/completions", CHAT, headers=alice).status_code == 200
    metrics = server.get("/metrics", headers=team.as_("boss")).text
    values = [line.rsplit(" ", 1)[1] for line in metrics.splitlines() if line[:1] != "#"]
    assert not [value for value in values if value.startswith("-")]
    days = server.get("/usage", headers=alice).json()["days"]
    assert all(day["seconds"] >= 0 and day["machine_seconds"] >= 0 for day in days)


def test_c109_guesses_are_held_back_by_a_clock_that_cannot_jump(
    serve: Serve, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    for k in range(6):
        server.get("/status", headers={"x-api-key": f"mcb_{k}"})
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 86400)
    assert server.get("/status", headers={"x-api-key": "mcb_another"}).status_code == 429


def test_c110_what_is_set_is_told_with_its_place(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mlx-cb").mkdir()
    (tmp_path / "mlx-cb" / "config.toml").write_text("max-num-seqs = 9\nport = 1")
    process = start(
        "--port", "0", MLX_CB_MAX_NUM_SEQS="8", MLX_CB_ITL_TARGET_MS="70", MLX_CB_PROT="1"
    )
    url = ready(process)
    settings = httpx2.get(url + "/status").json()["settings"]
    assert settings["engine"]["scheduler"]["max_num_seqs"] == 8
    assert settings["port"] == 0
    process.terminate()
    _, rest = process.communicate(timeout=20)
    assert "Traceback" not in rest


def test_c110_the_line_that_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("max-num-seqs = 9\nport = 1")
    environment = {
        "MLX_CB_CONFIG": str(tmp_path / "config.toml"), "MLX_CB_ALSO_PORT": "1x",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mlx_cb", "serve"],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "1x" in done.stderr
    from mlx_cb.cli.options import told_settings

    for name, value in {**environment, "MLX_CB_ALSO_PORT": "2"}.items():
        monkeypatch.setenv(name, value)
    with command.make_context("serve", ["org/m", "--port", "3"]) as context:
        told = told_settings(context)
    assert "port=3 (command line)" in told
    assert "also-port=(2,) (MLX_CB_ALSO_PORT)" in told
    assert f"max-num-seqs=9 ({tmp_path / 'config.toml'})" in told
    assert "host" not in told


def test_c110_a_variable_that_means_nothing_is_told() -> None:
    given = {"MLX_CB_PROT": "1", "MLX_CB_PORT": "1", "MLX_CB_CONFIG": "x", "HOME": "/"}
    (sentence,) = unknown_variables(command, given)
    assert "MLX_CB_PROT" in sentence
    assert "did you mean MLX_CB_PORT?" in sentence
