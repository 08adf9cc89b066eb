"""A validation passes for the machine that made the report and for no other."""

import dataclasses
import importlib
import json
import math
import random

import msgspec
import pytest
from click.testing import CliRunner

from mlx_cb.bench import peer_journal
from mlx_cb.bench.compare import _attention, _last_chunks
from mlx_cb.bench.sim import measured
from mlx_cb.bench.sim import validate as validate_module
from mlx_cb.bench.sim.cost import KNOTS, FittedCost, PassShape
from mlx_cb.bench.sim.engines import engine, simulate
from mlx_cb.bench.sim.fit import Measured
from mlx_cb.bench.sim.measured import (
    Description,
    HostTimes,
    Side,
    describe,
    host_times,
    our_steps,
    peer_steps,
    read_description,
    write_description,
)
from mlx_cb.bench.sim.probe import Probe
from mlx_cb.bench.sim.users import OneUser
from mlx_cb.bench.sim.validate import engine_of, keep, last_validation, validate
from mlx_cb.bench.workloads import make
from mlx_cb.cli.bench import bench
from mlx_cb.errors import InvalidRequest

OURS = ["python", "-m", "mlx_cb", "serve", "demo", "--port", "1"]
PEER = ["python", "-m", "mlx_cb.bench.peer_launcher", "--model", "demo"]


def cost(factor=1.0, spread=0.0):
    rows = [0.003 * factor] * len(KNOTS)
    return FittedCost((0.06 * factor, *rows, 4e-3, 3e-4, 1e-3, 1e-6, 2e-8, 1e-7, 2e-3), spread)


def description(factor=1.0):
    side = Side(cost(factor), HostTimes(0.001, 1e-4, 0.01))
    return Description("made up", "made up", side, side, num_blocks=4000, max_tokens=8192)


def journal_of(scheduler):
    records = [r.as_dict() for r in scheduler.journal.records if r.seconds is not None]
    kept = ("started", "seconds", "rows_decode", "rows_prefill", "context_sum")
    return [
        {name: record[name] for name in kept} | _attention(record, samples)
        for record, samples in zip(records, _last_chunks(records), strict=True)
    ]


@pytest.fixture(scope="module")
def report():
    """What `bench compare` would have written, measured on a made-up machine."""
    name, parameters = "churn", {"streams": 6, "calls": 24}
    load, machine = make(name, parameters), description().substrate()
    servers = {}
    for label, command in (("ours", OURS), ("P", PEER)):
        outcome = simulate(name, OneUser(load), engine(label), machine, rounds=2)
        steps = journal_of(outcome.server.scheduler) if label == "ours" else []
        servers[label] = {
            "command": command,
            "figures": outcome.figures,
            "last_round": {"steps": steps},
        }
    entry = {"name": name, "workload": name, "parameters": load.parameters(), "seed": 1}
    return {
        "created": "2026-11-30T00:00:00Z",
        "environment": {"processor": "made up"},
        "runs": [entry | {"rounds": 2, "servers": servers}],
    }


def test_the_machine_that_made_the_report_passes(report):
    found = validate(report, description())
    assert {(c.server, c.figure) for c in found.checks if c.tolerance} == {
        ("ours", "step time"),
        ("ours", "ttft.p95"),
        ("ours", "itl.p99"),
        ("P", "ttft.p95"),
        ("P", "itl.p99"),
    }
    assert max(check.error for check in found.checks) < 0.02
    assert found.passed
    assert "passed" in found.summary()


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_a_machine_of_another_speed_falls_short(report, factor):
    found = validate(report, description(factor))
    steps = [check for check in found.checks if check.figure == "step time"]
    assert steps[0].error == pytest.approx(abs(factor - 1), rel=0.1)
    assert not found.passed
    assert "FELL SHORT" in found.summary()


def test_a_run_is_predicted_for_the_machine_as_it_was_around_it(report):
    """A third slower throughout, and known to be."""
    paced = report | {"paces": {"churn": [0.75, 0.75]}}
    assert validate(paced, description(4 / 3)).passed
    assert not validate(report, description(4 / 3)).passed


