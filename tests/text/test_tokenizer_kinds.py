"""Vocabularies of every kind: tokens equal the original library's, and streams are exact.

tiktoken files and bare sentencepiece models are converted at load; the libraries they come from
are the oracle. Texts are random mixtures of scripts, emoji, code and broken bytes.
"""

from __future__ import annotations

import base64
import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from mlx_cb.errors import UnsupportedModel
from mlx_cb.text.detokenizer import LONGEST_HELD_RUN, new_detokenizer
from mlx_cb.text.tiktoken_file import KINDS
from mlx_cb.text.token_bytes import DecoderKind
from mlx_cb.text.tokenizer import Tokenizer, tokenizer_file
from tests.text.conftest import CORPUS
from tests.text.test_detokenizer import byte_ids, stream

CHINESE = ["月之暗面发布了千亿参数模型。GPT4发布于2023年3月14日，共有1750亿个参数。"] * 20
PIECES = st.sampled_from(
    [
        *(
            "吾輩は猫である。",
            "ｶﾞｷﾞ",
            "漢字",
            "한국어",
            "שלום",
            "مرحبا",
            "Ünïcödé",
            "e\u0301",
            "नमस्ते",
        ),
        *("👍🏽", "👨\u200d👩\u200d👧", "🇯🇵🇨🇿", "🏴", "\u200d", "\ufeff", "\U0010ffff"),
        *("def f(x):\n\treturn x**2", "  ", "    ", "\r\n", "\n\n", "\t", "0x1F", "1234567"),
        *(" the", "The", "don't", "I'LL", "a", " ", "if(a&&b){}", "\x00", "\x7f", "<0x41>", "<|im"),
    ]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=6)), max_size=12).map("".join)


SPELLED_IN_BYTES = ["sentencepiece", "sentencepiece_unstripped"]


# tiktoken


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The byte-level vocabulary without its control tokens, as tiktoken numbers it."""
    added = set(tokenizer.added_tokens)
    tokens = [tokenizer.token_bytes[i] for i in range(tokenizer.vocab_size) if i not in added]
    return {token: rank for rank, token in enumerate(tokens)}


def write_tiktoken(folder: Path, ranks: dict[bytes, int], config: dict[str, Any]) -> Path:
    folder.mkdir()
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    name = "qwen.tiktoken" if config["tokenizer_class"] == "QWenTokenizer" else "tiktoken.model"
    (folder / name).write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiktoken_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, byte_level: Tokenizer
) -> tuple[Tokenizer, tiktoken.Encoding]:
    """Our conversion, and tiktoken itself with the same pattern."""
    name: str = request.param
    ranks = ranks_of(byte_level)
    first = len(ranks)
    config: dict[str, Any] = {"tokenizer_class": name, "eos_token": "[EOS]"}
    if name == "TikTokenTokenizer":
        named = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|im_end|>"}
        config["added_tokens_decoder"] = {str(i): {"content": c} for i, c in named.items()}
    folder = write_tiktoken(tmp_path_factory.mktemp("tiktoken") / name, ranks, config)
    # tiktoken's own engine has the same syntax for what the patterns use.
    oracle = tiktoken.Encoding(
        name, pat_str=KINDS[name].pattern, mergeable_ranks=ranks, special_tokens={}
    )
    return Tokenizer.load(folder), oracle


BOTH = pytest.mark.parametrize("tiktoken_pair", sorted(KINDS), indirect=True)


@BOTH
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_tokens_of_a_tiktoken_file_are_tiktokens(
    tiktoken_pair: tuple[Tokenizer, tiktoken.Encoding], text: str
) -> None:
    ours, oracle = tiktoken_pair
    is_plain = KINDS[oracle.name].normalizer is None
    normalized = text if is_plain else unicodedata.normalize("NFC", text)
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == oracle.encode_ordinary(normalized)
    assert "".join(stream(ours, ids)) == normalized


@BOTH
@given(data=st.binary(max_size=24))
@settings(max_examples=60, deadline=None)
def test_broken_bytes_of_a_tiktoken_file_stream_as_they_decode(
    tiktoken_pair: tuple[Tokenizer, tiktoken.Encoding], data: bytes
) -> None:
    ours, oracle = tiktoken_pair
    ids = byte_ids(ours, data)
    assert b"".join(oracle.decode_tokens_bytes(ids)) == data
    assert "".join(stream(ours, ids)) == data.decode("utf-8", "replace")


@BOTH
def test_control_tokens_of_a_tiktoken_file(
    tiktoken_pair: tuple[Tokenizer, tiktoken.Encoding],
) -> None:
    ours, oracle = tiktoken_pair
    end = ours.token_id("<|im_end|>")
    assert end == oracle.n_vocab + 2
    assert ours.encode("a<|im_end|>", add_special_tokens=False)[-1] == end
    assert ours.decode([end]) == ""
    assert ours.vocab_size == oracle.n_vocab + (256 if oracle.name.startswith("Tik") else 208)


def test_a_tiktoken_file_of_an_unknown_class_is_refused(
    tmp_path: Path, byte_level: Tokenizer
) -> None:
    folder = write_tiktoken(tmp_path / "m", ranks_of(byte_level), {"tokenizer_class": "Odd"})
    with pytest.raises(UnsupportedModel, match=r"needs the Python file of 'Odd', which is not run"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("content", ["QQ== 0\nQg== 2\n", "not base64!\n", "QQ==\n"])
def test_a_damaged_tiktoken_file_is_refused(content: str, tmp_path: Path) -> None:
    folder = write_tiktoken(tmp_path / "m", {}, {"tokenizer_class": "TikTokenTokenizer"})
    (folder / "tiktoken.model").write_text(content)
    with pytest.raises(UnsupportedModel, match="is not a tiktoken vocabulary"):
        Tokenizer.load(folder)


def test_a_converted_vocabulary_takes_grammars(tmp_path: Path, byte_level: Tokenizer) -> None:
    config = {"tokenizer_class": "TikTokenTokenizer"}
    folder = write_tiktoken(tmp_path / "m", ranks_of(byte_level), config)
    file = tokenizer_file(folder, tmp_path / "cache")
    assert file == tokenizer_file(folder, tmp_path / "cache")
    end = Tokenizer.load(folder).vocab_size - 1
    tokenizer = LLTokenizer(str(file), eos_token=end)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("漢字+ 👍"))
    matcher.consume_tokens(Tokenizer.load(folder).encode("漢字字 👍"))
    assert not matcher.is_error()
    assert matcher.is_accepting()


# sentencepiece


def train(folder: Path, kind: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A tokenizer.model alone, as older checkpoints have it."""
    folder.mkdir()
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS, *CHINESE]),
        model_writer=made,
        model_type=kind,
        vocab_size=600,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())


