"""Previews of the batches that a feed sends: if somebody asks for one, a batch is copied before it is sent.

While nobody asks, each slab costs one `if`. After a request, a part of the feed's next slab is copied, and later slabs
pass again. However often somebody asks, a feed is copied from at most once a second.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

from ..coordinator.model.commands import SendSlab
from ..shared_memory.arena import Memfd
from .budget import Budget
from .copied_rows import CopiedBatch, copy_batch
from .preview import preview
from .watched import Watched

AT_MOST_EVERY = 1.0
"""Seconds between two copies of one feed."""

_KEPT = 30.0
"""Seconds for which a preview is kept after the last request for it."""


@dataclass(frozen=True, slots=True)
class _Made:
    """The latest preview of a feed: its number, and the answer."""

    number: int
    text: str


class Previews:
    """The copied batch of each feed, and the requests that wait for one.

    Args:
        watched: what it may look at in the daemon.
        budget: pays for the copies.
    """

    def __init__(self, watched: Watched, budget: Budget | None = None) -> None:
        self._watched = watched
        self._budget = budget or Budget()
        self._wanted: set[str] = set()
        self._taken: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._made: dict[str, _Made] = {}
        self._number = 0
        self._making: dict[str, asyncio.Task[None]] = {}

    def ask(self, feed: str, number: int) -> str:
        """Return the latest preview of a feed as JSON, or `null` if it is preview `number`, and request a new one.

        In addition to the fields of `preview`, it has a `number`, and the second of the daemon at which it was `taken`.
        """
        now = time.monotonic()
        self._asked[feed] = now
        if feed not in self._making and now - self._taken.get(feed, 0.0) >= AT_MOST_EVERY:
            self._wanted.add(feed)
            self._watched.look_at_slabs(self._look)
        made = self._made.get(feed)
        return "null" if made is None or made.number == number else made.text

    def forget_old(self) -> None:
        """Forget previews that nobody asks for any longer. Called once a second."""
        now = time.monotonic()
        for feed in [feed for feed, asked in self._asked.items() if now - asked > _KEPT]:
            del self._asked[feed]
            self._made.pop(feed, None)
            self._want_no_more(feed)

    def stop(self) -> None:
        """Stop looking at slabs."""
        self._wanted.clear()
        self._watched.look_at_slabs(None)
        for task in self._making.values():
            task.cancel()

    def _look(self, feed: str, slab: SendSlab, memfd: Memfd) -> None:
        """Copy from a slab that is about to be sent, if its feed is wanted. A failure here must not harm its stream."""
        if feed not in self._wanted:
            return
        self._want_no_more(feed)
        self._taken[feed] = time.monotonic()
        try:
            with self._budget:
                batch = copy_batch(self._watched.feeds[feed], slab, memfd)
        except Exception as error:
            self._watched.bugs.note(error)
            return
        task = asyncio.get_running_loop().create_task(self._make(feed, batch, self._watched.seconds()))
        self._making[feed] = task
        task.add_done_callback(lambda _: self._making.pop(feed, None))

    def _want_no_more(self, feed: str) -> None:
        self._wanted.discard(feed)
        if not self._wanted:
            self._watched.look_at_slabs(None)

    async def _make(self, feed: str, batch: CopiedBatch, seconds: float) -> None:
        self._number += 1
        number = self._number

        def text() -> str:
            return json.dumps({"number": number, "taken": seconds, **preview(self._watched.feeds[feed], batch)})

        try:
            self._made[feed] = _Made(number, await asyncio.to_thread(text))
        except Exception as error:
            self._watched.bugs.note(error)
