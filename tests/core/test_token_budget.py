"""The step's size: kept by what streams will feel, and large enough to be worth it."""

from __future__ import annotations

from mlx_cb.config import SchedulerConfig
from mlx_cb.core.cost_model import StepCostModel
from mlx_cb.core.token_budget import STRETCH, StepShape, token_budget


def budget(decodes: int, crowd: int, *, base: float = 0.06, per_row: float = 0.003) -> int:
    return token_budget(
        SchedulerConfig(), StepCostModel(base, per_row), StepShape(decodes, crowd, 0)
    )


def test_a_step_stays_within_a_few_gaps() -> None:
    model = StepCostModel(0.06, 0.003)
    rows = budget(8, 9)
    assert model.predict(rows, 0) <= STRETCH * model.predict(9, 0) < model.predict(rows + 1, 0)


def test_many_who_wait_may_join_in_larger_steps() -> None:
    assert budget(1, 16) > budget(1, 2)


def test_an_idle_machine_prefills_efficiently_however_slow_it_is() -> None:
    assert 60 <= budget(0, 1) <= 65
    slow = budget(0, 1, base=0.6, per_row=0.03)
    assert slow == 64, "ten times slower: the same rows, not a tenth"


def test_a_fixed_number_is_taken_as_it_is() -> None:
    config = SchedulerConfig(max_num_batched_tokens=7)
    assert token_budget(config, StepCostModel(), StepShape(3, 3, 0)) == 7


def test_a_step_is_whole_tiles_and_what_decodes_leave_of_one_is_used() -> None:
    def rows(decodes: int, per_row: float) -> int:
        config = SchedulerConfig(tile_rows=32)
        return token_budget(config, StepCostModel(0.01, per_row), StepShape(decodes, decodes, 0))

    assert rows(8, 0.0013) == 64, "69 rows would fit the time and cost three tiles"
    assert rows(8, 0.01) == 32, "one tile is there in any case"
    assert rows(33, 0.01) % 32 == 0

    tight = SchedulerConfig(tile_rows=32, itl_target_ms=1.0)
    late = StepCostModel(0.01, 1.0)
    assert token_budget(tight, late, StepShape(64, 1, 0)) == 96, "those who wait get a tile"