def test_noise_of_single_steps_is_told_from_the_model_s_error(report):
    noisy = json.loads(json.dumps(report))
    rng = random.Random(1)
    for step in noisy["runs"][0]["servers"]["ours"]["last_round"]["steps"]:
        step["seconds"] *= rng.lognormvariate(0.0, 0.16)
    found = validate(noisy, description())
    errors = {check.figure: check.error for check in found.checks if check.server == "ours"}
    assert errors["step, each"] > 0.12
    assert errors["step, noise"] > 0.12
    assert errors["step time"] < 0.05
    assert found.passed


def test_one_kind_of_step_that_is_predicted_badly_is_not_hidden_by_the_others(report):
    """Chunks twice as dear and the rest a little cheaper: the mean over all steps is right."""
    bent = json.loads(json.dumps(report))
    steps = bent["runs"][0]["servers"]["ours"]["last_round"]["steps"]
    plain = [step for step in steps if not step["chunks"]]
    extra = 0.4 * sum(step["seconds"] for step in steps if step["chunks"])
    share = 1 - extra / sum(step["seconds"] for step in plain)
    for step in steps:
        step["seconds"] *= 1.4 if step["chunks"] else share
    found = validate(bent, description())
    (step_time,) = [check for check in found.checks if check.figure == "step time"]
    assert step_time.measured == pytest.approx(step_time.predicted, rel=0.02)
    assert step_time.error > 0.2
    assert not found.passed


def test_without_a_step_journal_nothing_passes(report):
    bare = json.loads(json.dumps(report))
    for server in bare["runs"][0]["servers"].values():
        server["last_round"]["steps"] = []
    assert not validate(bare, description()).passed


def test_what_it_was_fitted_on_does_not_count(report):
    with pytest.raises(InvalidRequest, match="no workload"):
        validate(report, description(), skip=["churn"])


def test_the_command_prints_both_and_exits_by_the_outcome(report, tmp_path):
    file = tmp_path / "report.json"
    file.write_bytes(msgspec.json.encode(report))
    for factor, code in ((1.0, 0), (1.5, 1)):
        machine = tmp_path / f"{factor}.json"
        write_description(description(factor), machine)
        result = CliRunner().invoke(
            bench, ["sim", "--validate", str(file), "--machine", str(machine)]
        )
        assert result.exit_code == code, result.output
        assert "measured" in result.output
        assert "simulated" in result.output
        assert ("BEYOND" in result.output) == bool(code)


def test_the_command_keeps_what_it_found_when_asked(report, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(validate_module, "keep", kept.append)
    monkeypatch.setattr(measured, "write_description", lambda found, path: kept.append(found))
    file, machine = tmp_path / "report.json", tmp_path / "machine.json"
    file.write_bytes(msgspec.json.encode(report))
    write_description(description(), machine)
    command = ["sim", "--validate", str(file), "--machine", str(machine)]
    assert CliRunner().invoke(bench, command).exit_code == 0
    assert not kept
    assert CliRunner().invoke(bench, [*command, "--keep"]).exit_code == 0
    assert [type(one).__name__ for one in kept] == ["Description", "Validation"]


def test_a_description_survives_its_file(tmp_path):
    path = tmp_path / "machine.json"
    write_description(description(), path)
    read = read_description(path)
    shape = PassShape(40, 8, context=900, chunks=1, scores=4000)
    assert read.ours.cost.seconds(shape) == pytest.approx(cost().seconds(shape), rel=1e-3)
    assert read.substrate().num_blocks(16) == 4000


def test_a_validation_is_kept_and_quoted(report, tmp_path):
    path = tmp_path / "validation.json"
    assert last_validation(path) is None
    found = validate(report, description())
    keep(found, path)
    kept = last_validation(path)
    assert kept is not None
    assert kept.summary() == found.summary()
    assert kept.passed


def test_commands_tell_the_engine():
    ours = engine_of("ours", [*OURS, "--scheduler", "static", "--max-num-seqs", "4"])
    assert ours is not None
    assert (ours.settings.policy, ours.settings.max_num_seqs) == ("static", 4)
    tuned = engine_of("T", [*PEER, "--prefill-step-size", "64", "--prompt-concurrency", "1"])
    assert tuned is not None
    assert (tuned.settings.prefill_step_size, tuned.settings.prompt_concurrency) == (64, 1)
    assert engine_of("other", ["http://127.0.0.1:1"]) is None


def test_host_times_are_what_is_between_and_around_the_steps():
    # Ten steps of 0.1 s with 2 ms + 1 ms per token between them, from a call that was sent 30 ms
    # before the first and heard 10 ms after the last.
    steps, now = [], 5.0
    for tokens in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5):
        steps.append(Measured([PassShape(tokens)], 0.1, now, tokens))
        now += 0.1 + 0.002 + 0.001 * tokens
    end = steps[-1].started + 0.1
    found = host_times(steps, [{"sent": 4.97, "first": end + 0.01}])
    assert found.step_s == pytest.approx(0.002, abs=1e-6)
    assert found.row_s == pytest.approx(0.001, abs=1e-6)
    assert found.front_s == pytest.approx(0.04, abs=1e-6)
    assert host_times([], []) == HostTimes(0.0, 0.0, 0.0)


