"""`mlx-cb selftest`: are the kernels right, and how fast are they, on this very machine."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import click


@click.command("selftest")
@click.option("--bench", is_flag=True, help="Also measure speed and write the tuning it finds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bench: bool, as_json: bool) -> None:
    """Check every Metal kernel against float64 on this machine's GPU.

    \b
    mlx-cb selftest                 about a minute; exit code 1 if anything is wrong
    mlx-cb selftest --bench --json  also measure, tune, and print what to send us
    """
    from mlx_cb.attention.kernels import launch_metal
    from mlx_cb.attention.select import runs_on_metal
    from mlx_cb.attention.tuning import gpu_architecture, load_tuning
    from mlx_cb.model.selftest import CheckResult, check_case, check_writes_in_place, kernel_cases

    report: dict[str, Any] = {
        "machine": platform.platform(),
        "mlx": version("mlx"),
        "gpu": gpu_architecture(),
        "checks": [],
    }

    def add(result: CheckResult) -> None:
        report["checks"].append(result.to_json())
        if not as_json:
            click.echo(f"{result.status:>11}  {result.name}: {result.detail}")

    add(check_writes_in_place())
    if runs_on_metal():
        tuning = load_tuning(report["gpu"])
        for case in kernel_cases(tuning):
            add(check_case(case, launch_metal))
        if bench:
            _bench(report, as_json)
    else:
        why = "no Metal GPU here; the kernels compile and run only on Apple Silicon"
        for name in ("kernel results", "kernel speed"):
            add(CheckResult(name, "not checked", why))
    failed = [check for check in report["checks"] if check["status"] == "failed"]
    if as_json:
        click.echo(json.dumps(report, indent=2))
    elif failed:
        click.echo(f"{len(failed)} of {len(report['checks'])} checks failed")
    if failed:
        raise SystemExit(1)


def _bench(report: dict[str, Any], as_json: bool) -> None:
    """Measure with the present tuning, tune, and save what was found."""
    from mlx_cb.attention.kernels import launch_metal
    from mlx_cb.attention.tuning import load_tuning, save_tuning
    from mlx_cb.model.kernel_bench import KernelBench

    kernels = KernelBench(launch_metal)
    tuning = kernels.tune(load_tuning(report["gpu"]))
    path = save_tuning(report["gpu"], tuning)
    report["timings"] = [timing.to_json() for timing in kernels.report(tuning)]
    report["tuning"] = {"file": str(path), **asdict(tuning)}
    if as_json:
        return
    for row in report["timings"]:
        click.echo(f"{row['seconds'] * 1e3:9.3f} ms {row['gb_per_s']:7.1f} GB/s  {row['name']}")
    click.echo(f"tuning written to {path}: {asdict(tuning)}")
