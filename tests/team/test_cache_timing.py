"""What one user computes never tells what another one asked: counted, which no clock can blur."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from mlx_cb.engine.core import EngineCore
from tests import tiny

PAIRS = 200


@functools.cache
def model() -> tiny.llama.Model:
    return tiny.llama_model()


@dataclass(frozen=True)
class Cost:
    """What an answer took, which is all that time could tell: cached tokens, and rows computed."""

    cached: int
    rows: int
    steps: int


def cost(core: EngineCore, name: str, prompt: list[int], user: str) -> Cost:
    before = len(core.scheduler.journal.records)
    core.add(name, prompt, tiny.greedy(1), user=user)
    (output,) = (o for o in tiny.run(core).outputs[name] if o.finish_reason is not None)
    records = list(core.scheduler.journal.records)[before:]
    return Cost(output.num_cached_tokens, sum(r.rows_prefill for r in records), len(records))


def test_200_paired_probes_tell_nothing() -> None:
    """Bob asks for a secret that Alice has just asked for, or not: it costs him the same."""
    rng = random.Random(1)
    core = tiny.engine(model(), num_blocks=4096, prefix_cache=True, max_num_batched_tokens=64)
    for pair in range(PAIRS):
        length = rng.randrange(20, 120)
        known, unknown = ([rng.randrange(211) for _ in range(length)] for _ in range(2))
        cost(core, f"alice {pair}", known, "alice")
        probes = [(known, "known"), (unknown, "unknown")]
        rng.shuffle(probes)
        found = {what: cost(core, f"bob {what} {pair}", text, "bob") for text, what in probes}
        assert found["known"] == found["unknown"]
        assert found["known"].cached == 0
        assert found["known"].rows == length
        # The same probe by Alice herself tells, so the test can see what it looks for.
        again = cost(core, f"alice again {pair}", known, "alice")
        assert again.cached > 0
        assert again.rows < length


def test_a_name_that_begins_like_another_shares_nothing() -> None:
    core = tiny.engine(model(), num_blocks=256, prefix_cache=True)
    prompt = list(range(50))
    for k, user in enumerate(("a", "ab", "", "a\0", "b")):
        assert cost(core, str(k), prompt, user).cached == 0
