"""Recognizes the bytes of encoded images, such as JPEG."""

from __future__ import annotations

_MAGIC = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}


def encoding(data: bytes) -> str:
    """Return the format of an encoded image, such as "JPEG", by its first bytes; "" if it is not an image."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:2] == b"BM" and int.from_bytes(data[2:6], "little") != len(data):
        return ""
    return next((name for magic, name in _MAGIC.items() if data.startswith(magic)), "")
