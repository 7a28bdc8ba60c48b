"""Counts the open file descriptors of a daemon."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SLOT = "/memfd:penstock (deleted)"


@dataclass
class OpenFiles:
    """The open descriptors of a process.

    A slot has one descriptor, and a second one once it is mapped for the network. While a stream is read, the number of
    slots varies, up to the number that the stream has reserved.

    Attributes:
        others: descriptors of other things than slots, and third descriptors of slots.
        slot_bytes: the memory of the slots.
    """

    others: int = 0
    slot_bytes: int = 0
    _of_slot: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, pid: int) -> OpenFiles:
        """Return the descriptors that the process has open now."""
        found = cls()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                found._add(os.readlink(fd), fd)
        return found

    def _add(self, target: str, fd: Path) -> None:
        if target != SLOT:
            self.others += 1
            return
        file = fd.stat()
        seen = self._of_slot.get(file.st_ino, 0)
        self._of_slot[file.st_ino] = seen + 1
        self.slot_bytes += file.st_size if not seen else 0
        self.others += seen >= 2
