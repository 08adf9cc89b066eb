"""MLX's own attention kernels, from the installed wheel's headers, run unmodified in the bench.

They are known to work on GPUs: if the bench got simdgroup operations, barriers, matrices or
argument binding wrong, they would fail here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from .emulator import Buffer, Report, Schedule, run_text
from .rewrite import executable

HEADERS = Path(mx.__file__).parent / "include"
LIMITS = """
template <class U> struct Limits {
  static constexpr U finite_min = -metal::numeric_limits<U>::max();
  static constexpr U finite_max = metal::numeric_limits<U>::max();
};
"""
KERNELS = "mlx/backend/metal/kernels/"
OURS = f"{KERNELS}steel/utils/type_traits.h"  # the shim has its own
VECTOR = re.compile(
    r"\b((?:short|ulong|float|int)[23])\(((?:[^()]|\([^()]*\))*,(?:[^()]|\([^()]*\))*)\)"
)
FLAGS = (f"-I{HEADERS}", "-Wno-c++11-narrowing")


def inline_includes(path: str, seen: set[str]) -> str:
    """The header with MLX's other headers pasted in, so that the rewrites reach them too."""
    if path in seen:
        return ""
    seen.add(path)

    def paste(found: re.Match[str]) -> str:
        return found[0] if found[1] == OURS else inline_includes(found[1], seen)

    text = (HEADERS / path).read_text().replace("#pragma once", "")
    return re.sub(r'^#include "(mlx/[^"]+)"', paste, text, flags=re.M)


def header_kernel(path: str, call: str, constants: dict[str, object] | None = None) -> str:
    text = inline_includes(f"{KERNELS}{path}", set())
    text = re.sub(r"\[\[threadgroup\(\d\)\]\]", "", text)
    text = VECTOR.sub(r"\1{\2}", text)  # clang has no multi-argument constructor of vectors
    text = text.replace("[[kernel, max_total_threads_per_threadgroup(WM * WN * 32)]]", "[[kernel]]")
    instantiation = f'\ntemplate [[host_name("k")]] [[kernel]] decltype({call}) {call};\n'
    return executable(LIMITS + text + instantiation, constants)


@dataclass
class Arguments:
    """Buffers by Metal index; the gaps (arguments a function constant switches off) get 8 bytes."""

    given: dict[int, np.ndarray | int]

    def buffers(self) -> list[Buffer]:
        out = []
        for i in range(max(self.given) + 1):
            value = self.given.get(i, np.zeros(8, np.uint8))
            if isinstance(value, int):
                out.append(Buffer(str(i), None, value))
            else:
                out.append(Buffer(str(i), np.ascontiguousarray(value), value.nbytes))
        return out


def run(
    text: str, given: dict, grid: tuple, group: tuple, check: bool, schedule: Schedule
) -> tuple:
    threads = tuple(a * b for a, b in zip(grid, group, strict=True))
    return run_text(
        text,
        Arguments(given).buffers(),
        threads,
        group,
        check=check,
        schedule=schedule,
        flags=FLAGS,
    )


@pytest.fixture(scope="module")
def problem() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    heads, kv_heads, n, dim = 8, 2, 150, 64
    q = rng.standard_normal((heads, dim)).astype(np.float16)
    k = rng.standard_normal((kv_heads, n, dim)).astype(np.float16)
    v = rng.standard_normal((kv_heads, n, dim)).astype(np.float16)
    answer = mx.fast.scaled_dot_product_attention(
        *(mx.array(a.astype(np.float32))[None] for a in (q[:, None], k, v)), scale=dim**-0.5
    )
    return {"q": q, "k": k, "v": v, "answer": np.array(answer)[0, :, 0]}


def clean(report: Report) -> None:
    assert report.findings == []


