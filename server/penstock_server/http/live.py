"""The data that the page shows, in one answer a second. While nobody asks, only the rates of feeds are recorded.

The page asks once a second, and says how much of each history it has. (A server that pushes events would have to stop
them for hidden tabs, resume them after a lost connection, and end them with the daemon. A request that does not come
costs nothing.) All pages are answered from the same looks, so ten open pages cost little more than one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from penstock_proto.status.status_shape import Status

from ..status.json_text import json_text
from ..workers.worker_looks import EVERY, WorkerLooks
from .notices import Notices
from .rates import FeedLook, Rates
from .timeline import Timeline
from .watched import Watched

_IDLE = 5.0
"""Seconds without a request after which the daemon stops looking."""

MOST_WORKERS = 128
"""Maximum number of workers to show: those with the smallest numbers, so first the daemon's own, then those of
hosts."""


class Live:
    """The histories of the page, and the clock that looks for them."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._rates = Rates()
        self._notices = Notices()
        self._timeline = Timeline(watched.feed_of)
        self._own = WorkerLooks()
        self._status: Status | None = None
        self._asked = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to keep the log's warnings and errors."""
        self._notices.begin()

    async def stop(self) -> None:
        """Stop looking."""
        self._notices.end()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def another_second(self) -> None:
        """Look at the rates of all feeds, and at everything else while somebody asks for it."""
        self._note_rates()
        if self._task is not None:
            self._look()
            self._ask_hosts()

    def _look(self) -> None:
        """Take the status that pages show."""
        self._watched.memory.fresh()
        self._status = self._watched.status()

    def _note_rates(self) -> None:
        """Record the counters of all feeds. Readiness and verdicts come from the same ones, so they never contradict
        each other."""
        looks = {}
        for name, feed in self._watched.feeds.items():
            sent, waits = feed.sent, self._watched.waits(name)
            looks[name] = FeedLook(sent.batches, sent.samples, sent.nbytes, waits.reading, waits.waited)
        self._rates.look(self._watched.seconds(), looks)

    def ask(self, *, seconds: int, minutes: int, looks: int, changes: int) -> str:
        """Return everything that is new, as JSON.

        Args:
            seconds: how many per-second points of `rates` the page has had.
            minutes: how many per-minute points.
            looks: how many looks of the `timeline`.
            changes: the `changes` of the `notices` that the page has.
        """
        self._asked = time.monotonic()
        if self._task is None:
            self._look()
            self._ask_hosts()
            self._look_at_workers()
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._nobody_looks)
        return json_text(
            {
                "now": self._watched.seconds(),
                "status": self._status,
                "rates": self._rates.since(seconds, minutes),
                "timeline": self._timeline.since(looks),
                "notices": self._notices.since(changes),
            }
        )

    async def _run(self) -> None:
        """Look at the workers' activity until nobody asks any longer."""
        while time.monotonic() - self._asked < _IDLE:
            await asyncio.sleep(EVERY)
            self._look_at_workers()

    def _ask_hosts(self) -> None:
        """Ask the joined hosts for their workers' activity. They stop on their own if nobody asks again."""
        now = self._watched.seconds()
        for host in self._watched.hosts:
            host.view.ask_activity(now)

    def _look_at_workers(self) -> None:
        now = self._watched.seconds()
        own = sorted(self._watched.workers(), key=lambda worker: worker.number)[:MOST_WORKERS]
        self._timeline.add(now, self._own.look(own))
        room = MOST_WORKERS - len(own)
        for host in self._watched.hosts:
            shown = set(sorted(host.workers)[: max(0, room)])
            room -= len(shown)
            for at, workers in host.view.activity(now):
                self._timeline.add(at, [one for one in workers if one.worker in shown])

    def _nobody_looks(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._timeline.forget()
        self._own.forget()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._watched.bugs.note(error)
