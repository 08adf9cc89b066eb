"""No simulated figure is shown without the word; bad options are said."""

import io
import json

import pytest
from click.testing import CliRunner
from rich.console import Console

from mlx_cb.bench.sim import labelled
from mlx_cb.bench.sim.engines import engine, simulate
from mlx_cb.bench.sim.machines import CHIPS, MODELS, kv_room, model_named
from mlx_cb.bench.sim.substrate import apple
from mlx_cb.bench.table import run_table
from mlx_cb.bench.workloads import make
from mlx_cb.cli.bench import bench


def run(*arguments):
    return CliRunner().invoke(bench, ["sim", *arguments])


def text_of(table):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


@pytest.fixture
def run_entry():
    substrate = apple(CHIPS["M4 Max"], MODELS["Llama-3.1-8B-4bit"], 64)
    load = make("steady", {"streams": 2, "output": 4})
    outcome = simulate("steady", load, engine("ours"), substrate)
    return labelled.entry("steady", load, substrate, [outcome], seed=1, rounds=1)


def test_title_columns_and_caption_say_it(run_entry):
    text = text_of(labelled.table(run_entry))
    assert text.count("simulated") >= 3
    # Whatever else shows such an entry shows the label with it.
    assert "simulated" in text_of(run_table(run_entry))


@pytest.mark.parametrize("place", ["name", "server"])
def test_an_entry_that_lost_its_label_is_refused(run_entry, place):
    if place == "name":
        run_entry["name"] = "steady on M4 Max"
    else:
        run_entry["servers"] = {"ours": run_entry["servers"].popitem()[1]}
    with pytest.raises(labelled.UnlabelledError):
        labelled.table(run_entry)


def test_every_machine_can_be_simulated(tmp_path):
    for chip in CHIPS:
        file = tmp_path / f"{chip}.json"
        result = run(
            *("steady2", "--chip", chip, "--param", "output=4", "--engine", "ours"),
            *("--json", str(file)),
        )
        assert result.exit_code == 0, result.output
        assert "simulated" in result.output
        report = json.loads(file.read_text())
        assert report["figures"] == "simulated"
        assert "simulated" in report["validation"]
        assert all(
            "simulated" in name for r in report["runs"] for name in (r["name"], *r["servers"])
        )


def test_what_is_wrong_is_said_without_a_traceback(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for arguments, message in (
        ((), "give one of"),
        (("steady", "--goals"), "give one of"),
        (("nothing",), "no workload"),
        (("steady", "--chip", "M9"), "no chip"),
        (("steady", "--model", "70B"), "no model"),
        (("steady", "--model", "30B-A3B", "--memory", "16"), "does not fit"),
        (("steady", "--engine", "vllm"), "no engine"),
        (("steady", "--param", "streams"), "not NAME=VALUE"),
        (("--validate", str(bad)), "not a report"),
        (("steady", "--chip", "cpu", "--machine", str(bad)), "does not describe"),
    ):
        result = run(*arguments)
        assert result.exit_code != 0, arguments
        assert message in result.output, (arguments, result.output)
        assert not result.exception or isinstance(result.exception, SystemExit)


def test_what_fits_into_memory_is_what_the_table_says():
    # Users at 4k context, fp16, of performance.md: 11 of 16 GB, 32 of 32, 86 of 64, 182 of 128.
    model = model_named("8B")
    fits = [int(kv_room(model, gb) / (4096 * model.kv_bytes)) for gb in (16, 32, 64, 128)]
    assert fits == pytest.approx([11, 32, 86, 182], rel=0.15)
