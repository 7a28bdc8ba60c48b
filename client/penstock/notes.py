"""What finalizers leave for a session's receiver thread.

A finalizer can run on any thread and between any two instructions, also on one that holds the session's lock. So it
takes no lock and sends nothing: it appends, and rings where somebody waits for it.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket


class Bell:
    """Wakes the thread that polls on `socket`. It is closed when nobody refers to it, so never while it is rung."""

    def __init__(self) -> None:
        self.socket, self._far = socket.socketpair()
        self.socket.setblocking(False)
        self._far.setblocking(False)

    def ring(self) -> None:
        """Make `socket` readable; never blocks."""
        with contextlib.suppress(OSError):  # full: it is readable already
            self._far.send(b"\0")

    def clear(self) -> None:
        """Make `socket` unreadable."""
        with contextlib.suppress(OSError):
            self.socket.recv(4096)

    def wait(self, timeout: float) -> None:
        """Wait until it is rung, at most `timeout` seconds, and make it silent."""
        if select.select([self.socket], [], [], timeout)[0]:
            self.clear()

    def __del__(self) -> None:
        self.socket.close()
        self._far.close()


class Notes:
    """The notes of one session.

    Attributes:
        bell: rung by `ring`; None when the receiver thread is gone.
        left: epochs whose iterator is gone.
        closing: nobody can use the session any more.
    """

    def __init__(self) -> None:
        self.bell: Bell | None = Bell()
        self.left: collections.deque[int] = collections.deque()
        self.closing = False

    def ring(self) -> None:
        """Wake the receiver thread."""
        bell = self.bell
        if bell is not None:
            bell.ring()
