"""The model folder behind a script: a byte tokenizer that also has the script's tokens.

Owns the files that the text room reads (tokenizer.json, tokenizer_config.json, template). Every
byte is a token, so any prompt can be encoded; the script's texts are tokens beside them. Knows
nothing about replies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- set arguments = call.function.arguments %}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def byte_level(value: bytes) -> str:
    """Bytes in GPT-2's printable alphabet, as tokenizer.json stores them."""
    return "".join(_ALPHABET[byte] for byte in value)


def write_model_folder(folder: Path, tokens: Iterable[bytes], template: str | None) -> None:
    """Write the folder. `tokens` are the script's own, beside the 256 single bytes."""
    vocabulary = {byte_level(bytes([byte])): byte for byte in range(256)}
    for token in tokens:
        vocabulary.setdefault(byte_level(token), len(vocabulary))
    added = [
        {
            "id": len(vocabulary) + n,
            "content": text,
            "special": text in CONTROL_TOKENS,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for n, text in enumerate((*CONTROL_TOKENS, *MARKER_TOKENS))
    ]
    byte_level_part = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level_part,
        "decoder": byte_level_part,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "chat_template.jinja").write_text(template or CHAT_TEMPLATE, "utf-8")


def _alphabet() -> list[str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_ALPHABET = _alphabet()
