"""Every snippet of docs/clients.md is executed against a live server, as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.cli.launch import CLIENTS, ask_server
from mlx_cb.config import ServerConfig
from mlx_cb.sampling_params import MAX_LOGPROBS
from mlx_cb.server import body, structured
from mlx_cb.server.compression import ENCODINGS
from mlx_cb.server.connections import ConnectionLimits
from mlx_cb.server.dialects import openai_responses
from mlx_cb.server.generate_input import MOST_CHOICES, MOST_EMBEDDINGS
from tests.server.agents import LARGE, OPENCODE, Agent, Workplace
from tests.server.npm import clients_folder, python_folder

Serve = Callable[..., Any]
DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
SNIPPETS = re.findall(r"```(bash|python|javascript)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
AGENT_SNIPPETS = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
URL = "http://127.0.0.1:8080"
WEATHER = {"name": "get_weather", "arguments": {"city": "Paris"}}
REPLIES = (
    {"match": "<tools>", "turn": 0, "tool_calls": [WEATHER]},
    {"match": "21 degrees", "text": "It is warm. Hello from Paris."},
    {"text": "Hello from mlx-cb."},
)


def run(command: list[str], folder: Path, **more: str) -> str:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "LLM_USER_PATH": str(folder / "llm")}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", **more}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_snippet_is_executed_by_one_of_the_tests_below() -> None:
    opened = re.findall(r"^```(\w*)\n", DOCUMENT.read_text(), re.MULTILINE)[::2]
    assert set(opened) == {"bash", "python", "javascript", "sh"}
    assert len(opened) == len(SNIPPETS) + len(AGENT_SNIPPETS)


def test_the_limits_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text().partition("\n## Limits\n")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", text, re.MULTILINE)
    told = {name: [int(n) for n in re.findall(r"(?<![\w-])\d+", limit)] for name, limit in rows}
    connections = ConnectionLimits()
    limits = {
        "a request's body, also unpacked": [ServerConfig().max_body_bytes // 2**20],
        "objects and lists within each other": [body.DEEPEST, body.LARGEST_CHECKED // 2**20],
        "keys given twice": [body.LARGEST_CHECKED // 2**20],
        "time for a body": [int(body.PATIENCE_S), body.SLOWEST],
        "a request's headers": [connections.head_bytes // 1024, int(connections.head_s)],
        "`n` times the number of prompts": [MOST_CHOICES],
        "texts in one request for embeddings": [MOST_EMBEDDINGS],
        "`logprobs`, `top_logprobs`": [MAX_LOGPROBS],
        "a JSON schema": [structured.LARGEST_SCHEMA // 1024, structured.DEEPEST_SCHEMA],
        "remembered responses (`previous_response_id`)": [
            openai_responses.REMEMBERED, openai_responses.LARGEST_MEMORY // 2**20,
        ],
    }  # fmt: skip
    for name, values in limits.items():
        assert told[name] == values, name
    assert ", ".join(ENCODINGS) in text
    assert f"carry a sign of life every {ServerConfig().keep_alive_s:g} s" in DOCUMENT.read_text()


@pytest.mark.parametrize(
    ("language", "code"),
    [
        pytest.param(kind, code, id=f"{n}-{kind}", marks=pytest.mark.slow)
        if "litellm" in code
        else pytest.param(kind, code, id=f"{n}-{kind}")
        for n, (kind, code) in enumerate(SNIPPETS)
    ],
)
def test_snippet(serve: Serve, language: str, code: str, tmp_path: Path) -> None:
    is_embedding = "embed" in code
    server = serve(*REPLIES, script={"embedding_size": 8} if is_embedding else None)
    code = code.replace(URL, server.url)
    assert URL not in code
    if language == "bash":
        if "llm " in code and not Path(sys.executable).with_name("llm").exists():
            pytest.skip("llm is not installed")
        output = run(["bash", "-euc", code], tmp_path)
    elif language == "python":
        module = re.search(r"^(?:import|from) (\w+)", code, re.MULTILINE)
        assert module is not None
        more = {}
        if module[1] == "litellm":
            more["PYTHONPATH"] = str(python_folder("litellm"))
        else:
            pytest.importorskip(module[1])
        output = run([sys.executable, "-c", code], tmp_path, **more)
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


def put_on_path(folder: Path, agent: Agent) -> None:
    """Commands named as in the document, for this tree's `mlx-cb` and for the agent."""
    folder.mkdir()
    commands = {"mlx-cb": [sys.executable, "-m", "mlx_cb"], agent.command: agent.binary()}
    for name, command in commands.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (folder / name).chmod(0o755)


def test_every_agent_has_a_snippet() -> None:
    starts = [snippet.strip().split("\n")[-1].split()[0] for snippet in AGENT_SNIPPETS]
    assert set(starts) == {agent.command for agent in [OPENCODE[0], *LARGE]}


@pytest.mark.parametrize(
    "snippet",
    [
        pytest.param(snippet, id=snippet.strip().split("\n")[-1].split()[0],
                     marks=[] if "opencode" in snippet else pytest.mark.slow)
        for snippet in AGENT_SNIPPETS
    ],
)  # fmt: skip
def test_agent_snippet(serve: Serve, snippet: str, tmp_path: Path) -> None:
    command = snippet.strip().split("\n")[-1].split()[0]
    agent = next(a for a in [OPENCODE[0], *LARGE] if a.command == command)
    place = Workplace(tmp_path / "home")
    place.make()
    server = serve(*agent.replies(place))
    put_on_path(tmp_path / "bin", agent)
    environment = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MLX_CB_URL": server.url,
        **agent.environment,
    }
    try:
        assert place.run(["bash", "-euc", snippet], environment) == "HELLO\n"
    finally:
        place.end_daemons()
