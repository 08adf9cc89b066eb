"""Tiny cases whose times can be added up by hand: a second per pass and a tenth per row."""

import pytest

from mlx_cb.bench.calls import Milestone, Plan, Prompt

from .conftest import CPU, GPU, at, call, ours, peer, run


def times(records):
    return [pytest.approx(record.chunk_times_s) for record in records]


def test_ours_alone():
    # 20 rows of prompt give the first token, a row each the others.
    records, _ = run(ours(), Plan([at(0.0, call(20, 3))]))
    assert [record.chunk_times_s for record in records] == [pytest.approx([3.0, 4.1, 5.2])]
    assert records[0].ended_s == pytest.approx(5.2)


def test_ours_joins_at_the_next_step_and_shares_it():
    # The second call comes in the first step (0 to 3) and is prefilled beside a decode row: 21 rows
    # from 3 to 6.1, then two rows each.
    plan = Plan([at(0.0, call(20, 3)), at(0.5, call(20, 2, seed=2))])
    first, second = run(ours(), plan)[0]
    assert first.chunk_times_s == pytest.approx([3.0, 6.1, 7.3])
    assert second.chunk_times_s == pytest.approx([6.1, 7.3])
    assert second.ttft_s == pytest.approx(5.6)


def test_a_long_prompt_goes_in_chunks_of_the_budget():
    # Budget 64: steps of 64, 64 and 22 rows.
    records, server = run(ours(), Plan([at(0.0, call(150, 1))]))
    assert records[0].chunk_times_s == pytest.approx([7.4 + 7.4 + 3.2])
    assert [r.rows_prefill for r in server.scheduler.journal.records] == [64, 64, 22]


def test_on_a_gpu_a_newcomer_waits_for_the_step_that_is_launched_ahead():
    # Steps: 20 rows to 3.0, then a row each to 4.1 and 5.2. The step that ends at 4.1 was launched
    # before the second call came at 0.5, the next one holds a row and 20 of prompt: to 7.2.
    plan = Plan([at(0.0, call(20, 4)), at(0.5, call(20, 1, seed=2))])
    first, second = run(ours(GPU), plan)[0]
    assert first.chunk_times_s == pytest.approx([3.0, 4.1, 7.2, 8.3])
    assert second.chunk_times_s == pytest.approx([7.2])


def test_the_peer_prefills_alone_and_the_last_token_again():
    # 19 rows to 2.9, the last token to 4.0, a decode pass to 5.1: on a CPU its launch takes as long
    # as the pass, and only then is the token of the pass before it read.
    records, _ = run(peer(), Plan([at(0.0, call(20, 3))]))
    assert records[0].chunk_times_s == pytest.approx([5.1, 6.2, 7.3])
    records, _ = run(peer(GPU), Plan([at(0.0, call(20, 3))]))
    assert records[0].chunk_times_s == pytest.approx([4.0, 5.1, 6.2])


def test_the_peer_pads_prompts_that_come_together_and_streams_stand_still():
    # Both come at once: a pass over two rows of 99 (2 x 99 rows: 20.8 s), though one has only 10.
    plan = Plan([at(0.0, call(100, 1)), at(0.0, call(10, 1, seed=2))])
    long, short = run(peer(GPU), plan)[0]
    # The short one's first 9 of 99 are its own: its last token follows in the next pass.
    assert short.chunk_times_s == pytest.approx([20.8 + 1.2])
    assert long.chunk_times_s == short.chunk_times_s


def test_a_running_stream_of_the_peer_waits_for_the_whole_prompt():
    started = Milestone("stream", 1, 2)
    stream = at(0.0, call(2, 20, group="stream"))
    long = at(0.0, call(500, 1, seed=2, group="long"))
    long.starts_when = started
    records, _ = run(peer(GPU), Plan([stream, long]))
    # The pass that runs, the one launched behind it, and 499 rows of prompt.
    assert max(records[0].gaps_s) == pytest.approx(1.1 + 1.1 + 50.9)
    tuned, _ = run(
        peer(GPU, prefill_step_size=64, prompt_concurrency=1),
        Plan([at(0.0, call(2, 20, group="stream")), _late(call(500, 1, seed=2), started)]),
    )
    assert max(tuned[0].gaps_s) == pytest.approx(1.1 + 1.1 + 7.4)


def _late(long, milestone):
    lane = at(0.0, long)
    lane.starts_when = milestone
    return lane


def test_the_peer_looks_for_newcomers_every_half_second():
    # Passes of 1.1 s: the window of half a second ends with each; a fast machine shows the window.
    from dataclasses import replace

    from .conftest import PerRow

    class Fast(PerRow):
        def seconds(self, shape):
            return 0.01

    fast = replace(GPU, ours=Fast(), peer=Fast())
    plan = Plan([at(0.0, call(2, 200)), at(0.6, call(2, 1, seed=2))])
    _, second = run(peer(fast), plan)[0]
    # Windows begin at 0, and just after 0.5 and 1.0.
    assert 0.4 < second.ttft_s < 0.55
    _, soon = run(ours(fast), Plan([at(0.0, call(2, 200)), at(0.6, call(2, 1, seed=2))]))[0]
    assert soon.ttft_s < 0.04


def test_a_second_turn_finds_its_blocks():
    from mlx_cb.bench.calls import Call

    turns = [
        Call(Prompt(64, 1, conversation="c"), 16, user="u"),
        Call(Prompt(16, 2, conversation="c"), 2, user="u"),
    ]
    for server in (ours(), peer()):
        records, _ = run(server, Plan([at(0.0, *turns)]))
        assert records[1].prompt_tokens == 64 + 16 + 16
        assert records[1].cached_tokens >= 64


def test_one_who_hangs_up_gives_his_place_back():
    plan = Plan([at(0.0, call(20, 50, cancel_after_s=4.0)), at(1.0, call(20, 2, seed=2))])
    records, server = run(ours(max_num_seqs=1), plan)
    assert records[0].cancelled
    assert records[0].ended_s == pytest.approx(4.0)
    # He is gone at the end of the step that runs (4.1), and the other's prompt takes 3 s.
    assert records[1].chunk_times_s == pytest.approx([7.1, 8.2])
    assert not server.scheduler.requests
    server.scheduler.check_integrity()


def test_the_front_and_the_host_take_their_time():
    from dataclasses import replace

    slow = replace(CPU, front_s=0.2, step_s=0.5, row_s=0.25)
    records, _ = run(ours(slow), Plan([at(0.0, call(20, 2))]))
    # 0.1 in, 3 s, 0.1 out; then 0.75 of the host and a pass.
    assert records[0].chunk_times_s == pytest.approx([3.2, 3.2 + 0.75 + 1.1])


def test_what_can_never_fit_is_refused():
    from dataclasses import replace

    small = replace(CPU, kv_bytes=10 * 16)
    records, _ = run(ours(small), Plan([at(0.0, call(200, 2))]))
    assert records[0].failure == "http_400"
