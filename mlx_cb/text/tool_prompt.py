"""Tools for templates that know nothing of tools: described in the system message.

Owns the wording, which is the Hermes form that most open models saw in training, so that
`json_tools` parses the answer. Knows nothing about templates that have their own form.
"""

from __future__ import annotations

import json
from typing import Any

_INSTRUCTIONS = """You may call functions to help with the user's query.

The functions you may call are given as JSON inside <tools></tools>:
<tools>
{tools}
</tools>

To call a function, answer with a JSON object with its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""  # noqa: E501


def messages_without_tool_roles(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The same conversation in system, user and assistant texts only."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content'] or ''}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{content}\n{text}".lstrip("\n")}