#: As Llama 2's was trained: nothing is normalized, digits stand alone.
LLAMA = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}


@pytest.fixture(scope="session", params=["bpe", "unigram"])
def llama_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    folder = tmp_path_factory.mktemp("spm") / "llama"
    oracle = train(folder, request.param, **LLAMA)
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder), oracle


def is_plain(text: str) -> bool:
    """False for what sentencepiece itself rewrites, and for a byte token that is spelled out:
    `tokenizers` takes that one for the byte in a unigram model."""
    return not any(odd in text for odd in ("▁", "\x00", "<0x"))


@given(text=TEXTS.filter(is_plain))
@settings(max_examples=60, deadline=None)
def test_tokens_of_a_sentencepiece_model_are_sentencepieces(
    llama_pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], text: str
) -> None:
    ours, oracle = llama_pair
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == oracle.encode(text)
    assert "".join(stream(ours, ids)) == ours.decode(ids) == text


def test_a_sentencepiece_model_falls_back_to_bytes(
    llama_pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor],
) -> None:
    ours, _ = llama_pair
    assert ours.token_bytes.kind is DecoderKind.SENTENCEPIECE_STRIPPED
    ids = ours.encode("🏴", add_special_tokens=False)
    assert [ours.token_bytes[i] for i in ids[-4:]] == [b"\xf0", b"\x9f", b"\x8f", b"\xb4"]
    assert ours.encode("a")[0] == ours.token_id("<s>")


def test_a_sentencepiece_model_that_is_not_converted_exactly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "m", "bpe", **LLAMA)
    (tmp_path / "m" / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    original = sentencepiece.SentencePieceProcessor.encode
    monkeypatch.setattr(
        sentencepiece.SentencePieceProcessor, "encode", lambda *a: [*original(*a), 5]
    )
    with pytest.raises(UnsupportedModel, match="is not converted exactly"):
        Tokenizer.load(tmp_path / "m")


# Every kind, any text, any cut.


@pytest.fixture(scope="session", params=["byte_level", *SPELLED_IN_BYTES, "wordpiece"])
def each_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@given(text=TEXTS, cuts=st.lists(st.integers(1, 9), max_size=12))
@settings(max_examples=60, deadline=None)
def test_streams_equal_decode_however_they_are_cut(
    each_tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = rest = each_tokenizer.encode(text, add_special_tokens=False)
    detokenizer = new_detokenizer(each_tokenizer)
    pieces = []
    for cut in cuts:
        pieces.append(detokenizer.feed(rest[:cut]))
        rest = rest[cut:]
    pieces += [detokenizer.feed(rest), detokenizer.finish()]
    assert "".join(pieces) == each_tokenizer.decode(ids)


@pytest.fixture(scope="session", params=SPELLED_IN_BYTES)
def spelled_in_bytes(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@given(data=st.binary(max_size=LONGEST_HELD_RUN), word=st.sampled_from(["", "the", " x"]))
@settings(max_examples=60, deadline=None)
def test_broken_byte_tokens_stream_as_they_decode(
    spelled_in_bytes: Tokenizer, data: bytes, word: str
) -> None:
    tokenizer = spelled_in_bytes
    ids = byte_ids(tokenizer, data) + tokenizer.encode(word, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
