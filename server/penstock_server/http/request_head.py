"""Decides from the head of an HTTP request whether it is answered. No I/O.

The server only answers GET and HEAD, and such requests need no body. So a body is refused before anything reads,
collects or inflates it, and a request ends with its head.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MOST_HEAD = 32 << 10
"""Maximum bytes of a head."""
MOST_LINE = 8190
"""Maximum bytes of a line of it, such as the one with the path and the query."""
MOST_FIELDS = 100
"""Maximum number of its fields."""
END = b"\r\n\r\n"
PROBES = frozenset({b"/healthz", b"/readyz"})
"""The paths that tell others whether the daemon lives and can be used. They cost little, and are never refused."""

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Refusal(NamedTuple):
    """Why a request is refused: the HTTP status, its name, the reason for the peer, and a field of the answer."""

    status: int
    name: str
    why: str
    field: str = ""


_MALFORMED = Refusal(400, "Bad Request", "this is not an HTTP request")
_LONG_LINE = Refusal(400, "Bad Request", f"a line has more than {MOST_LINE} bytes")
_LARGE = Refusal(
    431, "Request Header Fields Too Large", f"a head has at most {MOST_HEAD} bytes and {MOST_FIELDS} fields"
)
_BODY = Refusal(413, "Content Too Large", "requests have no body here")
_EXPECTS = Refusal(417, "Expectation Failed", "requests have no body here")
_METHOD = Refusal(405, "Method Not Allowed", "only GET and HEAD are answered", "Allow: GET, HEAD\r\n")


def refusal_of_part(data: bytes | bytearray) -> Refusal | None:
    """Return why a head is refused of which only `data` has come; None: wait for the rest."""
    if not data[:1].isalpha():  # such as a handshake of TLS
        return _MALFORMED
    if len(data) > MOST_HEAD or data.count(b"\n") > MOST_FIELDS + 1:
        return _LARGE
    return _LONG_LINE if len(data) - data.rfind(b"\n") > MOST_LINE + 1 else None


def refusal(head: bytes) -> Refusal | None:
    """Return why a request with this head (up to `END`) is refused; None: answer it."""
    first, *fields = head.removesuffix(END).split(b"\r\n")
    if len(head) > MOST_HEAD or len(fields) > MOST_FIELDS:
        return _LARGE
    if any(len(line) > MOST_LINE for line in (first, *fields)):
        return _LONG_LINE
    method = first.partition(b" ")[0]
    if _TOKEN.fullmatch(method) is None or b"\r" in first or b"\n" in first:
        return _MALFORMED
    for field in fields:
        name, colon, value = field.partition(b":")
        if not colon or _TOKEN.fullmatch(name) is None or b"\r" in value or b"\n" in value:
            return _MALFORMED  # also lines that continue a field, which proxies read in different ways
        match name.lower():
            case b"transfer-encoding" | b"content-encoding":
                return _BODY
            case b"content-length" if value.strip() != b"0":
                return _BODY
            case b"expect":
                return _EXPECTS
    return None if method in (b"GET", b"HEAD") else _METHOD


def is_probe(head: bytes) -> bool:
    """Return whether a request asks only whether the daemon lives, or can be used."""
    words = head.split(b"\r\n", 1)[0].split(b" ")
    return len(words) == 3 and words[1].partition(b"?")[0] in PROBES
