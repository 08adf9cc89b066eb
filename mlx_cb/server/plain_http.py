"""What somebody is told who speaks plain HTTP to a port of TLS: where to go instead.

People type addresses without `https://`, and programs are configured so. Nothing of such a request
is looked at but its line and its Host. Knows nothing about connections.
"""

from __future__ import annotations

import re

_PAGE = re.compile(rb"(?:GET|HEAD) (/[!-~]*) HTTP/1\.[01]\r\n")
_ANY = re.compile(rb"[A-Z]{3,10} [!-~]+ HTTP/1\.[01]\r\n")
_HOST = re.compile(
    rb"\r\nhost:[ \t]*((?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?)[ \t]*\r\n", re.IGNORECASE
)
_REASON = (
    b'{"error":{"message":"this port speaks TLS: begin the address with https://",'
    b'"type":"invalid_request_error","param":null,"code":"needs_tls"}}'
)


def answer_to_plain_http(head: bytes) -> bytes:
    """The whole answer to a request's head; empty for what is no HTTP."""
    if _ANY.match(head) is None:
        return b""
    page, host = _PAGE.match(head), _HOST.search(head)
    if page is not None and host is not None:
        # Not for good: browsers would keep that after the server has ended to speak TLS.
        lines = [b"HTTP/1.1 307 Temporary Redirect", b"location: https://%s%s" % (host[1], page[1])]
        body = b""
    else:
        lines, body = [b"HTTP/1.1 400 Bad Request", b"content-type: application/json"], _REASON
    lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
    return b"\r\n".join(lines)
