"""What the file descriptors of a daemon refer to."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SLOT = "/memfd:penstock (deleted)"


@dataclass
class OpenFiles:
    """How many descriptors a process has open. A slot has one, and another one once it is mapped for the network. While
    a stream is read the number of slots rises and falls within what the stream has reserved.

    Attributes:
        others: descriptors that are not of slots, and third ones of slots.
        slot_bytes: how much memory the slots have.
    """

    others: int = 0
    slot_bytes: int = 0
    _of_slot: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, pid: int) -> OpenFiles:
        """Look at what the process has open now."""
        found = cls()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed in the meantime
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
