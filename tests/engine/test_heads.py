"""Prompts of agents in the prefix cache: several heads at once, and heads whose client left."""

from __future__ import annotations

from mlx_cb.core.outputs import RequestOutput
from tests import tiny

HEADS = {name: [(7 * n + k) % 200 for k in range(120)] for n, name in enumerate("abc", start=1)}


def cached(outputs: list[RequestOutput]) -> int:
    return max(output.num_cached_tokens for output in outputs)


def test_several_heads_stay_cached_side_by_side() -> None:
    """A main agent, its sub-agent and a title request: each finds its own head again."""
    core = tiny.engine(tiny.llama_model(), prefix_cache=True)
    for name, head in HEADS.items():
        core.add(name, [*head, 1], tiny.greedy(4))
    tiny.run(core)
    for turn in range(3):
        for name, head in HEADS.items():
            core.add(f"{name}{turn}", [*head, 1, 2, turn], tiny.greedy(4))
        found = tiny.run(core)
        assert all(cached(outputs) >= 112 for outputs in found.outputs.values())


def test_a_prefix_stays_cached_after_its_client_has_gone() -> None:
    """A client that times out in a long prefill comes back with the same body: it goes on."""
    core = tiny.engine(tiny.llama_model(), prefix_cache=True, max_num_batched_tokens=16)
    prompt = [(5 * k) % 200 for k in range(160)]
    core.add("first", prompt, tiny.greedy(4))
    for _ in range(6):
        core.step()
    core.abort("first")
    tiny.run(core)
    core.add("again", prompt, tiny.greedy(4))
    collected = tiny.run(core)
    assert cached(collected.outputs["again"]) >= 64
    assert len(collected.token_ids["again"]) == 4
