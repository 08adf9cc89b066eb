"""How much a model is to think before it answers: every dialect's field as template variables.

Templates know `enable_thinking` (a switch) and `reasoning_effort` (gpt-oss: low, medium, high).
"""

from __future__ import annotations

from typing import Any

# Words of newer APIs that no template knows, and the nearest that one does.
_NEAREST = {"minimal": "low", "xhigh": "high", "max": "high"}


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Variables for an effort in words; `none` switches thinking off where a template can."""
    if not effort:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": _NEAREST.get(effort, effort)}
