"""What `--kv-memory auto` takes of a machine."""

from __future__ import annotations

import psutil

from mlx_cb.model.machine_memory import Machine

GIB = 2**30


def test_a_mac_gives_what_the_working_set_leaves() -> None:
    mac = Machine(available=100 * GIB, working_set=48 * GIB, active=8 * GIB, max_buffers=499_000)
    assert mac.kv_memory() == int(48 * GIB * 0.9) - 8 * GIB


def test_other_programs_come_first() -> None:
    busy = Machine(available=10 * GIB, working_set=48 * GIB, active=8 * GIB, max_buffers=499_000)
    assert busy.kv_memory() == 7 * GIB


def test_weights_that_are_not_loaded_yet_count() -> None:
    mac = Machine(available=100 * GIB, working_set=48 * GIB, active=0, max_buffers=499_000)
    assert mac.kv_memory(still_to_load=8 * GIB) == int(48 * GIB * 0.9) - 8 * GIB
    assert mac.kv_memory(still_to_load=80 * GIB) == 0


def test_without_a_gpu_it_is_a_share_of_what_is_free() -> None:
    assert Machine(10 * GIB, None, GIB, None).kv_memory() == 4 * GIB


def test_this_machine_can_be_read() -> None:
    here = Machine.read()
    assert 0 < here.available <= psutil.virtual_memory().total
    assert here.kv_memory() <= here.available
