"""Clients in versions that cannot stand beside those of this environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.npm import CACHE

Serve = Callable[..., Any]

ANTHROPIC = """
import sys
import anthropic
assert int(anthropic.__version__.split(".")[0]) == 0
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="x", max_retries=0)
ask = dict(model="m", max_tokens=99, messages=[{"role": "user", "content": "hello"}])
tools = [{"name": "add", "input_schema": {"type": "object"}}]
with client.messages.stream(**ask, tools=tools) as stream:
    message = stream.get_final_message()
assert [block.type for block in message.content] == ["thinking", "text", "tool_use"], message
assert message.content[2].input == {"a": 1}
assert client.messages.create(**ask).stop_reason == "end_turn"
try:
    client.messages.create(**{**ask, "temperature": -1})
except anthropic.BadRequestError:
    print("ok")
"""
LITELLM = """
import sys, litellm
url = sys.argv[1]
ask = dict(messages=[{"role": "user", "content": "hello"}], api_key="x")
for model, base in (("openai/m", url + "/v1"), ("anthropic/m", url), ("ollama_chat/m", url)):
    answer = litellm.completion(model=model, api_base=base, **ask)
    assert answer.choices[0].message.content, model
    parts = litellm.completion(model=model, api_base=base, stream=True, **ask)
    assert "".join(p.choices[0].delta.content or "" for p in parts), model
try:
    long = [{"role": "user", "content": "x" * 3000}]
    litellm.completion(model="openai/m", api_base=url + "/v1", api_key="x", messages=long)
except litellm.ContextWindowExceededError:
    print("ok")
"""


def run_with(packages: str, program: str, url: str) -> None:
    """Run a program that sees these packages before all others."""
    folder: Path = CACHE.parent / "python" / packages.replace("<", "-below-")
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), packages]
        subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", program, url], capture_output=True, text=True, timeout=120,
        check=False,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin",
             "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("ok")


@pytest.mark.slow
def test_anthropic_below_one(serve: Serve) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    server = serve(
        {"match": "<tools>", "reasoning": "hm", "text": "So.", "tool_calls": [call]},
        {"text": "Hi."},
    )
    run_with("anthropic<1", ANTHROPIC, server.url)


@pytest.mark.slow
def test_litellm(serve: Serve) -> None:
    run_with("litellm", LITELLM, serve({"text": "Hi."}, script={"max_model_len": 2000}).url)
