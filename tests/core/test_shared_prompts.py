"""A marked prompt is everybody's, block by block; everything else stays its user's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_cb.core.kv_cache_manager import prefix_salt, shared_salt
from mlx_cb.core.request import Request
from mlx_cb.core.shared_prompts import SharedPrompts
from tests.core.test_prefix_sharing import BLOCK, Memory, request, run
from tests.core.test_scheduler import scheduler

MARKED = list(range(1, 43))
WHOLE = len(MARKED) // BLOCK * BLOCK
SHARED = SharedPrompts([MARKED, [*MARKED[:9], 90, 91, 92, 93, 94]], BLOCK)


def asked(name: str, prompt: list[int], user: str) -> Request:
    made = request(name, prompt, output=2, user=user)
    made.cache_salt = prefix_salt(user, "", "auto")
    made.shared_salt = shared_salt("auto")
    made.num_shared_blocks = SHARED.num_blocks(prompt)
    return made


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ([*MARKED, 7, 7, 7], WHOLE),
        (MARKED[:11], 8),
        ([*MARKED[:11], 7, *MARKED[12:]], 8),
        ([*MARKED[:9], 90, 91, 92, 5], 12),
        ([7, *MARKED], 0),
        ([], 0),
    ],
)
def test_only_whole_blocks_inside_a_marked_prompt_count(prompt: list[int], tokens: int) -> None:
    assert SHARED.num_blocks(prompt) * BLOCK == tokens


def test_nothing_is_shared_without_a_marked_prompt() -> None:
    assert SharedPrompts([], BLOCK).num_blocks(MARKED) == 0


def test_users_find_the_marked_prompt_and_nothing_else_of_each_other() -> None:
    """What a stranger finds does not depend on whether he asks what somebody has asked."""
    s, memory = scheduler(block_size=BLOCK, prefix_cache=True), Memory()
    own = [*range(60, 80)]
    for name, prompt, user, cached in (
        ("first", [*MARKED, *own], "ann", 0),
        ("the same text of another", [*MARKED, *own], "bob", WHOLE),
        ("another text of a third", [*MARKED, *reversed(own)], "carl", WHOLE),
        ("her own again", [*MARKED, *own], "ann", len(MARKED) + len(own) - 1),
        ("his own again", [*MARKED, *own, 5], "bob", len(MARKED) + len(own)),
        ("without the marked prompt", own, "dora", 0),
        ("that again, of another", own, "emil", 0),
    ):
        s.add(asked(name, prompt, user))
        run(s, memory)
        assert s.explain(name)["num_cached_tokens"] == cached, name


def test_those_who_come_together_wait_for_the_marked_prompt_only() -> None:
    s = scheduler(block_size=BLOCK, prefix_cache=True, max_num_batched_tokens=16)
    for user in ("ann", "bob", "carl"):
        s.add(asked(user, [*MARKED, *range(60, 72)], user))
    run(s, Memory())
    behind = len(MARKED) - WHOLE + 12
    assert sum(record.rows_prefill for record in s.journal.records) == WHOLE + 3 * behind


TAILS = st.lists(st.integers(1, 3), max_size=14)


@given(
    st.lists(
        st.tuples(st.sampled_from(["ann", "bob"]), st.integers(0, len(MARKED)), TAILS),
        min_size=2,
        max_size=8,
    )
)
def test_whatever_was_asked_before_a_stranger_finds_marked_blocks_at_most(
    asks: list[tuple[str, int, list[int]]],
) -> None:
    """Memory proves on the way that every row reads its own text."""
    s, memory = scheduler(block_size=BLOCK, prefix_cache=True), Memory()
    for index, (user, kept, tail) in enumerate(asks):
        s.add(asked(f"r{index}", [*MARKED[:kept], *tail, 1], user))
        run(s, memory)
    kept, tail = asks[-1][1:]
    prompt = [*MARKED[:kept], *tail, 1]
    stranger = asked("stranger", prompt, "carl")
    s.add(stranger)
    run(s, memory)
    assert stranger.num_cached_tokens <= SHARED.num_blocks(prompt) * BLOCK
