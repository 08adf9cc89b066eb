"""Model swap and unload (reference/cases.md): a server is one model, and it keeps it.

Nothing that is asked of a server loads another model or unloads its own, so there is no swap that
could end a stream. The memory of idle blocks is what idle time is counted for.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from mlx_cb.config import CacheConfig, EngineConfig
from mlx_cb.engine.core import EngineCore
from mlx_cb.engine.idle_memory import RELEASE_AFTER_S, IdleMemory
from tests import tiny
from tests.e2e.server import Server

PROMPT = "Count up from one, one number per line:"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("demo", "--strict-model", "--kv-memory", "200MB")
    yield made
    made.stop()


def ask(server: Server, max_tokens: int = 6, **more: Any) -> Any:
    return server.client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=max_tokens, temperature=0, **more
    )


def test_c116_a_request_for_another_model_leaves_the_answer_in_progress_alone(
    server: Server,
) -> None:
    """B is refused at once, A is answered beside A's stream, and that goes on to its end.

    That no prefix of A is used for B is in engine/test_ssd.py, where both share a folder.
    """
    alone = ask(server, 40).choices[0].text
    pid = server.get("/status")["worker_pid"]
    stream, pieces = ask(server, 40, stream=True), []
    for number, chunk in enumerate(stream):
        pieces.append(chunk.choices[0].text)
        if number == 10:
            with pytest.raises(openai.NotFoundError, match="'other' is not here"):
                server.client.completions.create(model="other", prompt=PROMPT, max_tokens=1)
            beside = ask(server).choices[0].text
            assert beside
            assert alone.startswith(beside)
    assert "".join(pieces) == alone
    status = server.get("/status")
    assert (status["worker_pid"], status["restarts"]) == (pid, 0)


@pytest.mark.slow
def test_c116_a_model_that_cannot_be_loaded_harms_no_other(server: Server, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    command = [sys.executable, "-m", "mlx_cb", "serve", str(tmp_path), "--port", "0"]
    broken = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert broken.returncode == 3, broken.stderr
    assert ask(server).choices[0].text


def test_c117_keep_alive_never_unloads_what_others_use(server: Server) -> None:
    ask(server)
    pid = server.get("/status")["worker_pid"]
    for keep_alive in (0, -1, "5m", 300, "0s"):
        body = {"model": "demo", "prompt": PROMPT, "stream": False, "keep_alive": keep_alive}
        answer = httpx2.post(
            f"{server.url}/api/generate", json=body | {"options": {"num_predict": 1}}, timeout=60
        )
        assert answer.status_code == 200, answer.text
    status = server.get("/status")
    assert (status["worker_pid"], status["restarts"]) == (pid, 0)
    again = ask(server)
    assert again.usage.prompt_tokens_details.cached_tokens > 0, "nothing was thrown away"


def test_c117_idle_time_is_counted_from_the_end_of_the_last_request() -> None:
    """A generation that takes longer than the limit, and one that waits, keep the blocks."""
    now = [0.0]
    config = EngineConfig(cache=CacheConfig(block_size=8, kv_memory=2**22))
    core = EngineCore(config, tiny.loaded_model(tiny.llama_model()), clock=lambda: now[0])
    idle = IdleMemory(core, clock=lambda: now[0])
    prompt = list(range(40))
    core.add("long", prompt, tiny.greedy(8))
    for _ in range(4):  # it takes twice as long as idle blocks are kept
        now[0] += RELEASE_AFTER_S / 2
        core.step()
        idle.rest()
        assert core.scheduler.kv_cache.pool.num_used > 0
    tiny.run(core)
    ended = now[0]
    now[0] = ended + RELEASE_AFTER_S - 1
    idle.rest()
    core.add("queued", [*prompt, 1, 2], tiny.greedy(8))
    now[0] = ended + RELEASE_AFTER_S + 1
    assert core.has_work, "which is why the worker does not give anything back now"
    collected = tiny.run(core)
    assert collected.outputs["queued"][-1].num_cached_tokens >= len(prompt)
    idle.rest()
    assert core.scheduler.kv_cache.pool.blocks, "the clock has started anew"
    now[0] += RELEASE_AFTER_S
    idle.rest()
    assert not core.scheduler.kv_cache.pool.blocks
