"""Streamed text equals the tokenizer's own decode: cases C019, C020, C021."""

from __future__ import annotations

import random

import pytest

from mlx_cb.text.detokenizer import LONGEST_HELD_RUN, new_detokenizer
from mlx_cb.text.token_bytes import DecoderKind
from mlx_cb.text.tokenizer import Tokenizer

MIXED = "ďábel 👍🏽 漢字 שלום 🇨🇿 family:👨‍👩‍👧 end"


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = new_detokenizer(tokenizer)
    return [detokenizer.feed([token_id]) for token_id in ids] + [detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, value: bytes) -> list[int]:
    """Ids of the tokens that each stand for one of these bytes."""
    wanted = {tokenizer.token_bytes[i]: i for i in range(tokenizer.vocab_size)}
    if tokenizer.token_bytes.kind is not DecoderKind.BYTE_LEVEL:
        wanted = {tokenizer.token_bytes[i]: i for i in tokenizer.token_bytes.byte_ids}
    return [wanted[bytes([byte])] for byte in value]


def test_kinds_of_decoders_are_recognised(
    byte_level: Tokenizer,
    sentencepiece: Tokenizer,
    sentencepiece_unstripped: Tokenizer,
    wordpiece: Tokenizer,
) -> None:
    kinds = [
        t.token_bytes.kind for t in (byte_level, sentencepiece, sentencepiece_unstripped, wordpiece)
    ]
    assert kinds == [
        DecoderKind.BYTE_LEVEL,
        DecoderKind.SENTENCEPIECE_STRIPPED,
        DecoderKind.SENTENCEPIECE,
        DecoderKind.OTHER,
    ]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "sentencepiece_unstripped"])
def test_c019_no_piece_holds_half_a_character(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(MIXED, add_special_tokens=False)
    first, second = new_detokenizer(tokenizer), new_detokenizer(tokenizer)
    pieces: tuple[list[str], list[str]] = ([], [])
    for token_id in ids:  # two streams interleaved
        pieces[0].append(first.feed([token_id]))
        pieces[1].append(second.feed([token_id]))
    for own, detokenizer in zip(pieces, (first, second), strict=True):
        own.append(detokenizer.finish())
        assert "".join(own) == tokenizer.decode(ids)
        assert "".join(own).strip() == MIXED
        assert not any("\ufffd" in piece for piece in own)


def test_c020_a_character_continues_after_a_token_with_a_space(byte_level: Tokenizer) -> None:
    half = byte_ids(byte_level, b"\xe6\xbc")
    space_word = byte_level.encode(" the", add_special_tokens=False)
    rest = byte_ids(byte_level, b"\xa2")
    pieces = stream(byte_level, half + space_word + rest)
    assert pieces[:2] == ["", ""]
    assert "".join(pieces) == byte_level.decode(half + space_word + rest) == "\ufffd the\ufffd"


def test_c020_an_invalid_byte_in_the_middle_is_one_mark(byte_level: Tokenizer) -> None:
    ids = [*byte_ids(byte_level, b"a\xff"), *byte_level.encode("b", add_special_tokens=False)]
    assert "".join(stream(byte_level, ids)) == "a\ufffdb"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_c020_a_pending_byte_at_the_end_is_at_most_one_mark(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    pieces = stream(tokenizer, byte_ids(tokenizer, b"\xe6"))
    assert pieces == ["", "\ufffd"]


def test_c021_two_thousand_random_streams_equal_decode(any_tokenizer: Tokenizer) -> None:
    rng = random.Random(21)
    for _ in range(2000):
        ids = [rng.randrange(any_tokenizer.vocab_size) for _ in range(rng.randrange(1, 14))]
        assert "".join(stream(any_tokenizer, ids)) == any_tokenizer.decode(ids), ids


def test_merged_outputs_give_the_same_text(any_tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    for _ in range(300):
        ids = [rng.randrange(any_tokenizer.vocab_size) for _ in range(12)]
        detokenizer = new_detokenizer(any_tokenizer)
        text, rest = "", ids
        while rest:
            cut = rng.randrange(1, len(rest) + 1)
            text += detokenizer.feed(rest[:cut])
            rest = rest[cut:]
        assert text + detokenizer.finish() == any_tokenizer.decode(ids)


def test_c021_a_leading_space_is_kept_or_removed_as_decode_does(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the sea", add_special_tokens=False)
    assert "".join(stream(sentencepiece, ids)) == "the sea"
    follows = new_detokenizer(sentencepiece, follows_text=True)
    assert follows.feed(ids) + follows.finish() == " the sea"


def test_a_long_run_of_byte_tokens_streams_before_it_ends(sentencepiece: Tokenizer) -> None:
    text = "漢" * LONGEST_HELD_RUN
    pieces = stream(sentencepiece, byte_ids(sentencepiece, text.encode()))
    assert "".join(pieces) == text
    assert sum(map(bool, pieces)) > 1


def test_control_tokens_are_hidden_unless_shown(byte_level: Tokenizer) -> None:
    end = byte_level.token_id("<|im_end|>")
    assert end is not None
    assert "".join(stream(byte_level, [end])) == ""
    shown = new_detokenizer(byte_level, frozenset({end}))
    assert shown.feed([end]) == "<|im_end|>"


def test_an_id_outside_the_vocabulary_is_no_text(byte_level: Tokenizer) -> None:
    assert "".join(stream(byte_level, [byte_level.vocab_size + 7])) == ""
