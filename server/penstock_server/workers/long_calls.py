"""Notices workers that stand: they have been in one call of user code for long. Others take over what they have not
begun.

The coordinator may count on what `WorkerStands` promises, because the worker reads all its messages between two steps.
First everything that it was told has to be in its socket. If its activity page then still shows a step of the same run,
it will read these messages before it begins another step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sized

from ..coordinator.model import events as on
from .spot_checks import SpotChecks
from .worker_handle import WorkerHandle

STANDS = 0.4
"""Seconds after which a call of user code is long."""

GOES_ON = 5.0
"""Seconds without a long call after which a worker gets work of all streams again. So the streams of other feeds do not
come and go with each of many long calls."""

_EVERY = 0.05
"""Seconds between two looks, if there are several streams."""

_ALONE = 0.25
"""Seconds between two looks, if there is one stream, which would gain nothing."""

_LONGER = 1.1
"""How many times longer a call has lasted when the coordinator is told again."""


class LongCalls:
    """The workers that stand now, and the look that finds them.

    Args:
        workers: the daemon's own workers, by number.
        streams: all streams.
        checks: the samples that workers make again.
        tell: passes an event to the coordinator.
    """

    def __init__(
        self,
        workers: Mapping[int, WorkerHandle],
        streams: Sized,
        checks: SpotChecks,
        tell: Callable[[on.WorkerStands | on.WorkerGoesOn], None],
    ) -> None:
        self._workers = workers
        self._streams = streams
        self._checks = checks
        self._tell = tell
        self._stood: dict[int, float] = {}
        """When each worker was last seen standing, in monotonic seconds, unless it goes on since then."""
        self._told: dict[int, float] = {}
        """How many seconds the last long call of each worker had lasted when the coordinator was told."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look at the workers from now on."""
        self._again()

    def stop(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def _again(self) -> None:
        every = _EVERY if len(self._streams) > 1 else _ALONE
        self._timer = asyncio.get_running_loop().call_later(every, self._again)
        self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Look at all workers once. `now`: in monotonic seconds."""
        several = len(self._streams) > 1
        for number, worker in list(self._workers.items()):
            if several and self._stands(worker):
                self._stood[number] = now
            elif number in self._stood and now - self._stood[number] > GOES_ON:
                del self._stood[number]
                self._tell(on.WorkerGoesOn(number))

    def _stands(self, worker: WorkerHandle) -> bool:
        """Return whether the worker stands, and tell the coordinator."""
        run, seconds = worker.call()
        if run < 0 or seconds < STANDS or not worker.ready:
            return False
        told = self._told.get(worker.number, 0.0)
        if told <= seconds < told * _LONGER:
            return True
        worker.peer.drain()
        if not worker.peer.unsent and worker.call()[0] == run:
            self._told[worker.number] = seconds
            self._checks.stands(worker.number)
            self._tell(on.WorkerStands(worker.number, run, seconds))
        return True
