"""A JSON value followed in pieces: whole exactly where it ends, broken where it cannot go on."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cb.text.json_prefix import JsonPrefix

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)


def read(text: str, cuts: list[int]) -> tuple[JsonPrefix, int]:
    """The text in pieces; returns how much of it was taken."""
    prefix, taken = JsonPrefix(), 0
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        count = prefix.feed(text[start:end])
        taken += count
        if count < end - start:
            break
    return prefix, taken


@settings(max_examples=100, deadline=None)
@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(0, 10**6)))
def test_a_whole_object_is_whole_at_its_last_brace(
    value: dict[str, Any], escaped: bool, indent: int | None, cuts: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=escaped, indent=indent)
    prefix, taken = read(text + "}{ more", [*cuts, len(text)])
    assert (prefix.is_whole, prefix.is_broken, taken) == (True, False, len(text))
    one_by_one = JsonPrefix()
    for sign in text:
        assert not one_by_one.is_whole
        assert one_by_one.feed(sign) == 1
    assert one_by_one.is_whole


@settings(max_examples=200, deadline=None)
@given(OBJECTS, st.data())
def test_it_is_whole_for_exactly_what_parses(value: dict[str, Any], data: st.DataObject) -> None:
    """A character of a good text is changed, put in or left out."""
    text = json.dumps(value)
    place = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(st.text(alphabet='{}[]:,"\\ 01-+.eEtrufalsn\n\x00é', max_size=2))
    text = text[:place] + put + text[place + data.draw(st.integers(0, 1)) :]
    prefix, taken = read(text, data.draw(st.lists(st.integers(0, 10**6), max_size=4)))
    if not text.lstrip(" \n\t\r").startswith("{"):
        return
    try:
        _, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(text.lstrip())
    except ValueError:
        assert not prefix.is_whole
        return
    assert prefix.is_whole
    assert text[:taken].strip() == text.lstrip()[:end]


def _refuse(name: str) -> Any:
    raise ValueError(name)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a": bad}', 6), ("{a: 1}", 1), ("{'a': 1}", 1), ('{"a" 1}', 5), ('{"a": 1,}', 8),
        ('{"a": [1,]}', 9), ('{"a": 01}', 7), ('{"a": 1.}', 8), ('{"a": 1e}', 8), ('{"a": -}', 7),
        ('{"a": +1}', 6), ('{"a": .5}', 6), ('{"a": NaN}', 6), ('{"a": nul}', 9),
        ('{"a": tru1}', 9),
        ('{"a": "x\n"}', 8), ('{"a": "\\x"}', 8), ('{"a": "\\u12g4"}', 11), ('{"a": 1]', 7),
        ('{"a": {]', 7), ("[}", 1), ('{"a": 1 2}', 8), ("{,", 1), ('{"a"}', 4), ("</tool_call>", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 100])
def test_where_it_breaks(text: str, taken: int, size: int) -> None:
    prefix, count = read(text, list(range(0, len(text), size)))
    assert prefix.is_broken
    assert count == taken
    assert prefix.feed("}") == 0
