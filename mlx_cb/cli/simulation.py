"""`mlx-cb bench sim`: the real scheduler on machines that are not here, in virtual time.

Owns the options and the choice of what is simulated; every table comes labelled from
`bench.sim.labelled`.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mlx_cb.errors import InvalidRequest

# Everything else is imported where it is used: `mlx-cb --help` must not wait for numpy.

_CPU = "cpu"
_WIDTH = 150  # of a table that goes to a file or a pipe


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    workload: str | None
    chip: str
    memory: float
    model: str
    machine: Path | None
    engine: tuple[str, ...]
    param: tuple[str, ...]
    people: tuple[int, ...]
    agents: float
    seed: int
    rounds: int | None
    goals: bool
    sizing: bool
    validate: Path | None
    validate_here: bool
    skip: tuple[str, ...]
    keep: bool
    allow_load: bool
    json_file: Path | None


@click.command("sim")
@click.argument("workload", required=False)
@click.option("--chip", default="M4 Max", show_default=True, help="A Mac's chip, or cpu.")
@click.option("--memory", default=64.0, show_default=True, help="Of the Mac, GB.")
@click.option("--model", default="8B", show_default=True, help="8B, or 30B-A3B.")
@click.option(
    "--machine",
    type=click.Path(path_type=Path, exists=True),
    help="With --chip cpu: the fitted description, instead of the shipped one.",
)
@click.option(
    "--engine",
    multiple=True,
    help="ours, fcfs, static, one, P, T; with settings: ours:max_num_seqs=8. "
    "[default: ours, P and T]",
)
@click.option("--param", multiple=True, metavar="NAME=VALUE", help="A workload's parameter.")
@click.option("--people", multiple=True, type=click.IntRange(1), help="With --sizing; repeat.")
@click.option("--agents", default=0.0, show_default=True, help="Share of people with an agent.")
@click.option("--seed", default=1, show_default=True)
@click.option("--rounds", type=click.IntRange(1), help="[default: 1; measured: 3]")
@click.option("--goals", is_flag=True, help="G16, G18 and G19; fails when one falls short.")
@click.option("--sizing", is_flag=True, help="Settings for so many --people on this machine.")
@click.option(
    "--validate",
    type=click.Path(path_type=Path, exists=True),
    metavar="REPORT",
    help="Hold the simulator against a report of `bench compare --json` from this machine.",
)
@click.option("--validate-here", is_flag=True, help="Measure this machine, then hold against it.")
@click.option("--skip", multiple=True, metavar="RUN", help="Of the report: was fitted on.")
@click.option("--keep", is_flag=True, help="Ship what a validation found with the simulator.")
@click.option("--allow-load", is_flag=True, help="Measure on a busy machine as well.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the report.")
def sim(**options: Any) -> None:
    """Simulate WORKLOAD on a machine that is not here. Every figure says so.

    \b
    mlx-cb bench sim hog --chip "M4 Max" --engine ours --engine fcfs --engine P
    mlx-cb bench sim --goals
    mlx-cb bench sim --sizing --chip M1 --memory 16 --people 5 --people 20
    mlx-cb bench sim --validate-here
    """
    chosen = Options(**options)
    modes = [chosen.workload is not None, chosen.goals, chosen.sizing]
    modes += [chosen.validate is not None, chosen.validate_here]
    if sum(modes) != 1:
        raise click.UsageError(
            "give one of: a workload, --goals, --sizing, --validate, --validate-here"
        )
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width)
    if chosen.goals:
        _goals(console, chosen)
    elif chosen.sizing:
        _sizing(console, chosen)
    elif chosen.validate is not None:
        _validate(console, chosen, chosen.validate)
    elif chosen.validate_here:
        _validate_here(console, chosen)
    else:
        _simulate(console, chosen)


def _simulate(console: Console, options: Options) -> None:
    from mlx_cb.bench.sim import labelled
    from mlx_cb.bench.sim.engines import engine, simulate
    from mlx_cb.bench.workloads import make

    substrate = _substrate(options)
    name = options.workload or ""
    workload = make(name, _parameters(name, options))
    engines = [engine(text) for text in options.engine or ("ours", "P", "T")]
    rounds, outcomes = options.rounds or 1, []
    for one in engines:
        with console.status(f"{name}: {one.label}"):
            outcomes.append(
                simulate(name, workload, one, substrate, seed=options.seed, rounds=rounds)
            )
    report = labelled.new_report()
    run = labelled.entry(name, workload, substrate, outcomes, seed=options.seed, rounds=rounds)
    report["runs"].append(run)
    console.print(labelled.table(run))
    _write(report, options)


def _goals(console: Console, options: Options) -> None:
    from mlx_cb.bench.sim import goals, labelled

    with console.status("goals") as status:
        found = goals.all_goals(options.seed, status.update)
    console.print(labelled.goals_table(found, goals.machine().name))
    _write(labelled.new_report() | {"goals": [goal.as_dict() for goal in found]}, options)
    if not all(goal.is_met for goal in found):
        sys.exit(1)


def _sizing(console: Console, options: Options) -> None:
    from mlx_cb.bench.sim import labelled
    from mlx_cb.bench.sim.sizing import advise
    from mlx_cb.bench.workloads.team import People

    substrate = _substrate(options)
    advice = []
    for people in options.people or (5, 20, 100):
        load = People(people=people, agents=options.agents, scale=1.0)
        with console.status(f"{people} people") as status:
            advice.append(advise(substrate, load, seed=options.seed, announce=status.update))
    console.print(labelled.advice_table(advice, substrate.name))
    _write(labelled.new_report() | {"advice": [one.as_dict() for one in advice]}, options)


def _validate(console: Console, options: Options, file: Path) -> None:
    import msgspec

    from mlx_cb.bench.sim.measured import SHIPPED, description_of, read_description
    from mlx_cb.bench.sim.validate import validate

    try:
        report = msgspec.json.decode(file.read_bytes())
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{file} is not a report: {error}") from error
    if not isinstance(report, dict) or "runs" not in report:
        raise InvalidRequest(f"{file} is not a report of mlx-cb bench")
    if "description" in report and options.machine is None:
        description = description_of(report["description"], str(file))
    else:
        description = read_description(options.machine or SHIPPED)
    found = validate(report, description, skip=options.skip)
    _conclude(console, found, description, options)


def _validate_here(console: Console, options: Options) -> None:
    from mlx_cb.bench.measuring import Policy
    from mlx_cb.bench.report import write_json
    from mlx_cb.bench.servers import float32_copy
    from mlx_cb.bench.sim.here import MEASURED_ROUNDS, Settings, measure_here
    from mlx_cb.bench.sim.measured import description_of
    from mlx_cb.bench.sim.validate import validate
    from mlx_cb.config import ModelConfig
    from mlx_cb.model.resolve import cache_dir, resolve

    folder = float32_copy(resolve(ModelConfig(model="demo")), cache_dir() / "bench")

    def kept(report: dict[str, Any]) -> None:
        if options.json_file:
            write_json(report, options.json_file)

    def announce(what: str) -> None:
        console.print(f"measuring: {what}")

    policy = Policy(options.allow_load)
    rounds = options.rounds or MEASURED_ROUNDS
    settings = Settings(policy, options.seed, rounds, announce=announce, keep=kept)
    report = asyncio.run(measure_here("demo", folder, settings))
    description = description_of(report["description"], "the probe")
    console.print(report["verdict"]["text"])
    found = validate(report, description)
    _conclude(console, found, description, options)


def _conclude(console: Console, found: Any, description: Any, options: Options) -> None:
    from mlx_cb.bench.sim.labelled import validation_table
    from mlx_cb.bench.sim.measured import SHIPPED, write_description
    from mlx_cb.bench.sim.validate import keep

    if options.keep:
        write_description(description, SHIPPED)
        keep(found)
    console.print(validation_table(found))
    console.print(f"Fitted: {found.fitted_on}. The simulator was {found.summary()}.")
    if not found.passed:
        sys.exit(1)


def _substrate(options: Options) -> Any:
    from mlx_cb.bench.sim.machines import chip_named, model_named
    from mlx_cb.bench.sim.measured import SHIPPED, read_description
    from mlx_cb.bench.sim.substrate import apple

    if options.chip == _CPU:
        return read_description(options.machine or SHIPPED).substrate()
    return apple(chip_named(options.chip), model_named(options.model), options.memory)


def _parameters(name: str, options: Options) -> dict[str, str]:
    """As given; on a Mac the traces' lengths are not divided unless somebody says so."""
    import dataclasses

    from mlx_cb.bench.workloads import WORKLOADS

    given = dict(pair(text) for text in options.param)
    cls = WORKLOADS.get(name.rstrip("0123456789"))
    known = {field.name for field in dataclasses.fields(cls)} if cls is not None else set()
    if options.chip != _CPU and "scale" in known:
        given.setdefault("scale", "1")
    return given


def pair(text: str) -> tuple[str, str]:
    """Name and value. Raises UsageError when it is not NAME=VALUE."""
    name, found, value = text.partition("=")
    if not found:
        raise click.UsageError(f"{text!r} is not NAME=VALUE")
    return name, value


def _write(report: dict[str, Any], options: Options) -> None:
    if options.json_file:
        from mlx_cb.bench.report import write_json

        write_json(report, options.json_file)
