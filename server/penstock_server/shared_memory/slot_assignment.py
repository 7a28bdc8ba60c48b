"""Assigns memfds to tickets. Tickets of one stream that wait for a memfd get one in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from penstock_proto import MemoryBound
from penstock_proto.messages import IDS_PER_STREAM

from ..coordinator.model import events as on
from ..coordinator.model.commands import FindSlot
from ..coordinator.view import BudgetView
from .arena import Arena, Memfd

PATIENCE = 10.0
"""Seconds that a ticket waits for a slot to come free when the machine has no memory for a new one."""

_TRIM = 0.02
"""Seconds after which memory that nobody needs goes back to the system."""


class MapsMemfds(Protocol):
    """Processes that map memfds."""

    def forget_memfd(self, memfd: Memfd) -> None:
        """Tell them that the memfd was returned to the system."""


class SlotAssignment:
    """The arena's memfds by ticket.

    Args:
        arena: where memfds come from.
        budget: knows the bytes and the slots that the streams' shares add up to.
        tell: tells the coordinator that a ticket has got its memfd (`SlotFound`), or that there is no memory for
            it (`NoSlot`).
        processes: those that map memfds.
    """

    def __init__(
        self,
        arena: Arena,
        budget: BudgetView,
        tell: Callable[[on.Event], None],
        processes: Sequence[MapsMemfds],
    ) -> None:
        self._arena = arena
        self._budget = budget
        self._tell = tell
        self._processes = processes
        self._memfds: dict[int, Memfd] = {}
        self._waiting: dict[int, deque[FindSlot]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._trim: asyncio.TimerHandle | None = None

    def memfd(self, ticket: int) -> Memfd:
        """Return the memfd of the ticket."""
        return self._memfds[ticket]

    def request(self, wish: FindSlot) -> None:
        """Find a memfd for the ticket; at once if a free one fits."""
        stream = wish.ticket // IDS_PER_STREAM
        queue = self._waiting.get(stream)
        if queue is not None:
            queue.append(wish)
        elif not self._reuse(wish):
            self._waiting[stream] = deque([wish])
            self._begin(self._serve(stream))

    def free(self, ticket: int) -> None:
        """Drop a ticket, which may have a memfd, wait for one, or wait for a larger one."""
        for queue in self._waiting.values():
            for wish in [wish for wish in queue if wish.ticket == ticket]:
                queue.remove(wish)
        memfd = self._memfds.pop(ticket, None)
        if memfd is None:
            return
        if memfd.retired:
            self._arena.retire(memfd)
            self._gone(memfd)
        else:
            self._arena.free(memfd)
            self._freed.set()

    def trim_soon(self) -> None:
        """Let `trim` be called in a moment, if there may be something to return. (Events come far more often than
        shares change.)"""
        if self._arena.spare and self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(_TRIM, self.trim)

    def trim(self) -> None:
        """Return to the system the memory that the streams' shares do not need."""
        self._trim = None
        if self._arena.spare:
            for memfd in self._arena.trim(self._budget.nbytes_reserved, self._budget.slots_reserved):
                self._gone(memfd)

    async def stop(self) -> None:
        """Cancel all requests and copies."""
        if self._trim is not None:
            self._trim.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reuse(self, wish: FindSlot) -> bool:
        old = self._memfds.get(wish.ticket)
        if old is not None and old.nbytes >= wish.nbytes:
            self._tell(on.SlotFound(wish.ticket))
            return True
        memfd = self._arena.reuse(wish.nbytes)
        if memfd is None:
            return False
        self._assign(wish, memfd)
        return True

    def _assign(self, wish: FindSlot, memfd: Memfd) -> None:
        old = self._memfds.pop(wish.ticket, None)
        if old is not None:
            self._arena.free(old)
        self._memfds[wish.ticket] = memfd
        self._tell(on.SlotFound(wish.ticket))

    def _gone(self, memfd: Memfd) -> None:
        for processes in self._processes:
            processes.forget_memfd(memfd)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, stream: int) -> None:
        queue = self._waiting[stream]
        refused_at: float | None = None
        while queue:
            wish = queue.popleft()
            if self._reuse(wish):
                refused_at = None
                continue
            queue.appendleft(wish)
            # If the machine has refused memory, first return the free slots of other sizes to it.
            nbytes, count = self._budget.nbytes_reserved, self._budget.slots_reserved
            for memfd in self._arena.trim(*(0, 0) if refused_at else (nbytes - wish.nbytes, count - 1)):
                self._gone(memfd)
            try:
                new = await self._arena.grow(wish.nbytes)
            except MemoryBound as error:
                refused_at = refused_at or time.monotonic()
                if wish in queue and not await self._slot_comes_free(stream, refused_at + PATIENCE):
                    queue.remove(wish)
                    refused_at = None
                    self._tell(on.NoSlot(wish.ticket, error))
                continue
            refused_at = None
            if wish in queue:
                queue.remove(wish)
                self._assign(wish, new)
            else:
                self._arena.free(new)
                self.trim()  # the ticket that wanted it was freed, and may have been the last
        del self._waiting[stream]

    async def _slot_comes_free(self, stream: int, deadline: float) -> bool:
        """Wait up to a second for a slot to become free, so that the stream can go on with fewer. Return False if
        `deadline` has passed or the stream has no slots."""
        left = deadline - time.monotonic()
        if left <= 0 or not any(ticket // IDS_PER_STREAM == stream for ticket in self._memfds):
            return False
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._freed.wait(), min(left, 1))
        return True
