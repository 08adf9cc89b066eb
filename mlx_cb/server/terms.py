"""Under which terms a question is answered: class, time, and how much may come in and go out.

Owns the two headers that clients may send, and which of the server's and the user's caps holds.
Knows nothing about any dialect.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_cb.config import ServerConfig
from mlx_cb.errors import InvalidRequest, LimitExceeded
from mlx_cb.server.users import User
from mlx_cb.standing import CLASSES, EQUAL, Standing

CLASS_HEADER = "x-request-class"
TIMEOUT_HEADER = "x-request-timeout"
LONGEST_TIMEOUT_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Cap:
    """The most of something, and whose word it is, for the one who hits it."""

    most: int
    name: str


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for one question.

    Attributes:
        timeout_s: from its arrival to the end of its answer; None for no such time.
        input_cap, output_cap: tokens of the prompt, and of each answer.
    """

    standing: Standing = EQUAL
    timeout_s: float | None = None
    input_cap: Cap | None = None
    output_cap: Cap | None = None

    def check_input(self, num_tokens: int) -> None:
        """Raise LimitExceeded for a prompt above the cap."""
        if self.input_cap is not None and num_tokens > self.input_cap.most:
            raise LimitExceeded(
                f"the prompt has {num_tokens} tokens and at most {self.input_cap.most} are taken "
                f"({self.input_cap.name}); shorten it",
                param="prompt",
            )

    def output_room(self, asked: int | None) -> int | None:
        """Tokens that an answer may have, None for no cap. Raises LimitExceeded."""
        if self.output_cap is None:
            return asked
        if asked is not None and asked > self.output_cap.most:
            raise LimitExceeded(
                f"{asked} tokens of answer were asked for and at most {self.output_cap.most} are "
                f"given ({self.output_cap.name})",
                param="max_tokens",
            )
        return self.output_cap.most if asked is None else asked


def terms_for(headers: Iterable[tuple[bytes, bytes]], user: User, config: ServerConfig) -> Terms:
    """The terms of a question with these headers. Raises InvalidRequest naming the header."""
    given = dict(headers)
    return Terms(
        _standing(given, user),
        _timeout(given, config),
        _least(
            ("--max-input-tokens of this server", config.max_input_tokens),
            (f"max_input_tokens of {user.name}", user.max_input_tokens),
        ),
        _least(
            ("--max-output-tokens of this server", config.max_output_tokens),
            (f"max_output_tokens of {user.name}", user.max_output_tokens),
        ),
    )


def _standing(headers: dict[bytes, bytes], user: User) -> Standing:
    """The user's, or a humbler one that was asked for: nobody asks himself forward."""
    asked = headers.get(CLASS_HEADER.encode(), b"").decode("latin-1").strip().lower()
    if not asked:
        return user.standing
    if asked not in CLASSES:
        raise InvalidRequest(
            f"{CLASS_HEADER}: {asked!r} is none of {', '.join(CLASSES)}", param=CLASS_HEADER
        )
    rank = max(user.standing.rank, CLASSES[asked])
    return dataclasses.replace(user.standing, rank=rank)


def _timeout(headers: dict[bytes, bytes], config: ServerConfig) -> float | None:
    asked = headers.get(TIMEOUT_HEADER.encode())
    if asked is None:
        return config.request_timeout_s
    text = asked.decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER}: {text!r} is not a number of seconds above 0 and up to "
            f"{LONGEST_TIMEOUT_S:.0f}",
            param=TIMEOUT_HEADER,
        )
    return seconds


def _least(*caps: tuple[str, int | None]) -> Cap | None:
    known = [Cap(most, name) for name, most in caps if most is not None]
    return min(known, key=lambda cap: cap.most, default=None)
