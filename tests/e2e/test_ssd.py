"""`mlx-cb serve demo --ssd-cache`: a prompt is still known after the server was started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.server import Server

PROMPT = " ".join(f"item {index} costs {7 * index % 91} coins," for index in range(40))


def ask(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Start a server, ask, and stop it; the completion and the tier's status."""
    server = Server("demo", "--ssd-cache", str(folder), "--kv-memory", "200MB")
    try:
        completion = server.client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=6, temperature=0
        )
        return completion, server.get("/status")["ssd"]
    finally:
        server.stop()


def test_a_restarted_server_knows_the_prompt(tmp_path: Path) -> None:
    cold, status = ask(tmp_path / "ssd")
    assert status["state"] == "on"
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    num_full = (cold.usage.prompt_tokens - 1) // 16
    assert len(list((tmp_path / "ssd").rglob("*.kv"))) >= num_full
    warm, status = ask(tmp_path / "ssd")
    assert warm.choices[0].text == cold.choices[0].text
    assert warm.usage.prompt_tokens_details.cached_tokens == num_full * 16
    assert status["restored_blocks"] == num_full
