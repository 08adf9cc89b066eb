"""Who a request belongs to, and what that person may do. Knows nothing about keys or HTTP."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from mlx_cb.errors import Forbidden, InvalidRequest
from mlx_cb.standing import EQUAL, Standing

# The user of a server without keys; nobody else may be called so.
LOCAL_NAME = "local"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")


class Right(Enum):
    """What a route asks of the one who calls it."""

    PUBLIC = "public"
    ANYONE_KNOWN = "known"
    INFERENCE = "inference"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class User:
    """The holder of a key.

    Attributes:
        max_running: most generations at once, the rest wait; None for no limit of his own.
        daily_tokens: prompt plus answer tokens of a day; None for no limit.
        max_queued: most generations that may wait for their first token; more are refused.
        max_input_tokens, max_output_tokens: of one prompt, and of one answer.
        standing: his part of a busy machine.
        may_infer, is_admin: separate rights; an admin without the first cannot use the model.
    """

    name: str
    may_infer: bool = True
    is_admin: bool = False
    max_running: int | None = None
    daily_tokens: int | None = None
    max_queued: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    standing: Standing = EQUAL

    def may_see(self, owner: str | None) -> bool:
        """Whether what belongs to `owner` may be shown to this user; None: to nobody known."""
        return self.is_admin or owner == self.name

    def check(self, right: Right) -> None:
        """Raise Forbidden unless the user has the right."""
        if right is Right.ADMIN and not self.is_admin:
            raise Forbidden(f"the key of {self.name} is not an admin's key")
        if right is Right.INFERENCE and not self.may_infer:
            raise Forbidden(f"the key of {self.name} does not carry the right to use the model")


LOCAL = User(LOCAL_NAME, is_admin=True)


def check_name(name: str) -> None:
    """Raise InvalidRequest for a name that cannot stand in logs, files and headers as it is."""
    if not _NAME.match(name) or name == LOCAL_NAME:
        raise InvalidRequest(
            f"{name!r} cannot be a user's name: up to 64 letters, digits and . _ @ -, "
            f"beginning with a letter or digit, and not {LOCAL_NAME!r}",
            param="name",
        )
