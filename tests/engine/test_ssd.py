"""The SSD tier under a real model: what comes back is exact, and what cannot be used never is.

Models with windows and states are in test_ssd_families.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_cb.config import CacheConfig, EngineConfig, SchedulerConfig
from mlx_cb.core.outputs import FinishReason
from mlx_cb.engine.core import EngineCore
from tests import tiny
from tests.engine.one_folder import OneFolder

BLOCK_SIZE = 8
BYTES_PER_TOKEN = 2 * 2 * 16 * 4 * 2


@functools.cache
def model(seed: int = 0) -> tiny.llama.Model:
    return tiny.llama_model(seed)


@functools.cache
def solo(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return tiny.solo(model(), list(prompt), max_tokens)


class Engines(OneFolder):
    """Of the tiny llama."""

    def start(self, num_blocks: int = 64, seed: int = 0, **scheduler: object) -> EngineCore:
        """A new engine, as after a restart."""
        config = EngineConfig(
            cache=CacheConfig(
                block_size=BLOCK_SIZE,
                kv_memory=num_blocks * BLOCK_SIZE * BYTES_PER_TOKEN,
                ssd_cache=str(self.folder),
                ssd_cache_size=10**8,
            ),
            scheduler=SchedulerConfig(**scheduler),
            attention="reference",
        )
        return self.begin(config, tiny.loaded_model(model(seed)))


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path / "ssd")
    yield made
    made.stop()


def ask(core: EngineCore, name: str, prompt: list[int], output: int = 10) -> tiny.Collected:
    core.add(name, prompt, tiny.greedy(output))
    collected = tiny.run(core)
    assert collected.finish_reasons[name] is FinishReason.LENGTH
    tiny.same_tokens(model(), prompt, collected.token_ids[name], solo(tuple(prompt), output))
    return collected


def computed(core: EngineCore, name: str) -> int:
    """Prompt tokens of a request that went through the model."""
    chunks = (chunk for record in core.scheduler.journal.records for chunk in record.prefills)
    return sum(chunk.num_tokens for chunk in chunks if chunk.request_id == name)


def block_files(engines: Engines) -> list[Path]:
    return sorted(engines.folder.rglob("*.kv"))


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_restart_finds_the_prefix_and_computes_the_rest(
    engines: Engines, pipelined: bool
) -> None:
    prompt = [(7 * index) % tiny.VOCAB_SIZE for index in range(150)]
    core = engines.start(pipelined=pipelined)
    ask(core, "cold", prompt)
    assert computed(core, "cold") == 150
    engines.stop()
    core = engines.start(pipelined=pipelined)
    collected = ask(core, "warm", prompt)
    assert computed(core, "warm") == 150 % BLOCK_SIZE
    assert collected.outputs["warm"][-1].num_cached_tokens == 144
    assert core.ssd.status()["restored_blocks"] == 18
    follow_up = [*prompt, *collected.token_ids["warm"], 1, 2, 3]
    ask(core, "next turn", follow_up)
    assert computed(core, "next turn") <= BLOCK_SIZE + 3


def test_writing_happens_while_nothing_runs(engines: Engines) -> None:
    core = engines.start()
    ask(core, "cold", list(range(100)))
    while core.idle():
        pass
    assert core.ssd.status()["stored_blocks"] == 13
    assert not core.idle()


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_pool_of_half_the_demand_spills_and_recomputes_little(
    engines: Engines, pipelined: bool
) -> None:
    prompts = [[(31 * r + 5 * i) % tiny.VOCAB_SIZE for i in range(70)] for r in range(4)]
    needed = 4 * -(-(70 + 60 + 1) // BLOCK_SIZE)
    core = engines.start(num_blocks=needed // 2, pipelined=pipelined, max_num_batched_tokens=96)
    core.scheduler.growth.output_tokens = 0.0  # lets in more than will fit
    for index, prompt in enumerate(prompts):
        core.add(f"r{index}", prompt, tiny.greedy(60))
    collected = tiny.run(core)
    for index, prompt in enumerate(prompts):
        got = collected.token_ids[f"r{index}"]
        tiny.same_tokens(model(), prompt, got, solo(tuple(prompt), 60))
    assert core.scheduler.ladder.gave_way > 0
    assert core.scheduler.restoring.num_tokens > 0
    assert core.scheduler.ladder.recomputed_tokens <= 0.05 * 4 * 130
    assert core.counters.failed_steps == 0


@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 10),
            st.sampled_from([(), tuple(range(70)), tuple(range(40))]),
            st.lists(st.integers(0, 210), min_size=1, max_size=20).map(tuple),
            st.integers(1, 24),
        ),
        min_size=1,
        max_size=6,
    ),
    aborts=st.lists(st.tuples(st.integers(1, 25), st.integers(0, 5)), max_size=2),
    budget=st.one_of(st.integers(4, 16), st.integers(17, 80)),
    spare_blocks=st.integers(0, 5),
    pipelined=st.booleans(),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_runs_over_one_folder_equal_solo_runs(
    engines: Engines,
    arrivals: list[tuple[int, tuple[int, ...], tuple[int, ...], int]],
    aborts: list[tuple[int, int]],
    budget: int,
    spare_blocks: int,
    pipelined: bool,
) -> None:
    """Every example is a restart: prefixes come from earlier examples' files too."""
    requests = [(when, head + tail, output) for when, head, tail, output in arrivals]
    longest = max(len(prompt) + output for _, prompt, output in requests)
    core = engines.start(
        num_blocks=-(-longest // BLOCK_SIZE) + 1 + spare_blocks,
        max_num_batched_tokens=budget,
        pipelined=pipelined,
    )
    collected = tiny.run_arrivals(core, requests, aborts, max_ticks=20_000)
    tiny.like_alone(model(), collected, requests, solo)


def test_damaged_files_are_never_used(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    prompt = list(range(100))
    ask(engines.start(), "cold", prompt)
    engines.stop()
    files = block_files(engines)
    assert len(files) == 13
    for index, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[(index * 977) % len(data)] ^= 1 << index % 8
        path.write_bytes(data)
    core = engines.start()
    caplog.clear()
    ask(core, "warm", prompt)
    assert computed(core, "warm") == 100
    assert "is not used and is deleted" in caplog.text
    assert core.ssd.status()["unusable_files"] >= 1


def test_files_under_other_names_are_never_used(engines: Engines) -> None:
    """Whole files, each under the name of another block."""
    prompt = list(range(100))
    ask(engines.start(), "cold", prompt)
    engines.stop()
    files = block_files(engines)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    core = engines.start()
    ask(core, "warm", prompt)
    assert computed(core, "warm") == 100


def test_another_models_blocks_are_never_used(engines: Engines) -> None:
    prompt = list(range(100))
    ask(engines.start(), "cold", prompt)
    other = engines.start(seed=1)
    assert other.ssd.status()["blocks"] == 0
    other.add("r", prompt, tiny.greedy(10))
    got = tiny.run(other).token_ids["r"]
    tiny.same_tokens(model(1), prompt, got, tiny.solo(model(1), prompt, 10))
    assert computed(other, "r") == 100
    again = engines.start()
    ask(again, "warm", prompt)
    assert computed(again, "warm") == 4, "both models' blocks are in the folder"


def test_one_users_blocks_are_not_anothers(engines: Engines) -> None:
    prompt = list(range(100))
    core = engines.start()
    core.add("ann", prompt, tiny.greedy(5), user="ann")
    tiny.run(core)
    core = engines.start()
    core.add("bob", prompt, tiny.greedy(5), user="bob")
    tiny.run(core)
    core.add("ann", prompt, tiny.greedy(5), user="ann")
    tiny.run(core)
    assert computed(core, "bob") == 100
    assert computed(core, "ann") == 4


def test_a_folder_that_cannot_be_used_turns_the_tier_off_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    core = Engines(tmp_path / "file" / "ssd").start()
    assert core.ssd.status()["state"] == "off"
    assert "Not a directory" in core.ssd.status()["reason"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    ask(core, "r", list(range(50)))


def test_a_disk_that_fills_up_turns_the_tier_off_and_serving_goes_on(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engines.start(num_blocks=20, pipelined=False)
    ask(core, "a", list(range(100)))
    while core.idle():
        pass

    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    for index in range(4):
        ask(core, f"r{index}", [(index * 9 + i) % tiny.VOCAB_SIZE for i in range(120)])
        while core.idle():
            pass
    engines.core.ssd.store.close(30)  # type: ignore[union-attr]
    status = core.ssd.status()
    assert status["state"] == "off"
    assert status["reason"] == "writing failed: No space left on device"
    assert status["blocks"] == 0
    ask(core, "last", list(range(100)))
    assert not list(engines.folder.rglob("*.part"))
