"""Prompts have the wanted number of tokens, exactly, and share what they are meant to share."""

import string

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from mlx_cb.bench.calls import Prompt
from mlx_cb.bench.prompts import CommonWords, PromptMaker, TokenizerWords
from mlx_cb.errors import MlxCbError


def write_tokenizer(folder, *, bos=False):
    """A byte-level tokenizer with 676 two-part words and every byte."""
    letters = string.ascii_lowercase
    starts = [("Ġ", a) for a in letters]
    ends = [(b, a) for b in letters for a in letters]
    # All starts come before all ends, so that no letter is taken by the wrong neighbour.
    merges = [*starts, *ends, *((f"Ġ{a}", f"{b}{a}") for a in letters for b in letters)]
    vocabulary = {piece: i for i, piece in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    for first, second in merges:
        vocabulary.setdefault(first + second, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.add_special_tokens(["<s>"])
        begin = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", begin)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=[False, True], ids=["plain", "with bos"])
def words(request, tmp_path):
    return TokenizerWords(write_tokenizer(tmp_path, bos=request.param))


@pytest.mark.parametrize("tokens", [4, 16, 24, 100, 1024])
def test_prompts_have_exactly_the_wanted_length(words, tokens):
    text = PromptMaker(words).text(Prompt(tokens, seed=5))
    assert words.count(text) == tokens


def test_the_seed_decides_the_words(words):
    maker = PromptMaker(words)
    assert maker.text(Prompt(24, 1)) == maker.text(Prompt(24, 1))
    assert maker.text(Prompt(24, 1)) != maker.text(Prompt(24, 2))


def test_shared_tokens_come_first_and_are_the_same(words):
    maker = PromptMaker(words)
    first, second = (
        words.encode(maker.text(Prompt(8, seed, shared=40, shared_seed=7))) for seed in (1, 2)
    )
    assert len(first) == len(second) == 48
    assert first[:40] == second[:40]
    assert first[40:] != second[40:]


@pytest.mark.parametrize("answer", [" aba", "aba"])
def test_a_conversation_grows_by_answers_and_fresh_words(words, answer):
    maker = PromptMaker(words)
    opening = Prompt(20, 1, conversation="c")
    text = maker.text(opening)
    maker.said(opening, text, answer)
    following = maker.text(Prompt(6, 2, conversation="c"))
    assert following.startswith(text + " aba")
    assert words.count(following) == 20 + 1 + 6


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(MlxCbError, match=r"no tokenizer\.json"):
        TokenizerWords(tmp_path)


def test_common_words_count_words():
    source = CommonWords()
    assert source.count(PromptMaker(source).text(Prompt(30, 1))) == 30


def test_pieces_that_their_own_text_does_not_encode_to_are_no_words(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    source = TokenizerWords(tmp_path)
    assert len(source.words) == 676
    for word in source.words[::50]:
        assert len(tokenizer.encode(word).ids) == 1
