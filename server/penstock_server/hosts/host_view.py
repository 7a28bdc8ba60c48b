"""At the head: a host's workers as users see them: their memory, and their activity.

A host answers only when it is asked. Its answers are shown to users, and change nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from penstock_proto import ProtocolError
from penstock_proto import messages as m

_MOST_LOOKS = 64
"""Looks that may wait until they are taken."""


class HostView:
    """The last answers of one host, on the head's clock.

    Args:
        numbers: all numbers that the host's workers have had. It may grow.
        send: sends the host a message.

    Attributes:
        memory: bytes of each worker's process, as last measured.
        measuring: whether the host was asked for the memory, and has not answered.
    """

    def __init__(self, numbers: Collection[int], send: Callable[[m.Message], object]) -> None:
        self.memory: dict[int, int] = {}
        self.measuring = False
        self._numbers = numbers
        self._send = send
        self._looks: deque[m.ActivityShown] = deque(maxlen=_MOST_LOOKS)

    def measure_memory(self) -> None:
        """Ask for the memory of the workers' processes."""
        self.measuring = True
        self._send(m.MeasureMemory())

    def lost(self) -> None:
        """Note that the connection has ended: no answers come any longer."""
        self.measuring = False
        self._looks.clear()

    def ask_activity(self, now: float) -> None:
        """Ask the host to report its workers' activity for some seconds. `now`: seconds since the daemon was
        started."""
        self._send(m.ShowActivity(now))

    def activity(self, now: float) -> list[tuple[float, tuple[m.WorkerActivity, ...]]]:
        """Return the looks that have come since the last call, each with its time, which is not after `now`."""
        looks = [(min(now, look.at), look.workers) for look in self._looks]
        self._looks.clear()
        return looks

    def take(self, message: m.MemoryMeasured | m.ActivityShown) -> None:
        """Take an answer from the host.

        Raises:
            ProtocolError: the message is invalid.
        """
        workers = [one.worker for one in message.workers]
        if len(set(workers)) < len(workers) or not all(worker in self._numbers for worker in workers):
            raise ProtocolError(f"a {type(message).__name__} of workers that are not its own, or twice of one")
        if isinstance(message, m.MemoryMeasured):
            self.memory = {one.worker: one.nbytes for one in message.workers}
            self.measuring = False
        else:
            self._looks.append(message)
