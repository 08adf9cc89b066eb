"""Web pages and their files: `/` and `/static/...`, with headers that let them run only our code.

Owns what a page may load and do (the content security policy), and that only files of the package's
`web` folder are ever served: they are read once into a table, so no path leads anywhere else. The
files hold nothing of anybody's, so they are for everyone. Knows nothing about users or answers.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

WEB_FOLDER = Path(__file__).parents[1] / "web"
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    ]
)
#: On every page. The older headers are for browsers that do not read the whole policy.
PAGE_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
_PACKED_ALREADY = frozenset({".png", ".woff2"})


@dataclass(frozen=True)
class StaticFile:
    """One file, ready to be sent."""

    content: bytes
    suffix: str

    @cached_property
    def compressed(self) -> bytes | None:
        """Gzipped; None where that would gain nothing."""
        if self.suffix in _PACKED_ALREADY:
            return None
        packed = gzip.compress(self.content, 9, mtime=0)
        return packed if len(packed) < len(self.content) else None

    @cached_property
    def digest(self) -> str:
        """Changes with the content."""
        return hashlib.sha256(self.content).hexdigest()[:24]

    def answer(self, request: Request) -> Response:
        """The file, or 304 to a browser that has it."""
        packed = self.compressed if _takes_gzip(request) else None
        tag = f'"{self.digest}-gz"' if packed is not None else f'"{self.digest}"'
        # Asked for anew each time, so that a newer server is never shown in an older one's page.
        headers = {"etag": tag, "cache-control": "no-cache", "vary": "Accept-Encoding"}
        known = request.headers.get("if-none-match", "")
        if tag in [one.strip().removeprefix("W/") for one in known.split(",")]:
            return Response(status_code=304, headers=PAGE_HEADERS | headers)
        if packed is not None:
            headers["content-encoding"] = "gzip"
        headers["content-type"] = _TYPES[self.suffix]
        return Response(packed or self.content, headers=PAGE_HEADERS | headers)


class WebFiles:
    """All files of a folder by their path in it; files of a kind not named in `_TYPES` are not."""

    def __init__(self, folder: Path = WEB_FOLDER) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): StaticFile(path.read_bytes(), path.suffix)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _TYPES
        }

    def answer(self, request: Request, name: str) -> Response:
        """The file of this name. Raises HTTPException (404)."""
        found = self._files.get(name)
        if found is None:
            raise HTTPException(404)
        return found.answer(request)


def _takes_gzip(request: Request) -> bool:
    for offer in request.headers.get("accept-encoding", "").split(","):
        coding, _, weight = offer.partition(";")
        if coding.strip().lower() == "gzip":
            return weight.replace(" ", "").lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def routes(files: WebFiles) -> list[BaseRoute]:
    """The chat page and all files."""

    async def root(request: Request) -> Response:
        """The chat page for browsers; to programs, what Ollama's clients look for."""
        if "text/html" in request.headers.get("accept", ""):
            page = files.answer(request, "chat.html")
            page.headers["vary"] = "Accept, Accept-Encoding"
            return page
        return PlainTextResponse("Ollama is running", headers={"vary": "Accept"})

    async def static(request: Request) -> Response:
        """A file of the pages."""
        return files.answer(request, request.path_params["path"])

    return [Route("/", root), Route("/static/{path:path}", static)]
