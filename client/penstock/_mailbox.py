"""What finalizers leave for a session's receiver thread.

A finalizer can run on any thread and between any two instructions, also on one that holds the session's lock. So it
takes no lock and sends nothing: it appends, and rings where somebody waits for it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select


class WakeupPipe:
    """Wakes the thread that polls on it. It is closed when nobody refers to it, so never while it is rung.

    A pipe of bare descriptors: the garbage collector may finalize an object that holds the ends before the bell itself,
    and a socket would then warn that nobody closed it.
    """

    def __init__(self) -> None:
        self._near, self._far = os.pipe()
        os.set_blocking(self._near, False)
        os.set_blocking(self._far, False)

    def fileno(self) -> int:
        """The descriptor to poll on."""
        return self._near

    def wake(self) -> None:
        """Make it readable; never blocks."""
        with contextlib.suppress(OSError):  # full: it is readable already
            os.write(self._far, b"\0")

    def clear(self) -> None:
        """Make it unreadable."""
        with contextlib.suppress(OSError):
            os.read(self._near, 4096)

    def wait(self, timeout: float) -> None:
        """Wait until it is rung, at most `timeout` seconds, and make it silent."""
        poll = select.poll()
        poll.register(self._near, select.POLLIN)
        if poll.poll(timeout * 1000):
            self.clear()

    def __del__(self) -> None:
        os.close(self._near)
        os.close(self._far)


class Mailbox:
    """The notes of one session.

    Attributes:
        bell: rung by `ring`; None when the receiver thread is gone.
        left: epochs whose iterator is gone.
        closing: nobody can use the session any more.
    """

    def __init__(self) -> None:
        self.wakeup: WakeupPipe | None = WakeupPipe()
        self.left: collections.deque[int] = collections.deque()
        self.closing = False

    def wake(self) -> None:
        """Wake the receiver thread."""
        wakeup = self.wakeup
        if wakeup is not None:
            wakeup.wake()
