"""Engines that are killed while they write to the SSD tier, each over what the last one left.

Run as `python -m tests.engine.ssd_victim FOLDER KILLS SEED`. A parent process imports everything
and computes nothing; it forks one engine after the other and kills each at a random moment. Every
engine compares every token with the answers in FOLDER/answers.json, those from files included.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from mlx_cb.config import CacheConfig, EngineConfig, SchedulerConfig
from mlx_cb.engine.core import EngineCore
from tests import tiny

WRONG = 3
BLOCK_SIZE = 8
OUTPUT = 6
ROUND = 4  # requests at once


def prompts() -> list[list[int]]:
    """Texts that share beginnings, more of them than the folder may hold."""
    return [
        [(3 * (r % 6) + i) % 200 for i in range(60)] + [r + 5, *range(r, r + 40)] for r in range(18)
    ]


def serve(folder: Path, seed: int, started: int) -> None:
    """Ask the same questions for ever; ends only by a signal, or with WRONG."""
    model = tiny.llama_model()
    answers = json.loads((folder / "answers.json").read_text())
    config = EngineConfig(
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            kv_memory=40 * BLOCK_SIZE * 512,
            ssd_cache=str(folder / "ssd"),
            ssd_cache_size=500_000,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=64),
        attention="reference",
    )
    core = EngineCore(config, tiny.loaded_model(model))
    questions = prompts()
    order = random.Random(os.getpid())
    names = itertools.count()
    os.write(started, b"!")
    while True:
        asked = {f"r{next(names)}": order.randrange(len(questions)) for _ in range(ROUND)}
        for name, index in asked.items():
            core.add(name, questions[index], tiny.greedy(OUTPUT))
        collected = tiny.run(core)
        for name, index in asked.items():
            wanted = answers[index]
            tiny.same_tokens(model, questions[index], collected.token_ids[name], wanted)
        while core.idle():
            pass
        restored = core.ssd.status()["restored_blocks"]
        (folder / f"restored-{seed}").write_text(str(restored))


def main(folder: Path, kills: int, seed: int) -> int:
    """Returns the exit code; WRONG when an engine saw a wrong token or failed otherwise."""
    chance = random.Random(seed)
    restored = 0
    for _ in range(kills):
        reading, started = os.pipe()
        (folder / f"restored-{seed}").write_text("0")
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                serve(folder, seed, started)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(WRONG)
        os.close(started)
        os.read(reading, 1)
        os.close(reading)
        time.sleep(chance.uniform(0.0, 0.7))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return WRONG
        restored += int((folder / f"restored-{seed}").read_text() or 0)
    print(f"{kills} kills, {restored} blocks restored", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
