"""The suite measures what its file says and is judged by it."""

import asyncio
import json
import time
from pathlib import Path

import msgspec
import pytest

from mlx_cb.bench.gates import GateFile
from mlx_cb.bench.measuring import Policy, apply_gates
from mlx_cb.bench.suite import Models, SuiteSettings, _Suite, run_suite
from mlx_cb.errors import InvalidRequest

from .conftest import Script
from .test_prompts import write_tokenizer


@pytest.fixture
def models(tmp_path):
    write_tokenizer(tmp_path)
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return Models(tmp_path, tmp_path, tmp_path)


def file(stub, runs, gates=()):
    content = {
        "server": {label: {"kind": "url", "url": stub.url} for label in ("ours", "P")},
        "run": runs,
        "gate": gates,
    }
    return msgspec.convert(content, GateFile)


def measure(content, models, **settings):
    chosen = SuiteSettings(Policy(allow_load=True, pin="off"), **settings)
    return asyncio.run(run_suite(content, models, chosen))


CHURN = {"name": "churn", "workload": "churn", "parameters": {"calls": 4, "streams": 2}}
TINY = {"name": "tiny", "workload": "steady", "parameters": {"streams": 2}, "model": "tiny"}


def test_every_run_is_measured_on_its_servers(stub, models):
    heard = []
    content = file(stub, [CHURN, TINY])
    report = measure(content, models, rounds=1, announce=lambda *run: heard.append(run))
    assert heard == [("churn", 1, 2), ("tiny", 2, 2)]
    assert [run["name"] for run in report["runs"]] == ["churn", "tiny"]
    assert set(report["runs"][0]["servers"]) == {"ours", "P"}
    assert report["models"]["float32"]["weights_sha256"]
    assert set(report["models"]) == {"float32", "tiny"}


def test_users_of_a_run_get_keys_that_a_server_of_ours_is_started_with(models):
    content = msgspec.convert(
        {
            "server": {"ours": {"kind": "mlx-cb", "flags": ["--lan"]}, "P": {"kind": "mlx-lm"}},
            "run": [{"name": "hog", "workload": "hog", "users": ["hog", "victim0"]}],
        },
        GateFile,
    )
    suite = _Suite(content, models, SuiteSettings(Policy(allow_load=True, pin="off")))
    ours, peer = suite.specs(content.run[0])
    assert ours.flags[:2] == ("--lan", "--keys")
    assert Path(ours.flags[2]).is_file()
    assert ours.key
    assert (peer.flags, peer.key) == ((), None)
    assert set(suite.conditions(content.run[0]).keys) == {"hog", "victim0"}
    suite.folder.cleanup()


def test_a_server_writes_into_a_folder_of_this_suite(models):
    """What an earlier suite has left there would be found again."""
    flags = ["--ssd-cache", "{folder}/ssd"]
    content = msgspec.convert(
        {
            "server": {"ours": {"kind": "mlx-cb", "flags": flags}},
            "run": [{"name": "churn", "workload": "churn", "servers": ["ours"]}],
        },
        GateFile,
    )
    suites = [_Suite(content, models, SuiteSettings(Policy(allow_load=True))) for _ in range(2)]
    (first,), (second,) = (suite.specs(content.run[0]) for suite in suites)
    assert first.flags[1].endswith("/ssd")
    assert first.flags != second.flags
    for suite in suites:
        suite.folder.cleanup()


def test_only_some_runs(stub, models):
    report = measure(file(stub, [CHURN, TINY]), models, rounds=1, only=frozenset({"tiny"}))
    assert [run["name"] for run in report["runs"]] == ["tiny"]


@pytest.mark.parametrize(("least", "passed"), [(0.01, True), (1e9, False)])
def test_gates_judge_the_suite(stub, models, least, passed):
    figure = {"run": "churn", "metric": "output_tok_s"}
    gate = {"goal": "G2", "name": "churn", "value": figure, "why": "test", "at_least": least}
    gate["against"] = figure | {"of": "P"}
    content = file(stub, [CHURN], [gate])
    report = measure(content, models, rounds=1)
    assert apply_gates(report, content.gate) is passed
    entry = report["gates"][0]
    assert entry["passed"] is passed
    assert set(entry["columns"]) == {"ours", "P"}


def test_gates_may_ask_for_equal_texts_and_no_failures(stub, models):
    def gate(metric, **threshold):
        value = {"run": "churn", "metric": metric, "of": "P"}
        return {"goal": "G21", "name": metric, "why": "test", "value": value} | threshold

    content = file(stub, [CHURN], [gate("equal_outputs", at_least=1.0), gate("failed", at_most=0)])
    assert apply_gates(measure(content, models, rounds=1), content.gate)
    stub.script = Script(cut_after=1)
    report = measure(content, models, rounds=1)
    assert not apply_gates(report, content.gate)
    assert [gate["actual"] for gate in report["gates"]] == [None, 4.0]


def test_steps_for_a_client_that_has_gone_are_counted(stub, models):
    """The stub's journal says that two steps began after the stream was dropped, one of them
    without rows."""
    stub.script = Script(pauses=[0.05] * 100)
    later = time.monotonic() + 60
    stub.script.steps = [
        {"started": later + at, "seconds": 0.01, "rows_decode": rows, "rows_prefill": 0}
        for at, rows in ((0.0, 1), (0.1, 0))
    ]
    run = {"name": "gone", "measures": "disconnect", "servers": ["ours"], "model": "tiny"}
    report = measure(file(stub, [run]), models, rounds=1)
    figures = report["runs"][0]["servers"]["ours"]["figures"]
    assert figures["steps_after"] == 1
    assert figures["worked_on_for_ms"] > 100
    assert figures["streamed_chunks"] > 3


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (CHURN | {"servers": ["nobody"]}, "no server 'nobody'"),
        (CHURN | {"model": "huge"}, "no model form 'huge'"),
        (CHURN | {"measures": "mood"}, "no measurement 'mood'"),
        (CHURN | {"workload": "party"}, "no workload 'party'"),
    ],
)
def test_mistakes_in_the_file_are_named(stub, models, run, message):
    with pytest.raises(InvalidRequest, match=message):
        measure(file(stub, [run]), models, rounds=1)
