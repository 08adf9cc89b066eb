"""Makes a tokenizer.json for a folder that has only the older files, through transformers.

A bare sentencepiece model is checked against sentencepiece itself: transformers converts it by the
class that the folder names, which is not always what the model was trained with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from mlx_cb.errors import UnsupportedModel

#: Begins like text and like indentation, ends in spaces; digits, several scripts.
_PAGE = (
    "The quick brown fox, it's 1234.5 km!",
    "  def f(x):\n\treturn x  # 漢字 naïve",
    "吾輩は猫である。👍🏽 \n\n  ",
)


def convert_older_files(folder: Path) -> bytes:
    """Text of a tokenizer.json. Needs a second of imports.

    Raises UnsupportedModel when there is no tokenizer, or none that is converted exactly.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    named = _converted(folder, AutoTokenizer)
    model = folder / "tokenizer.model"
    if not model.is_file() or _agrees(named, model):
        return msgspec.json.encode(named)
    # The class cuts or joins text in its own way: take that from the model file, and from the
    # class only which tokens are special and what a text begins with.
    whole = _converted(folder, PreTrainedTokenizerFast)
    kept = {key: named[key] for key in ("added_tokens", "post_processor")}
    if _agrees(whole | kept, model):
        return msgspec.json.encode(whole | kept)
    raise UnsupportedModel(
        f"{model} is not converted exactly: transformers and sentencepiece disagree about its "
        "tokens. Hint: add the model's tokenizer.json."
    )


def _converted(folder: Path, kind: Any) -> dict[str, Any]:
    try:
        loaded = kind.from_pretrained(folder, trust_remote_code=False)
        return msgspec.json.decode(loaded.backend_tokenizer.to_str(), type=dict)
    except (OSError, ValueError, AttributeError, ImportError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UnsupportedModel(
            f"{folder} has no tokenizer.json and its tokenizer cannot be converted: {reason}"
        ) from error


def _agrees(content: dict[str, Any], model: Path) -> bool:
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_file=str(model))
    backend = tokenizers.Tokenizer.from_str(msgspec.json.encode(content).decode())
    return all(
        backend.encode(text, add_special_tokens=False).ids == original.encode(text)
        for text in _PAGE
    )
