"""Interleaving, equality, aggregation, and the verdict on the machine's state."""

import asyncio
import time

import pytest

from mlx_cb.bench import measuring
from mlx_cb.bench.calls import Run
from mlx_cb.bench.compare import Conditions, Outcome, compare, equality, merge
from mlx_cb.bench.environment import LoadWatch
from mlx_cb.bench.measuring import MachineTooBusyError, Policy, conclude
from mlx_cb.bench.prompts import CommonWords
from mlx_cb.bench.servers import Cores, Kind, RunningServer, ServerSpec
from mlx_cb.bench.workloads import make

from .conftest import Script, record


def server(stub, label):
    return RunningServer(ServerSpec(label, Kind.URL, None, url=stub.url), Cores())


def test_servers_take_turns_with_the_same_prompts(stub):
    order = []
    workload = make("steady", {"streams": 2, "output": 3})
    comparison = asyncio.run(
        compare(
            "steady",
            workload,
            [server(stub, "A"), server(stub, "B")],
            Conditions(CommonWords(), rounds=2),
            lambda label, ended: order.append(label) if ended is None else None,
        )
    )
    assert order == ["A", "B", "A", "B"]
    turns = [stub.bodies[i : i + 3] for i in range(0, 12, 3)]  # the first call wakes the server
    assert len({turn[0]["prompt"] for turn in turns}) == 1
    prompts = [sorted(body["prompt"] for body in turn[1:]) for turn in turns]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert comparison.equal_outputs == comparison.equal_lengths == 1.0
    assert comparison.outcomes["A"].figures["complete"] == 2


def test_something_can_be_done_around_each_pass(stub):
    seen = []

    async def around(server):
        seen.append((server.spec.label, len(stub.bodies)))

    workload = make("steady", {"streams": 2, "output": 3})
    servers = [server(stub, "A"), server(stub, "B")]
    asyncio.run(compare("s", workload, servers, Conditions(CommonWords(), rounds=1), around=around))
    assert seen == [("A", 1), ("A", 3), ("B", 4), ("B", 6)]  # the first call wakes the server


def test_steps_of_this_run_are_taken_from_the_journal(stub):
    stub.script = Script(
        steps=[
            {"started": 0.5, "seconds": 0.1},
            {"started": time.monotonic() + 60, "seconds": 0.1},
            {"started": time.monotonic() + 61, "seconds": None},
        ]
    )
    workload = make("steady", {"streams": 1, "output": 3})
    comparison = asyncio.run(
        compare("s", workload, [server(stub, "A")], Conditions(CommonWords(), rounds=1))
    )
    steps = comparison.outcomes["A"].runs[0].steps
    assert steps == [stub.script.steps[1]]


def test_equality_is_counted_per_call():
    same = record([1.0, 2.0], text="ab")
    other = record([1.0, 2.0], text="xy")
    shorter = record([1.0, 2.0], text="a", output_tokens=1)

    def outcome(label, ended):
        return Outcome(label, [], runs=[Run([ended], 0.0, 0.0)])

    assert equality([outcome("A", same), outcome("B", same)]) == (1.0, 1.0)
    assert equality([outcome("A", same), outcome("B", other)]) == (0.0, 1.0)
    spaced = record([1.0, 2.0], text=" ab")
    assert equality([outcome("A", same), outcome("B", spaced)]) == (1.0, 1.0)
    assert equality([outcome("A", same), outcome("B", shorter)]) == (0.0, 0.0)
    failed = record([1.0, 2.0], text="ab", failure="cut")
    assert equality([outcome("A", same), outcome("B", failed)]) == (None, None)


def test_rounds_merge_to_medians_and_failures_add_up():
    rounds = [
        {"ttft": {"p95": 1.0}, "jain": None, "failed": 1, "failures": {"cut": 1}},
        {"ttft": {"p95": 9.0}, "jain": 0.5, "failed": 0, "failures": {}},
        {"ttft": {"p95": 2.0}, "jain": 0.7, "failed": 4, "failures": {"cut": 1, "http_429": 3}},
    ]
    assert merge(rounds) == {
        "ttft": {"p95": 2.0},
        "jain": pytest.approx(0.6),
        "failed": 5,
        "failures": {"cut": 2, "http_429": 3},
    }


def test_a_busy_machine_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(measuring.os, "getloadavg", lambda: (2.01, 0.0, 0.0))
    with pytest.raises(MachineTooBusyError, match=r"load average is 2\.01"):
        Policy().check_before()
    assert Policy(allow_load=True).check_before() == 2.01


def busy_report(foreign):
    loads = [{"average": 1.0, "foreign_cores": foreign}]
    return {"runs": [{"servers": {"ours": {"figures": {}, "loads": loads}}}]}


@pytest.mark.parametrize(
    ("before", "foreign", "allow", "concluded"),
    [
        (1.0, 0.1, False, True),
        (1.0, None, False, True),
        (1.0, 0.9, False, False),
        (2.5, 0.1, True, True),
        (1.0, 0.9, True, True),
    ],
)
def test_nothing_is_concluded_beside_other_work(before, foreign, allow, concluded):
    report = busy_report(foreign)
    conclude(report, before, Policy(allow_load=allow))
    assert report["verdict"]["concluded"] is concluded
    quiet = before <= 2.0 and (foreign or 0.0) <= 0.5
    assert ("Too busy" in report["verdict"]["text"]) is not quiet


def test_own_work_is_not_foreign():
    watch = LoadWatch(list)
    began, own = time.monotonic(), time.process_time()
    while time.monotonic() < began + 0.5:
        own_cores = (time.process_time() - own) / (time.monotonic() - began or 1.0)
    load = watch.read()
    # What this loop got of the machine cannot have gone to others. Clocks tick in hundredths.
    assert load.foreign_cores <= (measuring.os.cpu_count() or 1) - own_cores + 0.1


def test_a_server_of_unknown_cost_leaves_foreign_work_unknown():
    assert LoadWatch(lambda: [1.0, None]).read().foreign_cores is None