def test_the_probe_finds_the_machine_that_was_probed():
    """Simulate the probe on a known machine, fit its journal, and compare."""
    machine = description().substrate()
    outcome = simulate("probe", Probe(), engine("ours"), machine)
    steps = our_steps(journal_of(outcome.server.scheduler))
    alone = [
        {"sent": run.began + r.sent_s, "first": run.began + r.chunk_times_s[0]}
        for run in outcome.runs
        for r in run.records
        if r.call.group == "alone"
    ]
    slow = [dataclasses.replace(step, seconds=1.2 * step.seconds) for step in steps]
    sides = (([steps, steps], alone), ([steps, slow], alone))
    found, paces = describe("n", "m", sides, num_blocks=4000, max_tokens=8192)
    for shape in (
        PassShape(1, 1, context=100),
        PassShape(16, 16, context=1600),
        PassShape(60, 12, context=900, chunks=1, scores=5000),
    ):
        assert found.ours.cost.seconds(shape) == pytest.approx(cost().seconds(shape), rel=0.05)
    assert found.ours.host.front_s == pytest.approx(0.01, abs=0.004)
    assert found.ours.host.step_s == pytest.approx(0.001, abs=0.001)
    assert paces == (pytest.approx([1.0, 1.0]), pytest.approx([2 / 2.2, 2.4 / 2.2]))


def test_the_peer_s_steps_are_recorded_as_they_ran(tmp_path, monkeypatch):
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    generate = importlib.import_module("mlx_lm.generate")
    for owner, name in (
        (generate.GenerationBatch, "_step"),
        (generate.GenerationBatch, "filter"),
        (generate.GenerationBatch, "extend"),
        (generate.PromptProcessingBatch, "prompt"),
        (generate.BatchGenerator, "_next"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    args = ModelArgs("llama", 32, 1, 64, 2, 1e-5, 100, num_key_value_heads=1)
    model = Model(args)
    mx.eval(model.parameters())
    journal = tmp_path / "steps.jsonl"
    peer_journal.record_steps(journal)
    batch = generate.BatchGenerator(model, prefill_step_size=8, prefill_batch_size=2)
    batch.insert([list(range(1, 21)), list(range(1, 6))], [3, 4])
    while batch.next() != ([], []):
        pass
    batch.close()
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    passes = [part for entry in entries for part in entry["passes"]]
    assert passes[0] == ["prompt", 2, 8, 0]
    # The short prompt's last token, then its decodes beside what is left of the long prompt.
    assert [p for p in passes if p[0] == "prompt"][1] == ["prompt", 1, 8, 8]
    assert sum(entry["tokens"] for entry in entries) == 3 + 4
    steps = peer_steps(journal)
    assert all(step.seconds > 0 and not math.isnan(step.seconds) for step in steps)
    assert steps[0].shapes[0].rows == 16
    assert steps[0].shapes[0].scores == 2 * 8 * 8
    assert any(shape.copied for step in steps for shape in step.shapes)
    assert peer_steps(journal, since=math.inf) == []
