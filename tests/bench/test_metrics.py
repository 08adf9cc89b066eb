"""Figures made from records whose answers can be counted by hand."""

import pytest

from mlx_cb.bench.calls import Run
from mlx_cb.bench.metrics import Slo, look_up, measure

from .conftest import record

SLO = Slo(ttft_s=1.0, itl_p99_s=0.5)


def run(*records, last_sent_s=0.0):
    return Run(list(records), 0.0, last_sent_s)


def test_latencies_of_one_call():
    figures = measure(run(record([1.5, 1.6, 1.8], sent=1.0, prompt_tokens=10)), SLO)
    assert figures["ttft"]["max"] == pytest.approx(0.5)
    assert figures["itl"]["n"] == 2
    assert figures["itl"]["max"] == pytest.approx(0.2)
    assert figures["tpot"]["p50"] == pytest.approx(0.15)
    assert figures["e2e"]["p50"] == pytest.approx(0.8)
    assert figures["stall"] == pytest.approx(0.2)
    assert figures["output_tok_s"] == pytest.approx(3 / 0.8)
    assert figures["input_tok_s"] == pytest.approx(10 / 0.8)
    assert figures["us_per_token"] == pytest.approx(0.8e6 / 3)


def test_time_per_token_counts_tokens_not_chunks():
    merged = record([1.0, 2.0], output_tokens=4)
    assert merged.tpot_s == pytest.approx(0.5)


def test_failures_are_counted_by_kind_and_lower_no_latency():
    good = record([0.1, 0.2])
    refused = record([], failure="http_429", ended_s=0.01)
    cut = record([0.1], failure="cut")
    figures = measure(run(good, refused, refused, cut), SLO)
    assert figures["failures"] == {"http_429": 2, "cut": 1}
    assert figures["complete"] == 1
    assert figures["e2e"]["n"] == 1
    assert figures["goodput"] == pytest.approx(1 / 4)


def test_a_hang_up_is_no_failure_and_not_asked_for_goodput():
    figures = measure(run(record([0.1, 0.2]), record([0.1], cancelled=True)), SLO)
    assert figures["cancelled"] == 1
    assert figures["failures"] == {}
    assert figures["goodput"] == 1.0


@pytest.mark.parametrize(
    ("times", "met"), [([0.9, 1.0], True), ([1.1, 1.2], False), ([0.1, 0.7], False)]
)
def test_goodput_wants_first_token_and_gaps_in_time(times, met):
    assert SLO.is_met(record(times)) is met


def test_end_to_end_limit_replaces_the_others():
    slow_first = record([1.4, 1.45])
    assert Slo(e2e_s=1.5).is_met(slow_first)
    assert not Slo(e2e_s=1.4).is_met(slow_first)


def test_decode_speed_counts_only_while_everybody_decodes():
    steady = record([1.0, 2.0, 3.0, 4.0])
    late = record([2.0, 2.5, 3.0])
    # From 2.0 to 3.0: one token of the first, two of the second.
    assert measure(run(steady, late), SLO)["decode_tok_s"] == pytest.approx(3.0)


def test_decode_speed_needs_an_overlap():
    assert measure(run(record([1.0, 2.0]), record([3.0, 4.0])), SLO)["decode_tok_s"] is None


def test_saturated_speed_leaves_out_the_drain():
    figures = measure(run(record([1.0, 2.0]), record([3.0, 9.0]), last_sent_s=4.0), SLO)
    assert figures["saturated_tok_s"] == pytest.approx(3 / 4)


def test_subgroups_and_users_have_their_own_figures():
    short = record([0.2], group="short", user="a")
    long = record([2.0], group="long", user="b")
    figures = measure(run(short, long), SLO)
    assert look_up(figures, "groups.short.ttft.p95") == pytest.approx(0.2)
    assert look_up(figures, "users.b.ttft.p95") == pytest.approx(2.0)
    assert look_up(figures, "groups.absent.ttft.p95") is None


def test_jain_looks_only_at_the_time_when_all_users_are_busy():
    # Until 2.0, when b has nothing left, a got 2 tokens and b got 2.
    a = record([1.0, 2.0, 3.0, 4.0], user="a")
    b = record([1.0, 2.0], user="b")
    assert measure(run(a, b), SLO)["jain"] == pytest.approx(1.0)
    c = record([1.0], user="c", ended_s=4.0)
    assert measure(run(a, c), SLO)["jain"] == pytest.approx(25 / 34)
