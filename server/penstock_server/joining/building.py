"""The memory in which a host's workers build what belongs into slots at the head, and which bytes of it go there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from penstock_proto import MemoryBound
from penstock_proto import messages as m
from penstock_proto.columns import RAGGED, TEXT, Columns
from penstock_proto.layout import HEADER, LeafPlace, SlotLayout, is_fixed, lay_out
from penstock_proto.spec import Spec

from ..coordinator import size
from ..host.arena import Arena, Memfd
from ..plan_sizes import fixed_slots


class Building:
    """Memory for what is being built or sent: at most `allowed` bytes. Those who wait for it get it in order.

    Args:
        allowed: bytes.
        gone: called with each memfd that was given back to the system.

    Attributes:
        allowed: as given.
        used: bytes in use.
        is_short: whether somebody waits for memory.
        wanted: called while somebody does.
    """

    wanted: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, allowed: int, gone: Callable[[Memfd], None]) -> None:
        self.allowed = allowed
        self.used = 0
        self.is_short = False
        self._gone = gone
        self._arena = Arena()
        self._in_order = asyncio.Lock()
        self._released = asyncio.Event()

    async def acquire(self, nbytes: int) -> Memfd:
        """Wait for memory.

        Raises:
            MemoryBound: there can never be so much, or the machine has none left.
        """
        if nbytes > self.allowed:
            raise MemoryBound(
                f"a slot of {size(nbytes)} is needed, and this host allows {size(self.allowed)} in all: give "
                "`penstock join` a larger --memory"
            )
        async with self._in_order:
            try:
                while self.used + nbytes > self.allowed:
                    self._released.clear()
                    self.is_short = True
                    self.wanted()
                    if self.used + nbytes > self.allowed:
                        await self._released.wait()
            finally:
                self.is_short = False
            memfd = self._arena.reuse(nbytes)
            if memfd is None:
                for old in self._arena.trim(self.allowed - nbytes, 1 << 40):
                    self._gone(old)
                memfd = await self._arena.grow(nbytes)
            self.used += memfd.nbytes
            return memfd

    def release(self, memfd: Memfd) -> None:
        """Give memory back."""
        self.used -= memfd.nbytes
        if memfd.retired:
            self._arena.retire(memfd)
            self._gone(memfd)
        else:
            self._arena.free(memfd)
        self._released.set()

    def close(self, in_use: Iterable[Memfd]) -> None:
        """Give all memory back to the system. What is in use a process may still write to."""
        for memfd in in_use:
            self._arena.retire(memfd)
            self._gone(memfd)
        for memfd in self._arena.trim(0, 0):
            self._gone(memfd)


class Regions:
    """Tells which bytes of a slot belong to what a worker has made of a feed.

    Args:
        plan: the feed's.
        spec: the feed's.
    """

    def __init__(self, plan: m.FeedPlan, spec: Spec) -> None:
        self._columns = Columns(spec, plan.batch_size, plan.buckets)
        self._fixed = None
        if plan.batch_size is not None and is_fixed(spec, plan.batch_size):
            self._fixed = fixed_slots(plan, spec, plan.batch_size)

    def of_batches(self, first: int, batches: int, shapes: m.Shapes) -> list[tuple[int, int]]:
        """Return where batches from place `first` on lie, as (start, stop)."""
        return self._layout(shapes).regions(first, batches)

    def of_rows(self, message: m.WriteRows) -> list[tuple[int, int]]:
        """Return where the rows lie that this message has written, and the header of their batch."""
        places = self._layout(message.shapes).places
        found = [(0, HEADER)]
        if self._fixed is not None:
            found += [_part(place, message.row, message.count, place.shape[0]) for place in places]
        else:
            found += self._of_columns(message, iter(places))
        return [(start, stop) for start, stop in found if start < stop]

    def _of_columns(self, message: m.WriteRows, places: Iterator[LeafPlace]) -> Iterator[tuple[int, int]]:
        """As worker/variable_rows.py writes them."""
        row, count = message.row, message.count
        for column, before, own in zip(self._columns.columns, message.before, message.sizes, strict=True):
            place = next(places)
            if column.kind not in (RAGGED, TEXT):
                yield _part(place, row, count, message.rows)
                continue
            yield _part(place, before[0], own[0], place.shape[0])
            strings = column.strings if column.kind is TEXT else 1
            yield _part(next(places), row * strings, count * strings + 1, message.rows * strings + 1)

    def _layout(self, shapes: m.Shapes) -> SlotLayout:
        return self._fixed or lay_out(self._columns.dtypes, shapes)


def _part(place: LeafPlace, first: int, count: int, of: int) -> tuple[int, int]:
    """Return where `count` rows from row `first` on lie of a leaf with `of` rows."""
    each = place.nbytes // of if of else 0
    return place.offset + first * each, place.offset + (first + count) * each
