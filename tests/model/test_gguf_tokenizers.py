"""Tokenizers rebuilt from GGUF metadata give the tokens of the vocabulary they came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from mlx_cb.errors import UnsupportedModel
from mlx_cb.model.gguf.file import GGUFFile
from mlx_cb.model.gguf.tokenizer import tokenizer_config, tokenizer_json
from mlx_cb.text.tokenizer import Tokenizer
from tests.text.conftest import CORPUS
from tests.text.test_detokenizer import stream
from tests.text.test_tokenizer_kinds import TEXTS

CONTROL = ["<|begin|>", "<|im_end|>"]
#: Pattern by `tokenizer.ggml.pre`; None cuts as GPT-2 does. transformers is the source.
PATTERNS = {"llama-bpe": TikTokenConverter().pattern, "qwen2": QWEN2, "gpt-2": None}


def trained(pattern: str | None) -> tokenizers.Tokenizer:
    """A byte-level vocabulary as its makers' library writes it."""
    backend = tokenizers.Tokenizer(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    else:
        backend.pre_tokenizer = whole
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=CONTROL, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write(path: Path, backend: tokenizers.Tokenizer, pre: str, **flags: bool) -> GGUFFile:
    """A file with nothing but a tokenizer in it."""
    parts = json.loads(backend.to_str())
    vocabulary = sorted(parts["model"]["vocab"].items(), key=lambda entry: entry[1])
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in CONTROL else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in parts["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if "add_bos" in flags:
        writer.add_add_bos_token(flags["add_bos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path)


def rebuilt(file: GGUFFile) -> Tokenizer:
    return Tokenizer(json.dumps(tokenizer_json(file)).encode(), tokenizer_config(file))


@pytest.fixture(scope="session", params=PATTERNS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    original = trained(PATTERNS[request.param])
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    tokenizer = rebuilt(write(path, original, request.param, add_bos=False))
    if request.param == "qwen2":
        original.normalizer = normalizers.NFC()
    if request.param == "llama-bpe":
        original.model.ignore_merges = True
    return tokenizer, original


@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_rebuilt_tokens_are_the_originals(
    pair: tuple[Tokenizer, tokenizers.Tokenizer], text: str
) -> None:
    tokenizer, original = pair
    ids = tokenizer.encode(text)
    assert ids == original.encode(text).ids
    plain = original.decode(ids, skip_special_tokens=True)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == plain


@pytest.mark.parametrize(
    ("pre", "flags", "begins"),
    [
        ("llama-bpe", {}, True),
        ("llama3", {}, True),
        ("tekken", {}, True),
        ("qwen2", {}, False),
        ("deepseek-r1-qwen", {}, False),
        ("llama-bpe", {"add_bos": False}, False),
        ("qwen2", {"add_bos": True}, True),
    ],
)
def test_whether_a_text_begins_with_a_token(
    pre: str, flags: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    tokenizer = rebuilt(write(tmp_path / "m.gguf", trained(None), pre, **flags))
    assert (tokenizer.encode("a")[0] == 0) == begins
    assert tokenizer.config["add_bos_token"] == begins
    assert tokenizer.decode(tokenizer.encode("héllo Wörld/\n")) == "héllo Wörld/\n"


def test_a_cut_that_is_not_known_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", trained(None), "viking")
    with pytest.raises(UnsupportedModel, match="tokenizer of the kind 'viking'"):
        tokenizer_json(file)
