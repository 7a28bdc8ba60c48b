"""The order of a lane's samples: which split comes when, how they mix, and how to go on from a record.

A lane has every C-th split of the (permuted) list, or every C-th segment. Without shuffling its samples come in order.
With shuffling, `interleave` splits are open at once and fill a block in equal runs, and the block is permuted. Either
way the sequence is cut into batches, and what remains at the end is the leftover.

A split that is skipped yields so many samples and then ends: what the lane is from there on follows from that, so the
number is part of the record, and whoever goes on from it has the same lane without the generator being run beyond.

No user code is called from here but through `Split`, and nothing here knows slots, messages or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from penstock_proto import FeedError, GeneratorError, ProtocolError, arrays
from penstock_proto.messages import Count, FeedPlan

from ..feed import block_samples
from ..permutation import make_key, permute
from .collate import Collate

MAX_SKIPPED = 1024
"""Splits of a lane that may be skipped: they stay in its record."""

MAX_EMPTY = 1000
"""Segments in a row that may end without a sample where there is no last one."""

_SAME_AGAIN = "a stream can go on elsewhere only if a split always yields the same samples"


class Split(Protocol):
    """One split that is being read."""

    taken: int
    """Samples read so far."""

    def read(self, collate: Collate, store: Any, row: int, stop: int) -> int:
        """Fill the rows of `store` from `row` to `stop`; returns the first that was not filled if the split ended."""

    def skip(self, count: int) -> None:
        """Read so many samples and drop them."""

    def close(self) -> None:
        """End the generator."""


class _Ended:
    """A split that has given all it will ever give, without a generator that could be run."""

    def __init__(self, taken: int) -> None:
        self.taken = taken

    def read(self, collate: Collate, store: Any, row: int, stop: int) -> int:
        return row

    def skip(self, count: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Place(Struct, frozen=True, forbid_unknown_fields=True):
    """A restart record. It comes back by way of a trainer's checkpoint, so it is checked.

    `seats`: of each split that is open, its number within the lane and the samples taken of it, None for an empty
    seat; `next`: number of the lane's next split; both at the start of the block when shuffling. `block`: its number;
    `made`: batches taken of it. `index`: number of the lane's next batch. `skipped`: of each split that was or will be
    cut short, its number within the lane and the samples after which it ends.
    """

    seats: tuple[tuple[Count, Count] | None, ...]
    next: Count
    block: Count
    made: Count
    index: Count
    skipped: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_SKIPPED)] = ()


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
        skip: numbers within the lane of splits of which nothing more is read: from here on, or, where `record` stands
            within a block, from the next block on.
        on_skip: called when a split is skipped, by `skip` or because user code raised, with its number, its index, the
            samples after which it ends, and the error.

    Raises:
        ProtocolError: `record` or `skip` is not of this lane.

    Attributes:
        index: number of the next batch.
        ended: whether there is no further full batch.
        leftover: rows that remain then, less than a batch.
        leftover_rows: those rows as a store.
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
        skip: Iterable[int] = (),
        on_skip: Callable[[int, int, int, GeneratorError | None], None] = lambda *_: None,
    ) -> None:
        self._lanes = min(plan.lanes, n_splits)
        self._lane = lane
        self._n_splits = n_splits
        self._count = len(range(lane, n_splits, self._lanes))  # splits of this lane
        self._segment = plan.segment
        self._piece = plan.piece
        self._endless = plan.endless
        self._empty = 0  # splits in a row that had no sample
        permuted = plan.shuffle and plan.segment is None  # segments differ by their random numbers alone
        self._split_key = make_key(plan.seed, epoch, "splits") if permuted else None
        self._block_key = (plan.seed, epoch, "block", lane)
        self._collate = collate
        self._open_split = open_split
        self._on_skip = on_skip
        self._may_skip = plan.on_error == "skip"
        self._to_skip = tuple(dict.fromkeys(skip))
        if any(number >= self._count for number in self._to_skip):
            raise ProtocolError(f"split {max(self._to_skip)} is to be skipped, but lane {lane} has {self._count}")
        self._skipped: dict[int, int] = {}  # number of each split that was skipped, and the samples after which it ends
        self._batch_rows = plan.batch_size or 1
        self._block_rows = block_samples(plan.shuffle, self._lanes, plan.batch_size)
        seats = min(plan.interleave, self._block_rows) if plan.shuffle else 1
        self._seats: list[tuple[int, Split] | None] = [None] * seats
        self._next = 0
        self._block = 0
        self._block_start: _Place | None = None  # None: no block is begun
        self._last: _Place | None = None  # set when a lane that does not shuffle has ended
        self._store: Any = None
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._taken = 0  # rows of the block
        self.ended = False
        self.index = 0
        self._resume: _Place | None = self._checked(record) if record else self._place()
        self.index = self._resume.index
        self.leftover = 0
        self.leftover_rows: Any = None

    def next_batch(self, target: Any) -> int:
        """Put the next batch in the first rows of the store `target`.

        Returns:
            Its rows, always a full batch; or 0 when the lane has no further one: then `leftover` is set.

        Raises:
            FeedError: a resumed lane does not have the samples that it had, or too many splits were skipped.
            Exception: whatever a `Split` or `open_split` raises.
        """
        if self._resume is not None:
            self._restore(self._resume)
            self._resume = None
        if self.ended:
            return 0
        rows = self._from_block(target) if self._block_rows else self._in_order(target)
        self.index += rows > 0
        return rows

    def record(self) -> bytes:
        """What a later `LaneRun` needs to go on behind the last batch."""
        return arrays.pack(msgspec.to_builtins(self._here()))

    @property
    def border(self) -> bool:
        """Whether next to nothing is read again by whoever goes on from the record: a split or a block has just begun.

        (When shuffling, the splits that are open then are read again as far as they were.)
        """
        here = self._here()
        if self._block_rows:
            return here.made == 0
        return all(seat is None or seat[1] <= self._batch_rows for seat in here.seats)

    def close(self) -> None:
        """End the generators and let go of all memory."""
        self.ended = True
        self._store = self.leftover_rows = None
        for number, seat in enumerate(self._seats):
            self._seats[number] = None
            if seat is not None:
                seat[1].close()

    def _here(self) -> _Place:
        """The place behind the last batch."""
        if self._resume is not None:
            return self._resume
        place = self._last or self._block_start or self._place()
        made = self._taken // self._batch_rows
        self._forget_skipped(place)
        skipped = tuple(self._skipped.items())
        return msgspec.structs.replace(place, made=made, index=self.index, skipped=skipped)

    def _forget_skipped(self, place: _Place) -> None:
        """Of an endless lane forget those that are never read again from `place`, which would become ever more."""
        if self._endless and self._skipped:
            seated = {seat[0] for seat in place.seats if seat is not None}
            self._skipped = {n: end for n, end in self._skipped.items() if n >= place.next or n in seated}

    def _in_order(self, target: Any) -> int:
        seat, following = self._seats[0], self._next
        taken = seat[1].taken if seat is not None else 0
        rows = self._read(0, target, 0, self._batch_rows)
        if rows < self._batch_rows:
            # The record stays behind the last full batch, so that whoever goes on from it has the leftover too.
            self._last = _Place((None if seat is None else (seat[0], taken),), following, 0, 0, self.index)
            self._end(rows, self._collate.first(target, rows))
            return 0
        return rows

    def _from_block(self, target: Any) -> int:
        if self._block_start is None:
            self._fill_block()
        rows = self._order[self._taken : self._taken + self._batch_rows]
        if len(rows) < self._batch_rows:
            kept = self._collate.store(len(rows))
            self._collate.move(self._store, rows, kept)
            self._store = None
            self._end(len(rows), kept)
            return 0
        self._collate.move(self._store, rows, target)
        self._taken += len(rows)
        if self._taken == self._block_rows:
            self._block_start = None
            self._block += 1
            self._taken = 0
        return len(rows)

    def _end(self, rows: int, kept: Any) -> None:
        self.ended = True
        self.leftover, self.leftover_rows = rows, kept

    def _fill_block(self) -> None:
        """Fill a block from the open splits in equal runs; when one has no more, and the lane no other, the rest."""
        self._block_start = self._place()
        if self._store is None:
            self._store = self._collate.store(self._block_rows)
        filled = 0
        while filled < self._block_rows:
            live = [i for i, seat in enumerate(self._seats) if seat is not None or self._next < self._count]
            if not live:
                break
            run, longer = divmod(self._block_rows - filled, len(live))
            for place, seat in enumerate(live):
                filled = self._read(seat, self._store, filled, filled + run + (place < longer))
        if filled:
            self._order = permute(make_key(*self._block_key, self._block), filled, np.arange(filled))
        else:
            self._order = np.empty(0, np.int64)

    def _read(self, seat: int, store: Any, row: int, stop: int) -> int:
        """Fill rows from the split on that seat, and from the lane's next ones when it ends, while there are any."""
        while row < stop:
            taken = self._seats[seat]
            if taken is None:
                if self._next >= self._count:
                    break
                number = self._next
                self._next += 1
                taken = self._seats[seat] = number, self._opened(number)
            row = self._read_split(*taken, store, row, stop)
            if row < stop or taken[1].taken == self._segment:  # of a whole segment nothing has to be read again
                self._seats[seat] = None
                taken[1].close()
                self._count_empty(taken[1].taken)
        return row

    def _count_empty(self, samples: int) -> None:
        """A split has ended with so many samples. Segments that yield nothing must not go by for ever."""
        self._empty = 0 if samples else self._empty + 1
        if self._endless and self._empty > MAX_EMPTY:
            raise FeedError(
                f"the feed yields nothing any more: {self._empty} segments of lane {self._lane} in a row ended without "
                "a sample; let the generator yield at least one, or raise where it cannot",
                split=f"segment {self._index_of(self._next - 1)}",
            )

    def _read_split(self, number: int, split: Split, store: Any, row: int, stop: int) -> int:
        limit, before = self._skipped.get(number), split.taken
        end = stop if limit is None else min(stop, row + limit - before)
        if row == end:
            return row
        try:
            filled = split.read(self._collate, store, row, end)
        except GeneratorError as error:
            if not self._may_skip or limit is not None:
                raise
            self._skip(number, split.taken, error)
            return row + split.taken - before
        if filled < end and limit is not None:
            raise FeedError(
                f"{self._piece} {number} of lane {self._lane} yielded {limit} samples, and only {split.taken} when it "
                f"was run again: {_SAME_AGAIN}"
            )
        return filled

    def _opened(self, number: int, taken: int = 0) -> Split:
        """The split with this number, of which so many samples were read before."""
        limit = self._skipped.get(number)
        if limit == taken:
            return _Ended(taken)
        split: Split | None = None
        try:
            split = self._open_split(number, self._index_of(number))
            if taken:
                split.skip(taken)
            return split
        except FeedError as error:
            if split is not None:
                split.close()
            if not isinstance(error, GeneratorError) or not self._may_skip or limit is not None:
                raise
            self._skip(number, taken, error)
            return _Ended(taken)

    def _index_of(self, number: int) -> int:
        """The index in the list of the lane's split with this number."""
        position = self._lane + number * self._lanes
        return position if self._split_key is None else permute(self._split_key, self._n_splits, position)

    def _skip(self, number: int, samples: int, error: GeneratorError | None) -> None:
        """Let a split end after so many samples, here and wherever this lane is read again."""
        if len(self._skipped) >= MAX_SKIPPED:
            self._forget_skipped(self._block_start or self._place())
        if len(self._skipped) >= MAX_SKIPPED:
            raise FeedError(
                f"too many {self._piece}s were skipped: {MAX_SKIPPED} of lane {self._lane}"
                f"{'' if self._endless else f', which has {self._count}'}. What is wrong with them is in the log",
                split=None if error is None else error.split,
                remote_traceback=None if error is None else error.remote_traceback,
            ) from error
        self._skipped[number] = samples
        self._on_skip(number, self._index_of(number), samples, error)

    def _place(self) -> _Place:
        seats = tuple(None if seat is None else (seat[0], seat[1].taken) for seat in self._seats)
        return _Place(seats, self._next, self._block, 0, self.index)

    def _checked(self, record: bytes) -> _Place:
        try:
            place = msgspec.convert(arrays.unpack(record), type=_Place)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"a malformed restart record: {error}") from None
        numbers = [seat[0] for seat in place.seats if seat is not None]
        skipped = dict(place.skipped)
        if (
            len(place.seats) != len(self._seats)
            or len(set(numbers)) != len(numbers)
            or len(skipped) != len(place.skipped)
            or any(number >= self._count for number in skipped)
            or any(seat is not None and seat[1] > skipped.get(seat[0], seat[1]) for seat in place.seats)
            or any(number >= place.next for number in numbers)
            or place.next > self._count
            or (place.made and place.made * self._batch_rows >= self._block_rows)
        ):
            raise ProtocolError("a restart record that was made with other splits or other options of the feed")
        return place

    def _restore(self, place: _Place) -> None:
        self._skipped = dict(place.skipped)
        self._next = place.next
        self._block = place.block
        if not place.made:
            # Before they are opened: that may have been the end of a worker.
            self._skip_asked({seat[0]: seat[1] for seat in place.seats if seat is not None})
        # A block is read again as it was, or not at all: some of its samples were delivered.
        may_skip, self._may_skip = self._may_skip, self._may_skip and not place.made
        for i, seat in enumerate(place.seats):
            if seat is not None:
                self._seats[i] = seat[0], self._opened(*seat)
        if place.made:
            self._fill_block()
            self._taken = place.made * self._batch_rows
            if self._taken > len(self._order):
                raise FeedError(
                    f"block {self._block} of lane {self._lane} had {self._taken} samples or more, and only "
                    f"{len(self._order)} when its splits were read again: {_SAME_AGAIN}"
                )
            self._skip_asked({seat[0]: seat[1].taken for seat in self._seats if seat is not None})
        self._may_skip = may_skip

    def _skip_asked(self, taken: dict[int, int]) -> None:
        """Skip what is to be skipped, `taken` being the samples that were read of each open split."""
        for number in self._to_skip:
            if number not in self._skipped and (number in taken or number >= self._next):
                self._skip(number, taken.get(number, 0), None)