@pytest.mark.parametrize(
    ("check", "schedule"),
    [*((False, schedule) for schedule in Schedule), (True, Schedule.FORWARD)],
)
def test_sdpa_vector(problem: dict, check: bool, schedule: Schedule) -> None:
    n, dim = problem["k"].shape[1:]
    given = {
        0: problem["q"],
        1: problem["k"],
        2: problem["v"],
        3: problem["q"].nbytes,
        4: np.int32([4]),
        5: np.int32([n]),
        6: np.uint64([n * dim]),
        7: np.uint64([dim]),
        8: np.uint64([n * dim]),
        9: np.uint64([dim]),
        10: np.float32([dim**-0.5]),
        17: np.int32([8]),
    }
    text = header_kernel("sdpa_vector.h", "sdpa_vector<half, 64, 64>")
    (raw,), report = run(text, given, (8, 1, 1), (1024, 1, 1), check, schedule)
    clean(report)
    got = raw.view(np.float16).reshape(8, dim).astype(np.float64)
    assert np.abs(got - problem["answer"]).max() < 2e-3 * np.abs(problem["answer"]).max()


@pytest.mark.parametrize("check", [False, True])
def test_sdpa_two_passes(problem: dict, check: bool) -> None:
    n, dim = problem["k"].shape[1:]
    blocks = 32
    given = {
        0: problem["q"],
        1: problem["k"],
        2: problem["v"],
        3: 8 * blocks * dim * 2,
        4: 8 * blocks * 4,
        5: 8 * blocks * 4,
        7: np.int32([n]),
        8: np.uint64([n * dim]),
        9: np.uint64([dim]),
        10: np.uint64([n * dim]),
        11: np.uint64([dim]),
        12: np.float32([dim**-0.5]),
        18: np.zeros(8, np.float16),
    }
    first = header_kernel("sdpa_vector.h", "sdpa_vector_2pass_1<half, 64, 64>", {"blocks": blocks})
    outputs, report = run(first, given, (2, 1, blocks), (32, 4, 1), check, Schedule.RANDOM)
    clean(report)
    second = header_kernel("sdpa_vector.h", "sdpa_vector_2pass_2<half, 64>")
    merged = {0: outputs[0], 1: outputs[1], 2: outputs[2], 3: 8 * dim * 2, 4: np.int32([blocks])}
    (raw,), report = run(second, merged, (8, 1, 1), (1024, 1, 1), check, Schedule.REVERSE)
    clean(report)
    got = raw.view(np.float16).reshape(8, dim).astype(np.float64)
    assert np.abs(got - problem["answer"]).max() < 2e-3 * np.abs(problem["answer"]).max()


@pytest.mark.slow
@pytest.mark.parametrize("check", [False, True])
def test_steel_attention(check: bool) -> None:
    """8x8 matrices: causal prefill with a ragged last tile."""
    rng = np.random.default_rng(4)
    heads, kv_heads, n, dim, rows, keys = 4, 2, 70, 64, 32, 32
    q, k, v = (
        rng.standard_normal((h, n, dim)).astype(np.float16) for h in (heads, kv_heads, kv_heads)
    )
    params = np.zeros(
        1,
        np.dtype(
            [("i", np.int32, 6), ("scale", np.float32), ("j", np.int32, 7), ("s", np.int64, 12)]
        ),
    )
    tiles = -(-n // rows)
    params["i"] = [1, heads, dim, n, n, heads // kv_heads]
    params["scale"] = dim**-0.5
    params["j"] = [tiles, -(-n // keys), n // rows, n // keys, n % rows, n % keys, 0]
    params["s"] = [
        h * n * dim if i == 0 else n * dim if i == 1 else dim
        for h in (heads, kv_heads, kv_heads, heads)
        for i in range(3)
    ]
    text = header_kernel(
        "steel/attn/kernels/steel_attention.h",
        "attention<half, 32, 32, 64, 64, 4, 1, half, float>",
        {"do_causal": True},
    )
    given = {0: q, 1: k, 2: v, 3: q.nbytes, 4: params.view(np.uint8), 8: np.zeros(8, np.float32)}
    (raw,), report = run(text, given, (tiles, heads, 1), (128, 1, 1), check, Schedule.FORWARD)
    clean(report)
    assert report.mma_ops > 0
    answer = mx.fast.scaled_dot_product_attention(
        *(mx.array(a.astype(np.float32))[None] for a in (q, k, v)), scale=dim**-0.5, mask="causal"
    )
    got = raw.view(np.float16).reshape(heads, n, dim).astype(np.float64)
    assert np.abs(got - np.array(answer)[0]).max() < 2e-3 * np.abs(np.array(answer)).max()
