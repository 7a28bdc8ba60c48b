"""Reads the head of an HDF5 file, to say why HDF5 refused to open it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import BinaryIO

from .. import files as fs

_SIGNATURE = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the head of an HDF5 file says.

    Attributes:
        end: where the data end, in bytes from the beginning of the file.
        being_written: whether a writer has opened the file, and not closed it.
    """

    end: int
    being_written: bool


def why_not_opened(file: str, error: OSError) -> str:
    """Return why HDF5 did not open a file, and what to do."""
    if isinstance(error, BlockingIOError):
        return (
            "another process has locked the file, perhaps to write it: wait until it has closed the file. If the file "
            "system has no locks (NFS), give locking=False"
        )
    with fs.open_binary(file) as opened:
        size = opened.seek(0, os.SEEK_END)
        block = _superblock(opened, size)
    if block is None:
        return "this is not an HDF5 file, or its writer was killed before it closed the file"
    if block.end > size:
        return f"the file is truncated: copy it again, or leave it out. It has {size} of {block.end} bytes"
    if block.being_written:
        return "its writer still has the file open, or was killed: close it, or run h5clear -s on the file"
    return "it cannot be opened: it is damaged, or a writer changes it. Copy it again, or leave it out"


def _superblock(opened: BinaryIO, size: int) -> Superblock | None:
    at = 0
    while at < size:
        opened.seek(at)
        head = fs.read_exactly(opened, 96)
        if head.startswith(_SIGNATURE):
            return _parsed(head) if len(head) == 96 else Superblock(at + 96, False)
        at = max(512, 2 * at)  # a user's own data may come first
    return None


def _parsed(head: bytes) -> Superblock:
    if head[8] <= 1:
        width, start, flags = head[13], 24 + 4 * head[8], 0
    else:
        width, start, flags = head[9], 12, head[11]
    field = start + 2 * width
    return Superblock(int.from_bytes(head[field : field + width], "little"), bool(flags & 5))
