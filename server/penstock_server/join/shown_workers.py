"""At the host: shows the head its workers' memory and activity, while a user of the head looks at them.

Times are on the head's clock. Each request for activity carries the time of that clock. Requests come a little late, so
of the latest ones, the one with the least delay counts. Answers are sent after the bytes of batches that wait before
them, but their times stay right.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping

from msgspec import structs

from penstock_proto import messages as m
from penstock_proto.transport import codec

from ..logs.bugs import Bugs
from ..workers.supervisor import Supervisor
from ..workers.worker_looks import EVERY, WorkerLooks
from ..workers.worker_memory import WorkerMemory

SHOWN = 3.0
"""Seconds for which a request is answered. The head asks once a second."""

_QUESTIONS = 30
"""Number of latest requests from which the host derives the head's clock."""


class ShownWorkers:
    """Answers the head's requests for memory and activity.

    Args:
        send: sends the head a message.
        numbers: the head's number of each worker. It may grow.
        supervisor: the worker processes.
        bugs: notes unexpected errors.
    """

    def __init__(
        self, send: Callable[[bytes], object], numbers: Mapping[int, int], supervisor: Supervisor, bugs: Bugs
    ) -> None:
        self._send = send
        self._numbers = numbers
        self._supervisor = supervisor
        self._memory = WorkerMemory(supervisor.pids, bugs)
        self._bugs = bugs
        self._clocks: deque[float] = deque(maxlen=_QUESTIONS)
        """For each of the latest requests: how much the head's clock was ahead of ours, less the delay of the
        request."""
        self._until = 0.0
        self._showing: asyncio.Task[None] | None = None

    def measure_memory(self) -> None:
        """Answer the head's request for the memory of the workers."""
        if self._memory.fresh(self._send_memory):
            self._send_memory()

    def show_activity(self, message: m.ShowActivity) -> None:
        """Answer the head's request for the activity of the workers, for `SHOWN` seconds."""
        now = time.monotonic()
        self._clocks.append(message.at - now)
        self._until = now + SHOWN
        if self._showing is None or self._showing.done():
            self._showing = asyncio.get_running_loop().create_task(self._show())
            self._showing.add_done_callback(self._shown)

    def end(self) -> None:
        """Stop, as the connection has ended."""
        if self._showing is not None:
            self._showing.cancel()

    def _shown(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bugs.note(error)

    def _send_memory(self) -> None:
        measured = (
            (worker.number, self._memory.of(worker.pid))
            for worker in sorted(self._supervisor.workers.values(), key=lambda worker: worker.number)
        )
        known = (m.ProcessMemory(self._numbers[number], nbytes) for number, nbytes in measured if nbytes is not None)
        self._send(codec.encode(m.MemoryMeasured(tuple(known))))

    async def _show(self) -> None:
        looks = WorkerLooks()
        while time.monotonic() < self._until:
            workers = sorted(self._supervisor.workers.values(), key=lambda worker: worker.number)[: m.MOST_SHOWN]
            found = [structs.replace(one, worker=self._numbers[one.worker]) for one in looks.look(workers)]
            at = max(0.0, time.monotonic() + max(self._clocks))
            self._send(codec.encode(m.ActivityShown(at, tuple(found))))
            await asyncio.sleep(EVERY)
