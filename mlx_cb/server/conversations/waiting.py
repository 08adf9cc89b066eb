"""What an answer that has not begun waits for, in words that a page can show.

Of others it tells two coarse things, and only to one who waits because of them: how many people
there are before him, and about how long it takes. Neither who, nor what, nor exact numbers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mlx_cb.server.front import Front
from mlx_cb.server.users import User

What = Literal["preparing", "own", "engine", "turn", "memory", "reading"]
_STEPS_S = (1, 2, 3, 5, 8, 12, 20, 30, 45, 60, 90, 120, 180, 300)


class Waiting(msgspec.Struct, omit_defaults=True):
    """Why there is no token yet.

    `people` have work before or beside this one; `seconds` is a rounded guess; `part` of the
    prompt, 0 to 1, has been read.
    """

    what: What
    people: int | None = None
    seconds: int | None = None
    part: float | None = None


async def waiting_for(front: Front, user: User, request_id: str) -> Waiting:
    """Ask the engine about a request that was handed to it."""
    if not front.engine.is_ready:
        return Waiting("engine")
    story = await front.engine.explain(request_id)
    status = await front.engine.status()
    return _reason(user, story or {}, status)


def _reason(user: User, story: dict[str, Any], status: dict[str, Any]) -> Waiting:
    if story.get("status") == "running":
        whole, read = story.get("num_prompt_tokens"), story.get("num_computed_tokens")
        if not whole or read is None:
            return Waiting("reading")
        return Waiting("reading", part=round(min(1.0, read / whole), 2))
    if story.get("status") not in ("waiting", "preempted"):
        return Waiting("turn")
    # Who was here before is listed as well, without anything that runs or waits.
    others = [
        name
        for name, counts in status.get("users", {}).items()
        if name != user.name and (counts["waiting"] or counts["running"])
    ]
    what: What = "memory" if story.get("waiting_for") == "blocks" else "turn"
    return Waiting(what, len(others), _rounded(status.get("predicted_wait_s")))


def _rounded(seconds: float | None) -> int | None:
    """The next larger of a few numbers: exact times would tell what others do."""
    if not seconds:
        return None
    return next((step for step in _STEPS_S if seconds <= step), _STEPS_S[-1])
