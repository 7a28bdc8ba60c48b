"""The files of the page, read once. They load nothing from elsewhere, so the page works without a network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "static"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers of all answers. Scripts come from files alone, so text from user code could not run even if a browser took it
for HTML. Pictures may be part of the page's own data."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class File:
    """A file, and its content type."""

    data: bytes
    content_type: str


def files() -> dict[str, File]:
    """Return all files by path, such as "page.js"."""
    return {
        path.relative_to(_FOLDER).as_posix(): File(path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }
