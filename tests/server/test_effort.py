"""How much to think: each dialect's field reaches the template as the same variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Serve = Callable[..., Any]
SAY = [{"role": "user", "content": "x"}]
TEMPLATE = "{{ enable_thinking }}/{{ reasoning_effort }}"
FIELDS: dict[str, tuple[str, dict[str, Any], Callable[[str], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAY}, lambda e: {"reasoning_effort": e}),
    "responses": ("/v1/responses", {"input": "x"}, lambda e: {"reasoning": {"effort": e}}),
    "messages": ("/v1/messages", {"messages": SAY}, lambda e: {"output_config": {"effort": e}}),
}


@pytest.mark.parametrize("dialect", sorted(FIELDS))
def test_efforts(serve: Serve, dialect: str) -> None:
    server = serve({"text": "x"}, script={"chat_template": TEMPLATE})
    path, body, field = FIELDS[dialect]
    for effort, rendered in (
        ("low", "/low"), ("medium", "/medium"), ("high", "/high"), ("minimal", "/low"),
        ("xhigh", "/high"), ("max", "/high"), ("none", "False/"), ("", "/"),
    ):  # fmt: skip
        answer = server.post(path, {**body, **field(effort)})
        assert answer.status_code == 200, answer.text
        ids = server.prompts[answer.headers["x-request-id"]]
        assert server.front.text.tokenizer.decode(ids) == rendered
    counted = server.post("/v1/messages/count_tokens", {"messages": SAY, **field("high")}).json()
    if dialect == "messages":
        assert counted["input_tokens"] == len("/high")
