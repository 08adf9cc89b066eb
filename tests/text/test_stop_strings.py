"""Stop strings over pieces of text: cases C014 to C016."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cb.text.stop_strings import StopMatch, StopStrings


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """What is shown, piece by piece, and the stop string that ended it."""
    stop_strings = StopStrings(stops)
    shown: list[str] = []
    for piece in pieces:
        safe = stop_strings.feed(piece)
        if isinstance(safe, StopMatch):
            return [*shown, safe.text], safe.stop
        shown.append(safe)
    return [*shown, stop_strings.finish()], None


def test_c014_a_stop_string_over_several_tokens() -> None:
    shown, stop = run(["al", "pha be", "ta gam", "ma delta"], ["beta gamma"])
    assert "".join(shown) == "alpha "
    assert stop == "beta gamma"


def test_c015_no_part_of_a_stop_string_is_shown() -> None:
    assert run(["Hi", "\nUs", "er", ":", " more"], ["\nUser:"]) == (["Hi", "", "", ""], "\nUser:")
    shown, stop = run(["Hi", "\nUs", "ual"], ["\nUser:"])
    assert ("".join(shown), stop) == ("Hi\nUsual", None)
    assert shown[0] == "Hi"  # text that cannot be a stop string does not wait


def test_c016_held_text_is_shown_at_the_end() -> None:
    shown, stop = run(["Sky", " is", " red", "?\n"], ["\n\n"])
    assert ("".join(shown), stop) == ("Sky is red?\n", None)
    assert run(["Sky", " is", " red", "?\n"], ["\n"]) == (["Sky", " is", " red", "?"], "\n")


def test_only_a_proper_prefix_of_a_stop_string_is_held() -> None:
    assert run(["aXbXc"], ["Xd"]) == (["aXbXc", ""], None)
    assert run(["aab"], ["abc"]) == (["a", "ab"], None)


LETTERS = st.text(alphabet="ab", max_size=12)


def cut_at(text: str, places: list[int]) -> list[str]:
    marks = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(marks)]


@settings(max_examples=400)
@given(
    LETTERS,
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_the_result_does_not_depend_on_the_cuts(
    text: str, stops: list[str], places: list[int]
) -> None:
    by_character = run(list(text), stops)
    in_pieces = run(cut_at(text, places), stops)
    assert "".join(by_character[0]) == "".join(in_pieces[0])
    assert by_character[1] == in_pieces[1]
    # The slow, obvious rule: the shortest beginning of the text that ends in a stop string.
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            assert "".join(in_pieces[0]) == text[: end - len(longest)]
            return
    assert "".join(in_pieces[0]) == text
