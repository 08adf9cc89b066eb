"""Fill-in-the-middle prompts: a prefix and a suffix in the control tokens of code models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_cb.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """The control tokens of one family; `repo` and `file` name other files, "" if unknown.

    `suffix_first` families read the suffix before the prefix.
    """

    prefix: str
    suffix: str
    middle: str
    repo: str = ""
    file: str = ""
    suffix_first: bool = False

    def prompt(self, before: str, after: str, extra: Sequence[tuple[str, str]] = ()) -> str:
        """The prompt; `extra` are (file name, text) of other files."""
        files = "".join(f"{self.file}{name}\n{text}\n" for name, text in extra if self.file)
        head = f"{self.repo}{files}" if files else ""
        if self.suffix_first:
            return f"{head}{self.suffix}{after}{self.prefix}{before}{self.middle}"
        return f"{head}{self.prefix}{before}{self.suffix}{after}{self.middle}"


_FAMILIES = (
    FillInMiddle(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"
    ),
    FillInMiddle("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
    FillInMiddle("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FillInMiddle("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FillInMiddle("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillInMiddle("▁<PRE>", "▁<SUF>", "▁<MID>"),
    FillInMiddle("[PREFIX]", "[SUFFIX]", "[MIDDLE]", suffix_first=True),
)


def find_fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle | None:
    """The form whose three tokens this vocabulary has, or None."""
    for family in _FAMILIES:
        needed = (family.prefix, family.suffix, family.middle)
        if all(tokenizer.token_id(text) is not None for text in needed):
            return family
    return None
