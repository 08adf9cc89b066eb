"""Gates pass and fall short for the right reasons, and the shipped file is sound."""

import pytest

from mlx_cb.bench.gates import SHIPPED, Measured, judge, read_gates, relevant
from mlx_cb.bench.suite import chosen_runs
from mlx_cb.bench.workloads import make
from mlx_cb.errors import InvalidRequest

RATIO = """
[[gate]]
goal = "G1"
name = "twice as fast"
value = { run = "churn", metric = "output_tok_s" }
against = { run = "churn", metric = "output_tok_s", of = "P" }
at_least = 2.0
limit = 3.0
why = "because"
"""
ABSOLUTE = """
[[gate]]
goal = "G2"
name = "soon"
value = { run = "churn", metric = "ttft.p95" }
at_most = 0.5
unit = "s"
why = "because"
"""


def gate(tmp_path, text):
    path = tmp_path / "gates.toml"
    path.write_text(text)
    return read_gates(path).gate[0]


def measured(ours=30.0, peer=10.0, ttft=0.4, equal=1.0, failures=None):
    own = {"output_tok_s": ours, "ttft": {"p95": ttft}, "failures": failures or {}}
    return {"churn": Measured({"ours": own, "P": {"output_tok_s": peer}}, equal)}


def test_a_ratio_that_is_high_enough_passes(tmp_path):
    result = judge(gate(tmp_path, RATIO), measured())
    assert result.passed
    assert result.actual == pytest.approx(3.0)


def test_a_ratio_that_is_too_low_says_so(tmp_path):
    result = judge(gate(tmp_path, RATIO), measured(ours=19.0))
    assert not result.passed
    assert result.reason == "1.9 is below 2"


def test_something_is_more_than_any_multiple_of_nothing(tmp_path):
    assert judge(gate(tmp_path, RATIO), measured(peer=0.0)).passed
    nothing = judge(gate(tmp_path, RATIO), measured(ours=0.0, peer=0.0))
    assert not nothing.passed
    assert nothing.reason == "churn/P/output_tok_s is zero"


@pytest.mark.parametrize(("ttft", "passed"), [(0.5, True), (0.51, False)])
def test_an_absolute_limit(tmp_path, ttft, passed):
    assert judge(gate(tmp_path, ABSOLUTE), measured(ttft=ttft)).passed is passed


def test_what_was_not_measured_does_not_pass(tmp_path):
    result = judge(gate(tmp_path, RATIO), {})
    assert not result.passed
    assert "churn/ours/output_tok_s was not measured" in result.reason


def test_a_peer_that_was_not_measured_does_not_pass(tmp_path):
    only_ours = {"churn": Measured({"ours": {"output_tok_s": 5.0}})}
    assert "churn/P/output_tok_s was not" in judge(gate(tmp_path, RATIO), only_ours).reason


def test_a_ratio_of_unequal_work_does_not_pass(tmp_path):
    result = judge(gate(tmp_path, RATIO), measured(equal=0.5))
    assert not result.passed
    assert "only 50% of the calls had equal output lengths" in result.reason


def test_our_failures_do_not_pass(tmp_path):
    result = judge(gate(tmp_path, ABSOLUTE), measured(failures={"http_500": 2}))
    assert not result.passed
    assert "ours failed 2 calls" in result.reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        RATIO.replace("at_least = 2.0", ""),
        RATIO.replace("limit = 3.0", "at_most = 3.0"),
        RATIO.replace("limit", "limits"),
        RATIO.replace("2.0", '"two"'),
        "[[gate]\n",
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path, text):
    with pytest.raises(InvalidRequest, match=r"gates\.toml"):
        gate(tmp_path, text)


def test_only_gates_about_what_was_run_count(tmp_path):
    gates = (gate(tmp_path, RATIO),)
    assert relevant(gates, {"churn", "steady4"}) == gates
    with pytest.raises(InvalidRequest, match="no gate is about steady4"):
        relevant(gates, {"steady4"})


class TestShippedFile:
    file = read_gates(SHIPPED)

    def test_every_goal_of_the_issue_is_there(self):
        wanted = {f"G{n}" for n in (*range(1, 8), *range(10, 16), 17, 20)}
        assert {gate.goal for gate in self.file.gate} == wanted

    def test_gates_name_runs_and_servers_that_exist(self):
        runs = {run.name: run for run in self.file.run}
        assert len(runs) == len(self.file.run)
        for gate in self.file.gate:
            for figure in filter(None, (gate.value, gate.against)):
                assert figure.of in runs[figure.run].servers
        for run in self.file.run:
            assert set(run.servers) <= set(self.file.server)

    def test_every_run_is_gated_and_can_be_planned(self):
        gated = set().union(*(gate.runs for gate in self.file.gate))
        assert gated == {run.name for run in self.file.run}
        for run in self.file.run:
            if run.measures == "load":
                assert make(run.workload, run.parameters).plan(1).calls()

    def test_thresholds_lie_on_this_side_of_their_limits(self):
        for gate in self.file.gate:
            if gate.limit is not None and gate.at_least is not None:
                assert gate.at_least <= gate.limit, gate.name
            if gate.limit is not None and gate.at_most is not None:
                assert gate.at_most >= gate.limit, gate.name

    def test_an_unknown_run_is_refused(self):
        with pytest.raises(InvalidRequest, match="no run named nothing"):
            chosen_runs(self.file, frozenset({"nothing"}))


class TestSsdFile(TestShippedFile):
    file = read_gates(SHIPPED.with_name("gates_ssd.toml"))

    def test_every_goal_of_the_issue_is_there(self):
        assert {gate.goal for gate in self.file.gate} == {"G8", "G21"}


class TestEnduranceFile(TestShippedFile):
    file = read_gates(SHIPPED.with_name("gates_endurance.toml"))

    def test_every_goal_of_the_issue_is_there(self):
        assert {gate.goal for gate in self.file.gate} == {"G10"}


class TestMemoryFile(TestShippedFile):
    file = read_gates(SHIPPED.with_name("gates_memory.toml"))

    def test_every_goal_of_the_issue_is_there(self):
        assert {gate.goal for gate in self.file.gate} == {"G8", "G9", "G14", "G21"}


class TestFairFile(TestShippedFile):
    file = read_gates(SHIPPED.with_name("gates_fair.toml"))

    def test_every_goal_of_the_issue_is_there(self):
        assert {gate.goal for gate in self.file.gate} == {"G16", "G18", "G19"}
