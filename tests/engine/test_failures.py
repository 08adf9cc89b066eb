"""A step that fails takes its own requests with it and nobody else."""

from __future__ import annotations

import pytest

from mlx_cb.core.outputs import FinishReason
from mlx_cb.errors import ContextLengthExceeded, InvalidRequest
from tests import tiny


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_failed_step_ends_its_requests_and_the_others_go_on(
    pipelined: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.llama_model()
    core = tiny.engine(model, pipelined=pipelined, prefix_cache=True, max_num_seqs=2)
    for index in range(4):
        core.add(f"r{index}", [index + 1] * 12, tiny.greedy(10))
    collected = tiny.Collected()
    for _ in range(4):
        collected.take(core.step())
    original = getattr(core.runner, where)

    def broken(*args: object) -> object:
        monkeypatch.setattr(core.runner, where, original)
        raise RuntimeError("no luck")

    monkeypatch.setattr(core.runner, where, broken)
    tiny.run(core, collected)
    core.scheduler.check_integrity()
    assert core.scheduler.kv_cache.pool.num_used == 0
    assert core.counters.failed_steps == 1
    for index in range(4):
        name = f"r{index}"
        if index < 2:
            assert collected.finish_reasons[name] is FinishReason.ERROR
            assert "failed" in (collected.outputs[name][-1].error or "")
        else:
            wanted = tiny.solo(model, [index + 1] * 12, 10)
            tiny.same_tokens(model, [index + 1] * 12, collected.token_ids[name], wanted)


def test_what_can_never_fit_is_refused_at_once() -> None:
    core = tiny.engine(tiny.llama_model(), num_blocks=4, block_size=8)
    assert core.max_request_tokens == 32
    with pytest.raises(ContextLengthExceeded, match="32 tokens and at most 31 fit"):
        core.add("long", [1] * 32, tiny.greedy(1))
    with pytest.raises(InvalidRequest, match="empty"):
        core.add("empty", [], tiny.greedy(1))
    with pytest.raises(InvalidRequest, match="not below 211"):
        core.add("foreign", [tiny.VOCAB_SIZE], tiny.greedy(1))
    with pytest.raises(InvalidRequest, match="logit_bias names token 999"):
        core.add("bias", [1], tiny.greedy(1, logit_bias=((999, 1.0),)))
    assert not core.has_work


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_last_request_to_be_aborted_still_gets_its_end(pipelined: bool) -> None:
    core = tiny.engine(tiny.llama_model(), pipelined=pipelined)
    core.add("r", [1, 2], tiny.greedy(50))
    collected = tiny.Collected()
    for _ in range(3):
        collected.take(core.step())
    core.abort("r")
    tiny.run(core, collected)
    assert collected.finish_reasons["r"] is FinishReason.ABORT


@pytest.mark.parametrize("max_tokens", [1, 2, 6, 100, None])
@pytest.mark.parametrize("prompt", [26, 30, 31])
def test_c032_output_fills_the_context_and_not_more(prompt: int, max_tokens: int | None) -> None:
    core = tiny.engine(tiny.llama_model(), num_blocks=4, block_size=8)
    core.add("r", [1] * prompt, tiny.SamplingParams(temperature=0.0, max_tokens=max_tokens))
    collected = tiny.run(core)
    room = 32 - prompt
    assert len(collected.token_ids["r"]) == min(room, max_tokens or room)
    assert collected.finish_reasons["r"] is FinishReason.LENGTH


def test_memory_stays_flat_over_300_steps_of_churn() -> None:
    """Acceptance g: writes are in place, growth ends, what is allocated is what is alive."""
    import random

    from mlx_cb.model.runner import mx

    rng = random.Random(0)
    core = tiny.engine(tiny.llama_model(), block_size=16, num_blocks=64, max_num_seqs=16)
    storage, pool = core.runner.storage, core.scheduler.kv_cache.pool
    added, allocated, live = 0, 0, 0
    peaks = []
    for step in range(600):
        while len(core.scheduler.requests) < 16:
            core.add(f"r{added}", [1] * rng.randint(8, 24), tiny.greedy(rng.randint(6, 20)))
            added += 1
        core.step()
        if step in (299, 599):
            peaks.append(mx.get_peak_memory())
            mx.reset_peak_memory()
        running = [*core.scheduler.decoding, *core.scheduler.prefilling]
        allocated += pool.num_used * 16
        live += sum(request.num_computed_tokens for request in running)
    assert peaks[1] <= 1.02 * peaks[0]
    assert storage.num_blocks <= pool.capacity
    assert added > 300
    # Short texts waste half a block each; chat-like lengths are measured below.
    assert allocated < 1.5 * live


def test_allocated_memory_follows_live_tokens_for_chat_lengths() -> None:
    """Acceptance g: at most 5 % more than the live tokens, lengths as in conversations."""
    import random

    rng = random.Random(1)
    model = tiny.llama_model(num_hidden_layers=1, max_position_embeddings=4096)
    core = tiny.engine(model, block_size=16, num_blocks=4000, max_num_batched_tokens=256)
    core.max_request_tokens = 4096
    pool = core.scheduler.kv_cache.pool
    allocated, live = 0, 0
    for index in range(8):
        prompt = min(1500, int(rng.lognormvariate(6.2, 0.77)) + 1)
        core.add(f"r{index}", [1] * prompt, tiny.greedy(rng.randint(60, 120)))
    while core.has_work:
        core.step()
        running = [*core.scheduler.decoding, *core.scheduler.prefilling]
        allocated += pool.num_used * 16
        live += sum(request.num_computed_tokens for request in running)
    assert allocated <= 1.05 * live
