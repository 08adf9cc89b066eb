"""The sign-in cookie's form, and which requests it may speak for.

That is what makes cross-site request forgery impossible by construction: a cookie (and Basic, which
browsers repeat by themselves too) counts only where the browser says that our own page asks, and
its body is nothing that a form could send. Knows nothing about who is signed in.
"""

from __future__ import annotations

from mlx_cb.errors import Forbidden

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def cookie_name(is_secure: bool) -> str:
    """The prefix makes browsers refuse such a cookie from anywhere but this very host, by TLS."""
    return "__Host-mlx-cb" if is_secure else "mlx-cb"


def set_cookie(token: str, is_secure: bool, max_age: float) -> str:
    """The header's value: for this host's own pages only, out of reach of scripts."""
    secure = "; Secure" if is_secure else ""
    return (
        f"{cookie_name(is_secure)}={token}; Path=/; Max-Age={max_age:.0f}; HttpOnly; "
        f"SameSite=Strict{secure}"
    )


def cookie_of(headers: dict[bytes, bytes], is_secure: bool) -> str | None:
    """The token in a request's cookies."""
    wanted = cookie_name(is_secure).encode()
    for part in headers.get(b"cookie", b"").split(b";"):
        name, _, value = part.strip().partition(b"=")
        if name == wanted and value:
            return value.decode("latin-1")
    return None


def is_foreign(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser says that a page of another origin asks."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        return site not in (b"same-origin", b"none")
    return origin is not None and not _is_own(origin, headers)


def is_own_page(method: str, headers: dict[bytes, bytes]) -> bool:
    """Whether what a browser adds by itself (cookie, Basic) may count for this request.

    It must come from a page of this very origin, which no other site can pretend: browsers set
    these headers, not pages. A page on another port of this machine is another origin. Without
    the headers (an old browser, or http in the network) only what changes nothing is let through,
    and a foreign page cannot read its answer.
    """
    if is_foreign(headers):
        return False
    is_said = headers.get(b"sec-fetch-site") == b"same-origin" or b"origin" in headers
    return is_said or method in _SAFE


def _is_own(origin: bytes, headers: dict[bytes, bytes]) -> bool:
    return origin.partition(b"://")[2] == headers.get(b"host", b"").lower()


def check_body_type(method: str, headers: dict[bytes, bytes]) -> None:
    """Raise Forbidden for a body that a form could send: with a cookie only JSON counts."""
    if method in _SAFE:
        return
    has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if has_body and kind != b"application/json":
        raise Forbidden("from a signed-in browser, a body must be sent as application/json")
