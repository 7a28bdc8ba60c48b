"""The memory in which a host's workers build batches for slots at the head, and which bytes of it go there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from penstock_proto import MemoryBound
from penstock_proto import messages as m
from penstock_proto.batches.columns import Columns
from penstock_proto.batches.layout import HEADER, LeafPlace, SlotLayout, is_fixed, lay_out
from penstock_proto.spec import Spec
from penstock_proto.status.figures import size

from ..feed.options.plan_sizes import fixed_slots, pooled_lanes, sample_slots
from ..shared_memory.arena import Arena, Memfd


class Building:
    """Memory for batches that are being built or sent: at most `allowed` bytes. Requests get it in order.

    Args:
        allowed: bytes.
        gone: called with each memfd that was returned to the system.

    Attributes:
        allowed: as given.
        used: bytes in use.
        is_short: whether a request waits for memory.
        wanted: called each time a request has to wait.
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
            MemoryBound: `nbytes` is more than `allowed`, or the machine has no memory left.
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
        """Return all memory to the system. Processes may still write to the memory that is in use."""
        for memfd in in_use:
            self._arena.retire(memfd)
            self._gone(memfd)
        for memfd in self._arena.trim(0, 0):
            self._gone(memfd)


class Regions:
    """Computes which bytes of a slot hold the batches or rows of a feed that a worker has made.

    Args:
        plan: the feed's plan.
        spec: the feed's spec.
        sample_spec: as in messages.StartRun. Visits of pools, and leftover rows, are as before `batch_transform`.
    """

    def __init__(self, plan: m.FeedPlan, spec: Spec, sample_spec: Spec | None = None) -> None:
        rows = plan.batch_size
        self._columns = self._sample_columns = Columns(spec, rows, plan.buckets)
        self._fixed = self._sample_fixed = None
        if rows is not None and is_fixed(spec, rows):
            self._fixed = self._sample_fixed = fixed_slots(plan, spec, rows)
        if sample_spec is not None:
            self._columns, self._sample_columns = Columns(spec, rows), Columns(sample_spec, rows, plan.buckets)
            self._sample_fixed = None
            if rows is not None and is_fixed(sample_spec, rows):
                self._sample_fixed = sample_slots(sample_spec, rows, self._fixed)
            if pooled_lanes(plan, spec, sample_spec) > 1:
                self._fixed = self._sample_fixed

    def of_batches(self, first: int, batches: int, shapes: m.Shapes, step: int = 1) -> list[tuple[int, int]]:
        """Return the regions of `batches` batches from place `first` on, each `step` places after the one before, as
        (start, stop)."""
        return self._layout(shapes).regions(first, batches, step)

    def of_rows(self, message: m.WriteRows) -> list[tuple[int, int]]:
        """Return the regions of the rows that `message` asked for, and of the header of their batch."""
        layout = self._sample_fixed or lay_out(self._sample_columns.dtypes, message.shapes)
        places, found = layout.places, [(0, HEADER)]
        if self._sample_fixed is not None:
            found += [_part(place, message.row, message.count, place.shape[0]) for place in places]
        else:
            found += self._of_columns(message, iter(places))
        return [(start, stop) for start, stop in found if start < stop]

    def _of_columns(self, message: m.WriteRows, places: Iterator[LeafPlace]) -> Iterator[tuple[int, int]]:
        """Yield the regions of the rows, as worker/batch/variable_rows.py writes them."""
        row, count = message.row, message.count
        for column, before, own in zip(self._sample_columns.columns, message.before, message.sizes, strict=True):
            place = next(places)
            if not column.has_offsets:
                yield _part(place, row, count, message.rows)
                continue
            yield _part(place, before[-1], own[-1], place.shape[0])
            *outer, first = column.items(row, before)
            *counts, items = column.items(count, own)
            if column.text:
                ends, strings = next(places), column.strings
                yield _part(ends, first * strings, items * strings + 1, ends.shape[0])
            for at, lists in zip(outer, counts, strict=True):
                splits = next(places)
                yield _part(splits, at, lists + 1, splits.shape[0])

    def _layout(self, shapes: m.Shapes) -> SlotLayout:
        return self._fixed or lay_out(self._columns.dtypes, shapes)


def _part(place: LeafPlace, first: int, count: int, of: int) -> tuple[int, int]:
    """Return the region of `count` rows, from row `first` on, in a leaf of `of` rows."""
    each = place.nbytes // of if of else 0
    return place.offset + first * each, place.offset + (first + count) * each
