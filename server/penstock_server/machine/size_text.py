"""Sizes in bytes, as users write them in options and environment variables."""

from __future__ import annotations


def parsed_size(text: str) -> int:
    """Return `500000000`, `500M` or `4G` as a number of bytes. The units are powers of 1024.

    Raises:
        ValueError: it is no size, or less than 0.
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    shift = {"K": 10, "M": 20, "G": 30, "T": 40}.get(number[-1:], 0)
    try:
        nbytes = int(float(number[:-1]) * 2**shift) if shift else int(number)
    except (ValueError, OverflowError):
        nbytes = -1
    if nbytes < 0:
        raise ValueError(f"must be a size such as 4G or 512M, got {text!r}")
    return nbytes
