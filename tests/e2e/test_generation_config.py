"""generation_config.json over HTTP: the makers' settings, unless the client sets its own."""

from __future__ import annotations

import json
from pathlib import Path

from mlx_cb.bench.tiny import write_tiny_model
from mlx_cb.config import ModelConfig
from mlx_cb.model.resolve import resolve
from tests.e2e.server import Server


def test_the_makers_settings_hold_unless_the_client_sets_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_tiny_model(resolve(ModelConfig()), folder)
    makers = {"do_sample": True, "temperature": 0.9, "top_k": 1}  # one candidate: greedy
    (folder / "generation_config.json").write_text(json.dumps(makers))
    server = Server(str(folder))
    try:

        def text(seed: int, **sampling: float) -> str:
            answer = server.client.completions.create(
                model="x",
                prompt="Once upon a time",
                max_tokens=16,
                seed=seed,
                extra_body={"ignore_eos": True, **sampling},
            )
            return answer.choices[0].text

        greedy = text(0, temperature=0)
        assert [text(seed) for seed in (1, 2, 3)] == [greedy] * 3
        assert text(4, temperature=1.5) == greedy, "top_k is still the makers'"
        own = {text(seed, temperature=1.5, top_k=0) for seed in (1, 2, 3)}
        assert len(own) == 3
    finally:
        server.stop()
