"""The order of a lane's samples: how its splits mix, where batches begin, and how to go on from a restart record.

A lane has every C-th split of the (permuted) list, or every C-th segment. Without shuffling its samples come in order.
With shuffling, `interleave` splits are open at once and fill a block in equal runs. Then the block is permuted, unless
a pool permutes it whole, together with blocks of other lanes. Either way the sequence is cut into batches, and the
samples that remain at the end are the leftover.

A record is always that of the last full batch, no matter what was read after it. It moves only when a batch is
complete.

Before a batch can be made, the open splits may have to be read up to the record, or a block filled. This happens in
small steps, so that the worker can do other things between them.

User code runs only through `Split`. This file knows nothing of slots, messages or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_proto import FeedError, GeneratorError, ProtocolError
from penstock_proto.messages import FeedPlan

from ...feed.options.plan_sizes import block_samples
from ...shuffling.permutation import make_key, permute
from ..batch.buckets import bucketed
from ..batch.collate import Collate
from ..batch.variable_rows import VariableRows
from .lane_splits import LaneSplits, Split
from .mixed_splits import MixedSplits
from .restart_record import SAME_AGAIN, RestartRecord


class LaneRun:
    """One lane of one epoch, read from its start or from a record.

    Args:
        plan: the feed's options.
        epoch: from 0.
        lane: from 0 to the number of live lanes, the smaller of `plan.lanes` and `n_splits`.
        n_splits: length of the list of splits.
        collate: copies samples into stores.
        open_split: starts to read a split; called with its number within the lane and its index in the list.
        record: empty, or what `record` returned in an earlier run.
        ahead: empty, or what it returned later in that run. The batches up to there were consumed, and are made again
            only to be dropped. So the lane must arrive at that same record.
        skip: numbers within the lane of splits to stop reading: from `record` on; if `record` is within a block, from
            the next block on; if there is an `ahead`, from there on.
        on_skip: called when a split is skipped, because of `skip` or because user code raised, with its number, its
            index, the number of samples after which it ends, and the error.
        in_slots: whether blocks fill slots; see `plan_sizes.blocks_fill_slots`. Then only the last block of the lane is
            permuted, which is shorter, so that any of its rows can be left over.

    Raises:
        ProtocolError: `record`, `ahead` or `skip` is not of this lane.

    Attributes:
        ended: whether there is no further full batch.
        leftover: the number of rows that remain after that, less than a batch.
        leftover_rows: those rows as a store.
        skipped: whether splits were skipped when the last batch was made (or its block), which the record before it
            does not say.
    """

    def __init__(
        self,
        plan: FeedPlan,
        *,
        epoch: int,
        lane: int,
        n_splits: int,
        collate: Collate,
        open_split: Callable[[int, int], Split],
        record: bytes = b"",
        ahead: bytes = b"",
        skip: Iterable[int] = (),
        on_skip: Callable[[int, int, int, GeneratorError | None], None] = lambda *_: None,
        in_slots: bool = False,
    ) -> None:
        block_rows = block_samples(plan.shuffle, min(plan.lanes, n_splits), plan.batch_size)
        splits = LaneSplits(
            plan,
            epoch=epoch,
            lane=lane,
            n_splits=n_splits,
            seats=min(plan.interleave, block_rows) if plan.shuffle else 1,
            collate=collate,
            open_split=open_split,
            on_skip=on_skip,
            to_skip=skip,
        )
        self._begin(plan, epoch, lane, collate, splits, block_rows, record, ahead, in_slots=in_slots)

    def _begin(
        self,
        plan: FeedPlan,
        epoch: int,
        lane: int,
        collate: Collate,
        splits: LaneSplits | MixedSplits,
        block_rows: int,
        record: bytes,
        ahead: bytes,
        *,
        in_slots: bool,
    ) -> None:
        """Go on from `record`. Samples are read in blocks of `block_rows`, or one batch after another if that is 0."""
        self._lane = lane
        self._piece = plan.piece
        self._block_key = (plan.seed, epoch, "block", lane)
        self._permutes = plan.shuffle > 0
        self._collate = collate
        self._batch_rows = plan.batch_size or 1
        self._block_rows = block_rows
        self._in_slots = in_slots
        self._splits = splits
        self._block = 0
        self._block_start: RestartRecord | None = None  # None: no block is begun
        self._private: Any = None  # a store for blocks that do not fill a slot
        self._offered: Any = None  # a slot for the next block
        self._store: Any = None  # the store of the block
        self._in_place = False  # its store is the slot of its batches
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._taken = 0  # rows of the block
        self._again = False  # a block that was delivered in part is read again
        self._failed = False
        self._before: tuple[RestartRecord, RestartRecord | None] | None = None  # the records before the last batch
        self._record = self._decoded(record) if record else splits.record(0, 0)
        self._first = self._record.taken - self._record.open_samples  # the samples that it does not read
        self._passing = 0  # the batches before this one were consumed
        self._ahead = self._decoded(ahead) if ahead else None
        if self._ahead is not None and self._ahead.index <= self._record.index:
            self._ahead = None
        self._splits.begin(self._record, self._record.ends_of_skipped(self._ahead))
        self._preparing: Iterator[None] | None = self._restore(self._record)
        self.ended = False
        self.leftover = 0
        self.leftover_rows: Any = None
        self.skipped = False

    @property
    def index(self) -> int:
        """Number of the next batch."""
        return self._record.index

    @property
    def dropped(self) -> int:
        """How many samples of the sources gave none before the last full batch (or its block); in all, at the end."""
        return self._splits.all_dropped if self.ended else self._record.all_dropped

    @property
    def first_open(self) -> tuple[int, int] | None:
        """The index, in the list, of the split that it reads first, and how many of its source's samples were read
        before; None if it has no more splits. (If several are open, that is one of them.)"""
        assert isinstance(self._splits, LaneSplits)
        return self._splits.first_open(self._record)

    @property
    def helped_seconds(self) -> float:
        """How long its generators have run for other lanes, if they run for several."""
        return self._splits.helped_seconds

    @property
    def read_again(self) -> int:
        """The number of samples that a worker reads again that takes over after the last full batch. Counts all of a
        block, however much of it is read."""
        return self._record.open_samples + self._block_rows

    @property
    def samples_read(self) -> int:
        """The number of samples that it has read so far up to the last full batch, with those that it has read
        again."""
        return self._record.taken + self._record.made * self._batch_rows - self._first

    @property
    def replayed(self) -> bool:
        """Whether it has reached the record `ahead`: until then its batches might differ from those made before."""
        return self._ahead is None

    def offer(self, slot: Callable[[], Any], batches: int) -> None:
        """Let the next `batches` batches be made directly in their slot, if they are a whole block and blocks fill
        slots.

        Args:
            slot: returns the rows of these batches as one store. `next_batch` then gets the same rows as targets.
            batches: how many batches are requested next.
        """
        if self._in_slots and batches * self._batch_rows == self._block_rows:
            self._offered = slot()

    def pass_to(self, index: int) -> None:
        """Say that the batches before number `index` were consumed, and are made again only to be dropped. So a split
        that fails there is not skipped. Call this before `prepare`."""
        self._passing = index
        self._set_replaying()

    def prepare(self) -> bool:
        """Take a step towards the next batch: read some of the samples that must be read before it.

        Returns:
            True if there is nothing left to read.

        Raises:
            As `next_batch`.
        """
        if self._failed:
            raise ProtocolError(f"lane {self._lane} has failed and cannot go on")
        if self._preparing is None:
            if self.ended or not self._block_rows or self._block_start is not None:
                return True
            self._preparing = self._fill_block()
        try:
            next(self._preparing)
        except StopIteration:
            self._preparing = None
        except BaseException:
            self._failed = True
            raise
        return False

    def next_batch(self, target: Any) -> int:
        """Put the next batch in the first rows of the store `target`.

        A caller that wants to do other things meanwhile calls `prepare` first. Once this has raised, the lane cannot go
        on. Its record is still that of the last full batch.

        Returns:
            The number of its rows, always a full batch. 0 if the lane has no further full batch; then `leftover` is
            set.

        Raises:
            FeedError: a resumed lane no longer has the same samples, or too many splits were skipped.
            Exception: whatever a `Split` or `open_split` raises.
        """
        while not self.prepare():
            pass
        if self.ended:
            return 0
        try:
            rows = self._from_block(target) if self._block_rows else self._in_order(target)
            if rows:
                self._before = self._record, self._ahead
                self._advance()
        except BaseException:
            self._failed = True
            raise
        return rows

    def take_back(self) -> None:
        """Take back the last batch, which could not be transformed: the record is that of the batch before it. The lane
        cannot go on."""
        assert self._before is not None
        self._record, self._ahead = self._before
        self._failed = True

    def record(self) -> bytes:
        """Return the restart record, from which a later `LaneRun` goes on after the last full batch.

        Raises:
            ProtocolError: it does not add up, so samples would be lost or come twice.
        """
        if not self._record.adds_up(self._batch_rows, self._block_rows):
            raise ProtocolError(
                f"lane {self._lane} has {self._record.taken} samples before batch {self.index} in its restart record, "
                "but its batches hold another number: please report this as a bug"
            )
        return self._record.encode()

    def at_border(self, batches: int) -> bool:
        """Return whether a worker that goes on from the record reads no more than `batches` batches again: a split or a
        block has just begun.

        (With shuffling, it also reads the open splits again, up to where they were.)
        """
        if self._block_rows:
            return self._record.made == 0
        return all(seat is None or seat[1] <= batches * self._batch_rows for seat in self._record.seats)

    def close(self) -> None:
        """End the generators and release all memory."""
        self.ended = True
        self._preparing = None
        self._private = self._offered = self._store = self.leftover_rows = None
        self._splits.close()

    def _set_replaying(self) -> None:
        """Tell the splits whether samples that were consumed before are being read again."""
        self._splits.set_replaying(self._again or self._ahead is not None or self.index < self._passing)

    def _decoded(self, record: bytes) -> RestartRecord:
        return self._splits.decode(record, self._batch_rows, self._block_rows)

    def _advance(self) -> None:
        """Move the record past the batch that has just been completed."""
        index = self.index + 1
        if self._block_start is not None and self._taken < self._block_rows:
            place = msgspec.structs.replace(self._block_start, made=self._taken // self._batch_rows, index=index)
        else:
            if self._block_start is not None:
                self._block_start = self._store = None
                self._block += 1
                self._taken = 0
            place = self._splits.record(self._block, index)
        if self._ahead is not None and self._ahead.index == place.index:
            same = msgspec.structs.replace(place, skipped=self._ahead.skipped)
            if same.skipped:  # the source of a split that was skipped had been read further than its last sample
                same = msgspec.structs.replace(same, places=self._ahead.places, dropped=self._ahead.dropped)
            if same != self._ahead:
                raise FeedError(
                    f"after {place.index} batches lane {self._lane} was {self._ahead.where(self._piece)}, and when it "
                    f"was read again it is {place.where(self._piece)}: {SAME_AGAIN}"
                )
            self._ahead = None
        before, self._record = self._record, self._splits.advance(place)
        if self._splits.replaying:
            self._set_replaying()
            if not self._splits.replaying:
                self._splits.skip_asked()
                self._record = self._splits.advance(place)
        self.skipped = self._record.skipped != before.skipped

    def _in_order(self, target: Any) -> int:
        assert isinstance(self._splits, LaneSplits)  # mixes have blocks
        rows = self._splits.read(0, target, 0, self._batch_rows)
        if rows < self._batch_rows:
            self._end(rows, self._collate.first(target, rows))
            return 0
        return rows

    def _from_block(self, target: Any) -> int:
        rows = self._order[self._taken : self._taken + self._batch_rows]
        if len(rows) < self._batch_rows:
            kept = self._collate.store(len(rows))
            self._collate.move(self._store, rows, kept)
            self._private = self._store = None
            self._end(len(rows), kept)
            return 0
        if not self._in_place:
            self._collate.move(self._store, rows, target)
        self._taken += len(rows)
        return len(rows)

    def _end(self, rows: int, kept: Any) -> None:
        if self._ahead is not None:
            raise FeedError(
                f"lane {self._lane} had {self._ahead.index} full batches or more, and only {self.index} when its "
                f"splits were read again: {SAME_AGAIN}"
            )
        self.ended = True
        self.leftover, self.leftover_rows = rows, kept
        # The record stays after the last full batch, so that a worker that goes on from it has the leftover too.
        self._record = msgspec.structs.replace(self._record, skipped=tuple(self._splits.skipped.items()))

    def _fill_block(self) -> Iterator[None]:
        """Fill a block, in steps, and put its rows in order. Use the offered slot as its store, if there is one."""
        one_batch = self._block_rows == self._batch_rows  # then no batch begins within the block
        start = self._record if one_batch else self._splits.record(self._block, self.index)
        store, self._offered = self._offered, None
        in_place = store is not None
        if not in_place:
            if self._private is None:
                self._private = self._collate.store(self._block_rows)
            store = self._private
        rows = yield from self._splits.fill_block(
            store, self._block * self._block_rows, self._block_rows, self._batch_rows
        )
        if self._in_slots and len(rows) == self._block_rows:
            rows = np.arange(len(rows))
        elif rows.size and self._permutes:
            rows = rows[permute(make_key(*self._block_key, self._block), len(rows), np.arange(len(rows)))]
            if isinstance(self._collate, VariableRows) and self._collate.bucketed:
                buckets = self._collate.buckets_of(store, int(rows.max()) + 1)
                rows = bucketed(rows, buckets, self._batch_rows)
        if in_place and len(rows) < self._block_rows:  # a copy: rows move within the slot
            store, in_place = self._collate.first(store, int(rows.max(initial=-1)) + 1), False
        self._store, self._in_place = store, in_place
        self._order = rows
        self._block_start = msgspec.structs.replace(start, closed=self._splits.done)

    def _restore(self, place: RestartRecord) -> Iterator[None]:
        """Read again, in steps, the samples that were read before `place`."""
        self._block = place.block
        self._again = place.made > 0
        self._set_replaying()
        if not self._splits.replaying:
            self._splits.skip_asked_before(place)
        for i, seat in enumerate(place.seats):
            if seat is not None:
                number, taken = seat
                self._splits.reopen(i, number, taken, place.place(i))
                while not self._splits.replay(i, taken, place.place(i)):
                    yield
        if place.made:
            yield from self._fill_block()
            self._taken = place.made * self._batch_rows
            if self._taken > len(self._order):
                raise FeedError(
                    f"block {self._block} of lane {self._lane} had {self._taken} samples or more, and only "
                    f"{len(self._order)} when its splits were read again: {SAME_AGAIN}"
                )
            if self._splits.done != place.closed:
                raise FeedError(
                    f"the {self._piece}s that had ended by block {self._block} of lane {self._lane} had {place.closed} "
                    f"samples, and {self._splits.done} when they were read again: {SAME_AGAIN}"
                )
            self._again = False
            self._set_replaying()
            if not self._splits.replaying:
                self._splits.skip_asked()
