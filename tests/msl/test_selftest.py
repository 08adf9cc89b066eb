"""`mlx-cb selftest` on this machine, and its Mac half over the emulator."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner

from mlx_cb.attention.kernels import KernelCall, kernel_names
from mlx_cb.attention.tuning import Tuning, default_tuning, load_tuning, save_tuning
from mlx_cb.cli.selftest import command
from mlx_cb.model.kernel_bench import BenchSizes, KernelBench
from mlx_cb.model.selftest import check_case, check_writes_in_place, kernel_cases

from .emulator import emulate

SMALL = BenchSizes(
    repeats=1,
    kv_heads=1,
    group=2,
    dim=64,
    decodes=((1, 40),),
    prefill=(8, 24),
    matmul=(16, 256),
    vocabulary=500,
    key_simdgroups=(4, 8),
    registers=(256,),
    partitions=(16, 512),
    prefill_rows=(8,),
)


def test_command_says_what_it_cannot_check() -> None:
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    done = CliRunner().invoke(command, [])
    assert done.exit_code == 0, done.output
    assert "ok  KV writes in place" in done.output
    assert "not checked  kernel results: no Metal GPU here" in done.output
    done = CliRunner().invoke(command, ["--json", "--bench"])
    report = json.loads(done.output)
    assert report["gpu"] == "none"
    assert {check["status"] for check in report["checks"]} == {"ok", "not checked"}


def test_cases_reach_every_kernel() -> None:
    seen = set()
    for case in kernel_cases(Tuning()):
        seen |= {call.kernel.name for call in case.build().calls}
    assert seen == set(kernel_names())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for i, c in enumerate(kernel_cases(Tuning())) if i % 6 == 0], ids=lambda c: c.name
)
def test_cases_pass_on_the_emulator(case: object) -> None:
    result = check_case(case, emulate)
    assert result.status == "ok", result


def test_failures_are_reported() -> None:
    def wrong(call: KernelCall) -> list[mx.array]:
        return [output * 2 for output in emulate(call)]

    def broken(call: KernelCall) -> list[mx.array]:
        raise RuntimeError("Unable to build metal library")

    case = next(iter(kernel_cases(Tuning())))
    assert check_case(case, wrong).status == "failed"
    result = check_case(case, broken)
    assert (result.status, "Unable to build" in result.detail) == ("failed", True)


def test_a_copied_pool_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_cb.attention.kv_storage import KVLayer

    assert check_writes_in_place(1 << 24).status == "ok"
    write = KVLayer.write

    def copying(self: KVLayer, *rows: mx.array) -> None:
        kept = self.keys.arrays[0].reshape(-1)  # a second holder of the same buffer
        mx.eval(kept)
        write(self, *rows)
        mx.eval(self.arrays(), kept)

    monkeypatch.setattr(KVLayer, "write", copying)
    assert check_writes_in_place(1 << 24).status == "failed"


def test_bench_runs_and_tunes() -> None:
    """Over the emulator and a made-up clock: the code path, not the speed."""
    ticks = iter(range(1, 100_000))
    bench = KernelBench(emulate, SMALL, clock=lambda: float(next(ticks)))
    timings = bench.report(Tuning())
    assert [t.name for t in timings][:3] == [
        "paged_decode 1 x 40",
        "paged_prefill 8 of 24",
        "qmm_small 1 rows",
    ]
    assert all(t.seconds == 1.0 for t in timings)
    assert timings[0].bytes == 40 * 64 * 2 * 2
    tuned = bench.tune(Tuning())
    assert (tuned.key_simdgroups, tuned.partition, tuned.prefill_rows) == (4, 16, 8)
    assert tuned.qmm_max_rows == 16  # never slower than MLX on a clock where all is equal


def test_tuning_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tuning.json"
    assert load_tuning("applegpu_g15s", path) == default_tuning("applegpu_g15s")
    assert default_tuning("applegpu_g13g").qmm_max_rows == 8
    assert default_tuning("applegpu_g16d").qmm_max_rows == 0
    assert default_tuning("unheard of") == Tuning()
    measured = Tuning(partition=256)
    save_tuning("applegpu_g15s", measured, path)
    save_tuning("applegpu_g13g", Tuning(), path)
    assert load_tuning("applegpu_g15s", path) == measured
    for text in (
        "{",
        '{"applegpu_g15s": {"speed": 3}}',
        '{"applegpu_g15s": {"fill": "much"}}',
        "[]",
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match="delete it or run"):
            load_tuning("applegpu_g15s", path)
