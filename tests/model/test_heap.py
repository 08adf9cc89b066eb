"""The heap keeps what steps free, and gives it back when asked."""

import subprocess
import sys

PROGRAM = """
import resource, sys
import mlx.core as mx, psutil
from mlx_cb.model import heap

if sys.argv[1] == "kept":
    heap.keep_arrays()
def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    mx.eval(mx.zeros((12_000_000,)) + 1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(3):
    faults = work()
full = psutil.Process().memory_info().rss
heap.give_back()
print(faults, full - psutil.Process().memory_info().rss)
"""


def run(how: str) -> list[int]:
    """Page faults of a third array of 48 MB, and bytes given back afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True
    )
    return [int(word) for word in done.stdout.split()]


def test_a_large_array_s_memory_is_used_again_and_given_back():
    faults, given_back = run("kept")
    assert faults < 500
    assert given_back > 40e6
    faults, _ = run("fresh")
    assert faults > 10_000
