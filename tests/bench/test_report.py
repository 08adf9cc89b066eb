"""From a measurement to JSON, a page and an exit code."""

import json
import re

import msgspec
import pytest
from click.testing import CliRunner

from mlx_cb.bench import plots
from mlx_cb.bench.html import render
from mlx_cb.cli.bench import bench

from .conftest import Script

GATE = """
[[gate]]
goal = "G1"
name = "{name}"
value = {{ run = "churn", metric = "output_tok_s", of = "server" }}
at_least = {least}
unit = "tok/s"
why = "test"
"""


@pytest.fixture
def invoke(stub, tmp_path):
    """Runs `bench run` of a small churn against the stub; returns the result and the report."""
    stub.script = Script(
        pauses=[0.01] * 3,
        steps=[
            {"started": 1e12 + n, "seconds": 0.5, "rows_decode": 3, "rows_prefill": 20 * (n % 2)}
            for n in range(9)
        ],
    )

    def run(*more):
        command = ["run", stub.url, "--workload", "churn", "--rounds", "2", "--allow-load"]
        command += ["--param", "calls=8", "--param", "streams=2", "--pin", "off"]
        command += ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
        return CliRunner().invoke(bench, [*command, *more])

    run.folder = tmp_path
    return run


def test_the_report_has_what_is_needed_to_repeat_it(invoke):
    result = invoke("--seed", "7")
    assert result.exit_code == 0, result.output
    report = json.loads((invoke.folder / "r.json").read_text())
    run = report["runs"][0]
    assert run["workload"] == "churn"
    assert run["parameters"]["calls"] == 8
    assert (run["seed"], run["rounds"]) == (7, 2)
    assert report["environment"]["versions"]["mlx"]
    assert report["environment"]["processor"]
    server = run["servers"]["server"]
    assert server["figures"]["complete"] == 8
    assert server["figures"]["groups"]["short"]["ttft"]["n"] == 8
    assert set(server["figures"]["users"]) == {"user0", "user1", "user2", "user3"}
    assert len(server["loads"]) == 2
    assert "time to first token p99" in result.output


def test_the_page_needs_nothing_from_elsewhere(invoke):
    invoke()
    page = (invoke.folder / "r.html").read_text()
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://(?!127\.0\.0\.1)""", page)
    assert "<script" not in page
    assert page.count("<svg") == 5  # two distributions, calls, users, steps
    assert "prefill rows" in page
    assert "Time to first token" in page


def test_the_page_can_be_made_from_the_json(invoke):
    invoke()
    page = invoke.folder / "again.html"
    result = CliRunner().invoke(bench, ["html", str(invoke.folder / "r.json"), str(page)])
    assert result.exit_code == 0
    assert page.read_text() == (invoke.folder / "r.html").read_text()


def test_names_are_escaped(invoke):
    invoke()
    report = msgspec.json.decode((invoke.folder / "r.json").read_bytes())
    report["runs"][0]["name"] = "<script>alert(1)</script>"
    assert "<script>" not in render(report)


def test_a_gate_that_holds_exits_with_zero(invoke):
    gates = invoke.folder / "gates.toml"
    gates.write_text(GATE.format(name="some speed", least=1.0))
    result = invoke("--gate", str(gates))
    assert result.exit_code == 0, result.output
    assert json.loads((invoke.folder / "r.json").read_text())["gates"][0]["passed"] is True


def test_an_impossible_gate_fails_and_is_named(invoke):
    gates = invoke.folder / "gates.toml"
    gates.write_text(
        GATE.format(name="some speed", least=1.0) + GATE.format(name="warp", least=1e12)
    )
    result = invoke("--gate", str(gates))
    assert result.exit_code == 1
    assert "falls short: G1 warp: " in result.output
    assert "falls short: G1 some speed" not in result.output
    assert "is above" not in result.output
    assert "1e+12" in (invoke.folder / "r.html").read_text()


def test_a_gate_about_another_workload_is_an_error_not_a_pass(invoke):
    gates = invoke.folder / "gates.toml"
    gates.write_text(GATE.format(name="x", least=1.0).replace("churn", "steady"))
    result = invoke("--gate", str(gates))
    assert result.exit_code == 2
    assert "no gate is about churn" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "127.0.0.1:1", "--workload", "nothing"], "no workload"),
        (["run", "127.0.0.1:1", "--workload", "churn", "--param", "x"], "not NAME=VALUE"),
        (["run", "127.0.0.1:1", "--workload", "churn", "--token-ids"], "needs --tokenizer"),
        (["compare", "--peer", "other", "--workload", "churn"], "is none of"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_two(arguments, said):
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_busy_machine_is_refused(stub, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (5.0, 5.0, 5.0))
    result = CliRunner().invoke(bench, ["run", stub.url, "--workload", "steady2"])
    assert result.exit_code == 1
    assert "load average is 5.00" in result.output
    assert stub.bodies == []


def test_workloads_are_listed_with_their_parameters():
    result = CliRunner().invoke(bench, ["workloads"])
    assert "churn  streams=16" in result.output


class TestPlots:
    def test_axis_maps_ends_and_middle(self):
        axis = plots.Axis(1.0, 100.0, 0.0, 200.0, is_log=True)
        assert [axis.at(value) for value in (1, 10, 100, 1000)] == [0, 100, 200, 200]
        assert plots.Axis(0, 10, 100, 0).at(2.5) == 75

    def test_ticks_are_round(self):
        assert plots.Axis(0, 10, 0, 1).ticks() == [0, 2, 4, 6, 8, 10]
        assert plots.Axis(0.9, 110, 0, 1, is_log=True).ticks()[:4] == [1, 10, 100]

    def test_labels_of_the_value_axis_stand_at_their_heights(self):
        plot = plots.curves("t", [plots.Series("s", [(0.0, 0.0), (1.0, 10.0)], 0)], "tokens")
        labels = re.findall(r'y="([\d.]+)" dy="4" class="end">([\d.]+)<', plot)
        heights = {float(text): float(height) for height, text in labels}
        assert heights[0.0] == plots.HEIGHT - plots.BOTTOM
        assert heights[10.0] == plots.TOP
        assert len(set(heights.values())) == len(heights) == 6

    def test_distribution_ends_at_all(self):
        assert plots.ecdf([3.0, 1.0]) == [(1.0, 0.5), (3.0, 1.0)]

    def test_many_steps_are_drawn_as_averages(self):
        steps = [plots.Step(float(n), 1.0, 4.0, 0.0) for n in range(5000)]
        assert plots.steps_over_time("t", steps).count("<rect") == 1000

    def test_nothing_to_plot_is_no_plot(self):
        assert plots.distribution("t", []) == plots.calls_over_time("t", []) == ""

    @pytest.mark.parametrize(
        ("value", "text"), [(1.234, "1.23 s"), (0.0851, "85.1 ms"), (4e-5, "40 µs"), (0, "0")]
    )
    def test_seconds(self, value, text):
        assert plots.seconds_text(value) == text
