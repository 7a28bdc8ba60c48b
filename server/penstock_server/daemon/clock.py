"""The daemon's clock: calls its parts once a second. If a part fails, that is noted as a bug, and the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..logs.bugs import Bugs


class Clock:
    """A task on the event loop that ticks once a second.

    Args:
        parts: called once a second, with the seconds since the clock was started.
        bugs: counts and logs unexpected errors.
        stopped: called with the error if the clock itself fails.
    """

    def __init__(
        self, parts: Sequence[Callable[[int], None]], bugs: Bugs, stopped: Callable[[BaseException], None]
    ) -> None:
        self._parts = parts
        self._bugs = bugs
        self._stopped = stopped

    def start(self) -> None:
        """Start the clock on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._done)

    def stop(self) -> None:
        """Stop the clock."""
        self._task.cancel()

    async def _run(self) -> None:
        seconds = 0
        while True:
            await asyncio.sleep(1)
            seconds += 1
            for part in self._parts:
                try:
                    part(seconds)
                except Exception as error:
                    self._bugs.note(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stopped(error)
