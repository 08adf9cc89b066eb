"""Released coding agents do their task on the scripted engine, also when the server has trouble.

Every run also checks that each turn's prompt begins with the one before: only then does the next
turn compute nothing but its new tokens.
"""

from __future__ import annotations

import itertools
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.agents import LARGE, OPENCODE, TOOLS_SHOWN, Agent, Workplace

Serve = Callable[..., Any]
pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64",
    reason="the agents' binaries named here are for Linux x86_64",
)
TROUBLES = {
    "busy": {"turn": 1, "match": TOOLS_SHOWN, "refuse": 429, "times": 1},
    "down": {"turn": 1, "match": TOOLS_SHOWN, "refuse": 503, "times": 1},
    "breaks": {"turn": 1, "match": TOOLS_SHOWN, "text": "I", "finish": "error", "times": 1},
}


def turns(server: Any) -> list[str]:
    """The prompts of the main conversation, in order."""
    tokenizer = server.front.text.tokenizer
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in server.prompts.values()]
    return [text for text in texts if TOOLS_SHOWN in text]


def do_the_task(serve: Serve, agent: Agent, home: Path, *troubles: dict[str, Any]) -> Any:
    place = Workplace(home)
    place.make()
    server = serve(*troubles, *agent.replies(place), keep_alive_s=1.0)
    assert agent.run(place, server.url) == "HELLO\n"
    prompts = turns(server)
    assert len(prompts) >= 3
    for earlier, later in itertools.pairwise(prompts):
        assert later.startswith(earlier)
    return server


@pytest.mark.parametrize("agent", OPENCODE, ids=lambda agent: agent.name)
def test_opencode_in_three_dialects(serve: Serve, agent: Agent, tmp_path: Path) -> None:
    do_the_task(serve, agent, tmp_path / "home")


@pytest.mark.slow
@pytest.mark.parametrize("agent", LARGE, ids=lambda agent: agent.name)
def test_large_agents(serve: Serve, agent: Agent, tmp_path: Path) -> None:
    do_the_task(serve, agent, tmp_path / "home")


# Cline shows a failure in mid-stream to its user and ends; the others ask again.
TROUBLED = [
    pytest.param(agent, trouble, id=f"{agent.name}-{trouble}")
    for agent in [*OPENCODE, *LARGE]
    for trouble in TROUBLES
    if (agent.name, trouble) != ("cline", "breaks")
]


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "trouble"), TROUBLED)
def test_agents_go_on_after_trouble(
    serve: Serve, agent: Agent, trouble: str, tmp_path: Path
) -> None:
    server = do_the_task(serve, agent, tmp_path / "home", TROUBLES[trouble])
    assert all(left == 0 for left in server.engine._uses_left.values())  # it did happen


@pytest.mark.slow
@pytest.mark.parametrize("agent", [*OPENCODE, *LARGE], ids=lambda agent: agent.name)
def test_agents_go_on_after_a_restart(serve: Serve, agent: Agent, tmp_path: Path) -> None:
    place = Workplace(tmp_path / "home")
    place.make()
    first = serve(*agent.replies(place))
    second: list[Any] = []

    def restart() -> None:
        while not any(p.finish_reason == "stop" for p in first.engine.played.values()):
            time.sleep(0.005)
        first.begin_stop(0.5)
        assert first.has_stopped()
        time.sleep(1)
        port = int(first.url.rsplit(":", 1)[1])
        second.append(serve(*agent.replies(place), listen_port=port))

    restarting = threading.Thread(target=restart)
    restarting.start()
    assert agent.run(place, first.url) == "HELLO\n"
    restarting.join(10)
    assert turns(second[0])


@pytest.mark.slow
@pytest.mark.parametrize("agent", [*OPENCODE, *LARGE], ids=lambda agent: agent.name)
def test_agents_wait_for_a_long_prefill(serve: Serve, agent: Agent, tmp_path: Path) -> None:
    place = Workplace(tmp_path / "home")
    place.make()
    replies = [{**reply, "prefill_s": 10.0} if reply.get("turn") == 1 else reply
               for reply in agent.replies(place)]  # fmt: skip
    server = serve(*replies, keep_alive_s=1.0)
    assert agent.run(place, server.url) == "HELLO\n"
