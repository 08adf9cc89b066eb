"""The whole server with attention through the Metal kernels' own text, executed on the CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_cb.bench.tiny import write_tiny_model
from mlx_cb.config import ModelConfig
from mlx_cb.model.resolve import resolve
from tests.e2e.server import Server

PROMPTS = ["Once upon a time there was", "The sky", "def add(a, b):", "1, 2, 3, 4, 5, 6, 7,"]


def texts(server: Server) -> list[str]:
    """Four greedy completions, all at once."""

    def one(prompt: str) -> str:
        answer = server.client.completions.create(
            model="x", prompt=prompt, max_tokens=12, temperature=0
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, PROMPTS))


def test_emulated_kernels_serve_the_same_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_tiny_model(resolve(ModelConfig()), folder)
    answers = {}
    for attention in ("reference", "emulator"):
        server = Server(str(folder), "--attention", attention)
        try:
            assert server.get("/status")["model_info"]["attention"] == attention
            answers[attention] = texts(server)
        finally:
            server.stop()
    assert answers["emulator"] == answers["reference"]
    assert len(set(answers["reference"])) == len(PROMPTS), "the prompts must matter"


def test_metal_is_refused_where_there_is_none() -> None:
    with pytest.raises(RuntimeError, match="needs a Metal GPU"):
        Server("demo", "--attention", "metal")
