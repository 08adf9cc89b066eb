"""The newest log lines, for the operator's page. Prompts and answers are never among them."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

MOST_LINES = 400
LONGEST_LINE = 600
_PROMPTS = "mlx_cb.transcript"


class LogTail(logging.Handler):
    """Keeps what the server logs while it is installed."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[dict[str, Any]] = deque(maxlen=MOST_LINES)
        self._number = 0

    def install(self) -> None:
        """Begin to listen."""
        logging.getLogger("mlx_cb").addHandler(self)

    def remove(self) -> None:
        """Listen no more."""
        logging.getLogger("mlx_cb").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, unless it is of those that `--log-prompts` adds."""
        if record.name == _PROMPTS:
            return
        self._number += 1
        self._lines.append(
            {
                "number": self._number,
                "time": round(record.created, 3),
                "level": record.levelname,
                "text": record.getMessage()[:LONGEST_LINE],
            }
        )

    def since(self, number: int) -> list[dict[str, Any]]:
        """Lines after this number, oldest first."""
        return [line for line in self._lines if line["number"] > number]
