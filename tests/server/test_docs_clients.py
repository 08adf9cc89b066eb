"""Every snippet of docs/clients.md is executed against a live server, as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.cli.launch import CLIENTS, ask_server
from tests.server.agents import OPENCODE, Workplace
from tests.server.npm import clients_folder, npm_package

Serve = Callable[..., Any]
DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
SNIPPETS = re.findall(r"```(bash|python|javascript)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
URL = "http://127.0.0.1:8080"
WEATHER = {"name": "get_weather", "arguments": {"city": "Paris"}}
REPLIES = (
    {"match": "<tools>", "turn": 0, "tool_calls": [WEATHER]},
    {"match": "21 degrees", "text": "It is warm. Hello from Paris."},
    {"text": "Hello from mlx-cb."},
)


def run(command: list[str], folder: Path) -> str:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "LLM_USER_PATH": str(folder / "llm")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("language", "code"), SNIPPETS, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(SNIPPETS)]
)
def test_snippet(serve: Serve, language: str, code: str, tmp_path: Path) -> None:
    server = serve(*REPLIES)
    code = code.replace(URL, server.url)
    assert URL not in code
    if language == "bash":
        if "llm " in code and not Path(sys.executable).with_name("llm").exists():
            pytest.skip("llm is not installed")
        output = run(["bash", "-euc", code], tmp_path)
    elif language == "python":
        module = re.search(r"^(?:import|from) (\w+)", code, re.MULTILINE)
        assert module is not None
        pytest.importorskip(module[1])
        output = run([sys.executable, "-c", code], tmp_path)
    else:
        folder = clients_folder()
        snippet = folder / f"{tmp_path.name}.mjs"
        snippet.write_text(code)
        output = run(["node", str(snippet)], folder)
        snippet.unlink()
    assert "Hello" in output.replace('"text":" from', "")
    assert server.engine.played


def test_every_client_of_launch_gets_its_configuration(serve: Serve) -> None:
    server = serve({"text": "x"}, script={"model": "org/name"})
    target = ask_server(server.url)
    assert (target.model, target.context) == ("org/name", 262144)
    for name, make in CLIENTS.items():
        made = make(target)
        port = server.url.rsplit(":", 1)[1]
        assert port in made, name
        if name in ("opencode", "zed", "continue"):
            json.loads(made)
        if name != "xcode":
            assert "org/name" in made


def test_launch_prints_for_a_running_server(serve: Serve) -> None:
    server = serve({"text": "x"})
    command = [sys.executable, "-m", "mlx_cb", "launch", "claude"]
    done = subprocess.run(
        [*command, "--print", "--url", server.url], capture_output=True, text=True, check=True
    )
    assert f'ANTHROPIC_BASE_URL="{server.url}"' in done.stdout
    nobody = subprocess.run(
        [*command, "--url", "http://127.0.0.1:1"], capture_output=True, text=True, check=False
    )
    assert nobody.returncode == 1
    assert "mlx-cb serve" in nobody.stderr
    assert "Traceback" not in nobody.stderr


def test_the_opencode_configuration_works(serve: Serve, tmp_path: Path) -> None:
    place = Workplace(tmp_path / "home")
    place.make()
    server = serve(*OPENCODE[0].replies(place))
    folder = place.home / ".config" / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(CLIENTS["opencode"](ask_server(server.url)))
    binary = npm_package("opencode-linux-x64", "1.18.33") / "bin" / "opencode"
    environment = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    assert place.run([str(binary), "run", "Go."], environment) == "HELLO\n"


@pytest.mark.slow
def test_the_codex_configuration_works(serve: Serve, tmp_path: Path) -> None:
    place = Workplace(tmp_path / "home")
    place.make()
    read = {"name": "exec_command", "arguments": {"cmd": "cat in.txt"}}
    write = {"name": "exec_command", "arguments": {"cmd": "tr a-z A-Z < in.txt > out.txt"}}
    server = serve(
        {"turn": 0, "tool_calls": [read]}, {"turn": 1, "tool_calls": [write]}, {"text": "Done."}
    )
    lines = CLIENTS["codex"](ask_server(server.url)).split("\n")
    *setup, _ = lines
    binary = npm_package("@openai/codex", "0.171.0") / "bin" / "codex.js"
    start = f"node {binary} exec --skip-git-repo-check -s workspace-write --disable goals Go."
    assert place.run(["bash", "-euc", "\n".join([*setup, start])], {}) == "HELLO\n"
