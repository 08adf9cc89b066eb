"""`mlx-cb serve` as a user starts it: a process of its own, found by the line it prints."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai


class Server:
    """A server process and the official client on it."""

    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "mlx_cb", "serve", model, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.url = found.group()
            if "ready" in line:
                break
        else:
            self.process.stderr.close()
            self.process.wait(10)
            raise RuntimeError("".join(self.lines))
        self._drain = ThreadPoolExecutor(1)
        self._drain.submit(lambda: self.lines.extend(self.process.stderr or ()))
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def get(self, path: str) -> Any:
        return httpx2.get(self.url + path, timeout=20).json()

    def stop(self, with_signal: int = signal.SIGTERM) -> float:
        """Seconds from the signal to the end of the process."""
        self.client.close()
        began = time.monotonic()
        self.process.send_signal(with_signal)
        self.process.wait(20)
        seconds = time.monotonic() - began
        self._drain.shutdown()
        if self.process.stderr is not None:
            self.process.stderr.close()
        return seconds
