"""Small real tokenizers of the two kinds that nearly all checkpoints use, trained here."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mlx_cb.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. She sells sea shells on the sea shore.",
    "def f(x):\n    return x + 1\n\nfor i in range(10):\n    print(f(i))",
    "Größe, naïve café, façade; ďábel; 漢字 and שלום; emoji 👍 too.",
] * 20
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _with_markers(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.add_special_tokens(CONTROL)
    backend.add_tokens(MARKERS)
    return Tokenizer(backend.to_str().encode(), {"eos_token": "<|im_end|>"})


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """GPT-2 style, as SmolLM2, Llama 3, Qwen have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _with_markers(backend)


def _sentencepiece(chain: list[decoders.Decoder]) -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *byte_tokens],
        show_progress=False,
        limit_alphabet=60,
    )
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(chain)
    backend.train_from_iterator(CORPUS, trainer)
    # The trainer made the byte tokens special; in real checkpoints they are plain vocabulary.
    content = json.loads(backend.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] == "<unk>"]
    return _with_markers(tokenizers.Tokenizer.from_str(json.dumps(content)))


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """Llama 2 style: one leading space is removed."""
    return _sentencepiece(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


@pytest.fixture(scope="session")
def sentencepiece_unstripped() -> Tokenizer:
    """Gemma style: the leading space stays."""
    return _sentencepiece([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    """A decoder that is neither: words are joined by what stands before."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _with_markers(backend)


@pytest.fixture(params=["byte_level", "sentencepiece", "sentencepiece_unstripped", "wordpiece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the four in turn."""
    return request.getfixturevalue(request.param)
