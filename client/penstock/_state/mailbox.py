"""The mailbox in which finalizers leave requests for the receiver thread.

A finalizer can run on any thread and between any two instructions, even on a thread that holds the lock of the
hand-off. So it takes no lock and sends nothing: it appends a request, and wakes the thread if necessary.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import select
import time


class WakeupPipe:
    """Wakes a thread that polls on it. It closes when nothing refers to it, so never during `wake`.

    Both ends are bare descriptors: the garbage collector may finalize an object that holds sockets before this one, and
    the sockets would then warn that nobody closed them.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        """Return the descriptor to poll on."""
        return self._reader

    def wake(self) -> None:
        """Make the pipe readable. Never blocks."""
        with contextlib.suppress(OSError):  # full: it is readable already
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        """Empty the pipe."""
        with contextlib.suppress(OSError):
            os.read(self._reader, 4096)

    def wait(self, timeout: float) -> None:
        """Wait for `wake`, at most `timeout` seconds, and clear it."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if poll.poll(timeout * 1000):
            self.clear()

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Mailbox:
    """The mailbox of one stream. All methods are safe in a finalizer.

    Attributes:
        wakeup: wakes the receiver thread; None when the thread has ended.
        left: epochs whose iterator is gone.
        closing: whether the stream is to be closed, because nobody can read it any longer.
        closed_at: the time (monotonic) since when it is, or infinity.
    """

    def __init__(self) -> None:
        self.wakeup: WakeupPipe | None = WakeupPipe()
        self.left: collections.deque[int] = collections.deque()
        self.closing = False
        self.closed_at = math.inf

    def leave(self, epoch: int) -> None:
        """Ask the receiver thread to leave `epoch`."""
        self.left.append(epoch)
        self.wake()

    def close(self) -> None:
        """Ask the receiver thread to close the stream."""
        self.closed_at = min(self.closed_at, time.monotonic())
        self.closing = True
        self.wake()

    def shut(self) -> None:
        """Drop the pipe: the receiver thread has ended, or belongs to a parent process."""
        self.wakeup = None

    def wake(self) -> None:
        """Wake the receiver thread."""
        wakeup = self.wakeup
        if wakeup is not None:
            wakeup.wake()
