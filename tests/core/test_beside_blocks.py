"""Which prefix can be brought back whole, from what is where."""

from __future__ import annotations

import pytest

from mlx_cb.core.beside_blocks import Part, Places, PrefixNeeds, key_of

BLOCK = 8
HASHES = [bytes([number]) * 16 for number in range(10)]
WINDOWED = PrefixNeeds(window=16)
RECURRENT = PrefixNeeds(has_state=True)


def border(
    needs: PrefixNeeds,
    blocks: set[int] = frozenset(range(10)),  # type: ignore[assignment]
    windows: set[int] = frozenset(),  # type: ignore[assignment]
    states: set[int] = frozenset(),  # type: ignore[assignment]
    pool: set[int] = frozenset(),  # type: ignore[assignment]
    start: int = 0,
) -> tuple[int, list[int]]:
    """Blocks that come back, and which of them with windows; numbers are what the SSD has."""
    kinds = ((blocks, Part.BLOCK), (windows, Part.WINDOWS), (states, Part.STATE))
    on_ssd = {key_of(HASHES[n], part) for numbers, part in kinds for n in numbers}
    found = {HASHES[number]: number for number in pool}
    pieces = needs.pieces(HASHES, start, BLOCK, Places(on_ssd, found.get))
    parts = [piece.parts for piece in pieces]
    if needs.has_state and pieces:
        assert parts.pop() == (Part.STATE,)
    whole = [start + n for n, own in enumerate(parts) if Part.WINDOWS in own]
    return len(parts), whole


@pytest.mark.parametrize(
    ("windows", "wanted"),
    [
        (set(range(10)), (10, [8, 9])),  # 16 positions with the next token's own: two blocks
        ({3, 4, 8}, (5, [3, 4])),
        ({9}, (0, [])),
        ({0}, (1, [0])),
        (set(), (0, [])),
    ],
)
def test_a_window_sees_the_newest_blocks(windows: set[int], wanted: object) -> None:
    assert border(WINDOWED, windows=windows) == wanted


def test_blocks_of_the_pool_do_beside_those_of_the_ssd_outside_of_the_window() -> None:
    assert border(WINDOWED, {0, 1, 4, 5}, {4, 5}, pool={2, 3}) == (6, [4, 5])
    assert border(WINDOWED, {0, 1, 4}, {4, 5}, pool={2, 3, 5}) == (0, [])


def test_what_a_request_has_already_is_not_asked_for() -> None:
    assert border(WINDOWED, {4, 5}, {4, 5}, start=4) == (2, [4, 5])
    assert border(WINDOWED, {4}, {4}, start=4) == (1, [4])
    assert border(RECURRENT, {4, 5}, states={1, 4}, start=4) == (1, [])


def test_a_state_decides_where_recurrent_layers_go_on() -> None:
    assert border(RECURRENT, states={3, 6}) == (7, [])
    assert border(RECURRENT, blocks={0, 1, 2, 3, 4}, states={3, 6}) == (4, [])
    assert border(RECURRENT) == (0, [])


def test_without_blocks_of_its_own_a_state_is_enough() -> None:
    only = PrefixNeeds(has_blocks=False, has_state=True)
    assert border(only, blocks=set(), states={8}) == (9, [])


def test_windows_and_states_are_needed_at_the_same_border() -> None:
    both = PrefixNeeds(has_blocks=False, window=16, has_state=True)
    assert border(both, blocks=set(), windows={0, 1, 4, 5, 6}, states={2, 5}) == (6, [4, 5])
    assert border(both, blocks=set(), windows={0, 1}, states={2, 5}) == (0, [])


def test_names_of_parts_differ_and_a_blocks_is_its_hash() -> None:
    names = {key_of(content, part) for content in HASHES for part in Part}
    assert len(names) == 30
    assert all(key_of(content, Part.BLOCK) == content for content in HASHES)
