"""Splits that are ranges of a file's bytes, for formats whose records lie one after another."""

from __future__ import annotations

from dataclasses import dataclass

from ..names_on_disk import on_disk_as


@on_disk_as("penstock_server.sources.tfrecord.ByteRange")
@dataclass(frozen=True, slots=True, repr=False)
class ByteRange:
    """The records of a file that begin at byte `start` or later, and before `stop` (None: the end).

    The file has `size` bytes (None: not known).
    """

    file: str
    start: int
    stop: int | None
    size: int | None

    def __repr__(self) -> str:
        return self.file if self.stop is None else f"{self.file} bytes {self.start} to {self.stop - 1}"
