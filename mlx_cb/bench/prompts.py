"""Prompt texts that encode to exactly the wanted number of tokens; knows nothing about servers.

The text is a short round of random words, repeated: a greedy model goes on with the round instead
of ending its turn, so that output lengths are the limits asked for, on servers that cannot ignore
the end-of-sequence token too. Different seeds share no prefix.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Protocol

from mlx_cb.bench.calls import Prompt
from mlx_cb.errors import MlxCbError

_ROUND = 12
_WORD = re.compile(r" [a-z]{3,9}")

# For servers whose tokenizer is not at hand: one token each in every common English vocabulary.
_COMMON = (
    " time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work government"
    " number night point home water room mother area money story fact month lot right study book"
    " eye word business issue side kind head house service friend father power hour game line end"
    " member law car city community name president team minute idea body information back parent"
    " face others level office door health person art war history party result change morning"
    " reason research girl guy moment air teacher force education"
)


class WordSource(Protocol):
    """Where words come from, and how many tokens a text has."""

    words: list[str]

    def count(self, text: str) -> int:
        """Tokens of the text as a server would count them, special tokens included."""
        ...


class TokenizerWords:
    """Words that are one token each in a model's own tokenizer."""

    def __init__(self, folder: Path) -> None:
        """Read `tokenizer.json` in the folder. Raises MlxCbError when there is none."""
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise MlxCbError(f"no tokenizer.json in {folder}: exact prompt lengths need one")
        self.tokenizer = Tokenizer.from_file(str(path))
        self.words = self._single_token_words()

    def _single_token_words(self) -> list[str]:
        vocabulary = self.tokenizer.get_vocab().values()
        ids = sorted(vocabulary)
        texts = self.tokenizer.decode_batch([[i, i] for i in ids], skip_special_tokens=False)
        # Decoded twice in a row, because some decoders strip the space of the first token.
        halves = (text[len(text) - len(text) // 2 :] for text in texts)
        candidates = sorted({half for half in halves if _WORD.fullmatch(half)})
        # Not every piece of a vocabulary is what its own text encodes to.
        pairs = self.tokenizer.encode_batch(
            [word + word for word in candidates], add_special_tokens=False
        )
        words = [word for word, pair in zip(candidates, pairs, strict=True) if len(pair.ids) == 2]
        if len(words) < 100:
            raise MlxCbError(
                f"only {len(words)} plain words in this tokenizer; cannot make prompts"
            )
        return words

    def count(self, text: str) -> int:
        """Tokens of the text with the tokenizer's own special tokens."""
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Token ids of the text with the tokenizer's own special tokens."""
        return self.tokenizer.encode(text).ids


class CommonWords:
    """Frequent English words, taken as one token each; lengths are then close, not exact."""

    def __init__(self) -> None:
        self.words = [f" {word}" for word in _COMMON.split()]

    def count(self, text: str) -> int:
        """Number of words."""
        return len(text.split())


class PromptMaker:
    """Makes the text of a Prompt, and remembers what was said in each conversation."""

    def __init__(self, source: WordSource) -> None:
        self.source = source
        self._conversations: dict[str, str] = {}

    def text(self, prompt: Prompt) -> str:
        """The whole prompt text; `prompt.tokens` long plus the conversation before it."""
        if prompt.conversation is None or prompt.conversation not in self._conversations:
            opening = self._words(prompt.shared, prompt.shared_seed) if prompt.shared else ""
            return self._fitted(opening, prompt)
        return self._conversations[prompt.conversation] + self._words(prompt.fresh, prompt.seed)

    def said(self, prompt: Prompt, text: str, answer: str) -> None:
        """Remember a turn, when the prompt belongs to a conversation.

        mlx_lm.server leaves out the space before an answer's first word. It is put back: without it
        the next turn would not begin with the tokens that are in the server's cache.
        """
        if prompt.conversation is not None:
            joint = " " if answer[:1].isalnum() else ""
            self._conversations[prompt.conversation] = text + joint + answer

    def _words(self, count: int, seed: int) -> str:
        rng = random.Random(seed)
        turn = rng.sample(self.source.words, max(1, min(_ROUND, (count + 2) // 3)))
        return "".join(turn[i % len(turn)] for i in range(count))

    def _fitted(self, opening: str, prompt: Prompt) -> str:
        """Lengthen or shorten the fresh part until the whole has the wanted length."""
        wanted, words = prompt.tokens, prompt.fresh
        for _ in range(8):
            text = opening + self._words(max(words, 1), prompt.seed)
            surplus = self.source.count(text) - wanted
            if surplus == 0:
                return text
            words -= surplus
        raise MlxCbError(f"cannot make a prompt of exactly {wanted} tokens with this tokenizer")
