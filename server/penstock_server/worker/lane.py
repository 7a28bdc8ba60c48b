"""The order of a lane's samples: which split comes when, how they mix, and how to go on from a record.

A lane has every C-th split of the (permuted) list, or every C-th segment. Without shuffling its samples come in order.
With shuffling, `interleave` splits are open at once and fill a block in equal runs, and the block is permuted. Either
way the sequence is cut into batches, and what remains at the end is the leftover.

A split that is skipped yields so many samples and then ends: what the lane is from there on follows from that, so the
number is part of the record, and whoever goes on from it has the same lane without the generator being run beyond.

A record is that of the last full batch, whatever was read behind it: the place moves when a batch is whole, and only
then. And it adds up: the samples that it says were read are those of the batches before it.

What has to be read before a batch can be made (the open splits up to the record, a block) is read in small steps, so
that the worker can do other things between them.

No user code is called from here but through `Split`, and nothing here knows slots, messages or processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from penstock_proto import FeedError, GeneratorError, ProtocolError, arrays
from penstock_proto.messages import Count, FeedPlan, Progress

from ..feed import block_samples
from ..permutation import make_key, permute
from .collate import Collate

MAX_SKIPPED = 1024
"""Splits of a lane that may be skipped: they stay in its record."""

MAX_EMPTY = 1000
"""Segments in a row that may end without a sample where there is no last one."""

STEP_SECONDS = 0.020
"""How long a step of what is read again takes, if samples do not take longer."""

_SAME_AGAIN = "a stream can go on elsewhere only if a split always yields the same samples"


class Split(Protocol):
    """One split that is being read."""

    taken: int
    """Samples read so far."""

    def read(self, collate: Collate, store: Any, row: int, stop: int) -> int:
        """Fill the rows of `store` from `row` to `stop`; returns the first that was not filled if the split ended."""

    def skip(self, until: int, seconds: float) -> bool:
        """Drop samples until so many were read in all, for about so long; returns whether they were."""

    def close(self) -> None:
        """End the generator."""


class _Ended:
    """A split that has given all it will ever give, without a generator that could be run."""

    def __init__(self, taken: int) -> None:
        self.taken = taken

    def read(self, collate: Collate, store: Any, row: int, stop: int) -> int:
        return row

    def skip(self, until: int, seconds: float) -> bool:
        return True

    def close(self) -> None:
        pass


class _Place(Struct, frozen=True, forbid_unknown_fields=True):
    """A restart record. It comes back by way of a trainer's checkpoint, so it is checked.

    `seats`: of each split that is open, its number within the lane and the samples taken of it, None for an empty
    seat; `next`: number of the lane's next split; `done`: samples of the splits that were read to their ends; all at
    the start of the block when shuffling. `block`: its number; `made`: batches taken of it; `closed`: if any were, what
    `done` was when it was full. `index`: number of the lane's next batch. `skipped`: of each split that was or will be
    cut short, its number within the lane and the samples after which it ends.
    """

    seats: tuple[tuple[Count, Progress] | None, ...]
    next: Count
    done: Progress
    block: Progress
    made: Progress
    index: Progress
    skipped: Annotated[tuple[tuple[Count, Progress], ...], Meta(max_length=MAX_SKIPPED)] = ()
    closed: Progress = 0

    @property
    def taken(self) -> int:
        """Samples that were read before it, or before its block."""
        return self.done + sum(seat[1] for seat in self.seats if seat is not None)


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
        ahead: empty, or what it returned later in that run: batches up to there were consumed, and are made again only
            to be dropped. So the lane must come by that place too.
        skip: numbers within the lane of splits of which nothing more is read: from here on; where `record` stands
            within a block, from the next block on; where there is something `ahead`, from there on.
        on_skip: called when a split is skipped, by `skip` or because user code raised, with its number, its index, the
            samples after which it ends, and the error.

    Raises:
        ProtocolError: `record`, `ahead` or `skip` is not of this lane.

    Attributes:
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
        ahead: bytes = b"",
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
        self._skips = plan.on_error == "skip"
        self._to_skip = tuple(dict.fromkeys(skip))
        if any(number >= self._count for number in self._to_skip):
            raise ProtocolError(f"split {max(self._to_skip)} is to be skipped, but lane {lane} has {self._count}")
        self._batch_rows = plan.batch_size or 1
        self._block_rows = block_samples(plan.shuffle, self._lanes, plan.batch_size)
        seats = min(plan.interleave, self._block_rows) if plan.shuffle else 1
        self._seats: list[tuple[int, Split] | None] = [None] * seats
        self._next = 0
        self._done = 0
        self._block = 0
        self._block_start: _Place | None = None  # None: no block is begun
        self._store: Any = None
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._taken = 0  # rows of the block
        self._again = False  # a block is read of which some was delivered
        self._failed = False
        self._behind = self._checked(record) if record else self._place(0)
        self._ahead = self._checked(ahead) if ahead else None
        if self._ahead is not None and self._ahead.index <= self._behind.index:
            self._ahead = None
        self._skipped = self._skipped_in(self._behind)
        self._preparing: Iterator[None] | None = self._restore(self._behind)
        self.ended = False
        self.leftover = 0
        self.leftover_rows: Any = None

    @property
    def index(self) -> int:
        """Number of the next batch."""
        return self._behind.index

    @property
    def settled(self) -> bool:
        """Whether its batches are those that they were: False until it has come by what is `ahead`."""
        return self._ahead is None

    def prepare(self) -> bool:
        """Take a step towards the next batch: read some of what must be read before. True if there is no more to do.

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

        Whoever wants to do other things meanwhile calls `prepare` first. When it has raised, the lane cannot go on;
        its record is still that of the last full batch.

        Returns:
            Its rows, always a full batch; or 0 when the lane has no further one: then `leftover` is set.

        Raises:
            FeedError: a resumed lane does not have the samples that it had, or too many splits were skipped.
            Exception: whatever a `Split` or `open_split` raises.
        """
        while not self.prepare():
            pass
        if self.ended:
            return 0
        try:
            rows = self._from_block(target) if self._block_rows else self._in_order(target)
            if rows:
                self._moved()
        except BaseException:
            self._failed = True
            raise
        return rows

    def record(self) -> bytes:
        """What a later `LaneRun` needs to go on behind the last full batch.

        Raises:
            ProtocolError: it does not add up, and samples would be lost or come twice.
        """
        if not self._adds_up(self._behind):
            raise ProtocolError(
                f"lane {self._lane} has {self._behind.taken} samples before batch {self.index} by its restart record, "
                "which is not what its batches hold: please report this as a bug"
            )
        return arrays.pack(msgspec.to_builtins(self._behind))

    @property
    def border(self) -> bool:
        """Whether next to nothing is read again by whoever goes on from the record: a split or a block has just begun.

        (When shuffling, the splits that are open then are read again as far as they were.)
        """
        if self._block_rows:
            return self._behind.made == 0
        return all(seat is None or seat[1] <= self._batch_rows for seat in self._behind.seats)

    def close(self) -> None:
        """End the generators and let go of all memory."""
        self.ended = True
        self._preparing = None
        self._store = self.leftover_rows = None
        for number, seat in enumerate(self._seats):
            self._seats[number] = None
            if seat is not None:
                seat[1].close()

    def _moved(self) -> None:
        """Another batch is whole: the place behind it is the lane's from now on."""
        index = self.index + 1
        if self._block_start is not None and self._taken < self._block_rows:
            place = msgspec.structs.replace(self._block_start, made=self._taken // self._batch_rows, index=index)
        else:
            if self._block_start is not None:
                self._block_start = None
                self._block += 1
                self._taken = 0
            place = self._place(index)
        if self._ahead is not None and self._ahead.index == place.index:
            if msgspec.structs.replace(place, skipped=self._ahead.skipped) != self._ahead:
                raise FeedError(
                    f"behind {place.index} batches lane {self._lane} was {self._said(self._ahead)}, and when it was "
                    f"read again it is {self._said(place)}: {_SAME_AGAIN}"
                )
            self._ahead = None
            self._skip_asked({seat[0]: seat[1].taken for seat in self._seats if seat is not None})
        if self._skipped:
            self._forget_skipped(place)
            place = msgspec.structs.replace(place, skipped=tuple(self._skipped.items()))
        self._behind = place

    @property
    def _may_skip(self) -> bool:
        """Whether a split that fails is left out. What was consumed is read again as it was, or not at all."""
        return self._skips and not self._again and self._ahead is None

    def _forget_skipped(self, place: _Place) -> None:
        """Of an endless lane forget those that are never read again from `place`, which would become ever more."""
        if self._endless and self._skipped:
            seated = {seat[0] for seat in place.seats if seat is not None}
            self._skipped = {n: end for n, end in self._skipped.items() if n >= place.next or n in seated}

    def _in_order(self, target: Any) -> int:
        rows = self._read(0, target, 0, self._batch_rows)
        if rows < self._batch_rows:
            self._end(rows, self._collate.first(target, rows))
            return 0
        return rows

    def _from_block(self, target: Any) -> int:
        rows = self._order[self._taken : self._taken + self._batch_rows]
        if len(rows) < self._batch_rows:
            kept = self._collate.store(len(rows))
            self._collate.move(self._store, rows, kept)
            self._store = None
            self._end(len(rows), kept)
            return 0
        self._collate.move(self._store, rows, target)
        self._taken += len(rows)
        return len(rows)

    def _end(self, rows: int, kept: Any) -> None:
        if self._ahead is not None:
            raise FeedError(
                f"lane {self._lane} had {self._ahead.index} full batches or more, and only {self.index} when its "
                f"splits were read again: {_SAME_AGAIN}"
            )
        self.ended = True
        self.leftover, self.leftover_rows = rows, kept
        # The place stays behind the last full batch, so that whoever goes on from it has the leftover too.
        self._behind = msgspec.structs.replace(self._behind, skipped=tuple(self._skipped.items()))

    def _fill_block(self) -> Iterator[None]:
        """Fill a block from the open splits in equal runs; when one has no more, and the lane no other, the rest.

        A step reads as many samples as a batch has, or more while they come fast.
        """
        start = self._place(self.index)
        if self._store is None:
            self._store = self._collate.store(self._block_rows)
        filled, step = 0, self._batch_rows
        while filled < self._block_rows:
            live = [i for i, seat in enumerate(self._seats) if seat is not None or self._next < self._count]
            if not live:
                break
            run, longer = divmod(self._block_rows - filled, len(live))
            for place, seat in enumerate(live):
                end = filled + run + (place < longer)
                while filled < end:
                    stop = min(end, filled + step)
                    began = time.monotonic()
                    filled = self._read(seat, self._store, filled, stop)
                    if filled < stop:
                        break
                    step = 2 * step if time.monotonic() - began < STEP_SECONDS / 4 else self._batch_rows
                    yield
        if filled:
            self._order = permute(make_key(*self._block_key, self._block), filled, np.arange(filled))
        else:
            self._order = np.empty(0, np.int64)
        self._block_start = msgspec.structs.replace(start, closed=self._done)

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
                self._done += taken[1].taken
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
        """The split with this number, from its start; if it ends after the samples `taken` of it before, that end."""
        if self._skipped.get(number) == taken:
            return _Ended(taken)
        try:
            return self._open_split(number, self._index_of(number))
        except GeneratorError as error:
            return self._left_out(number, taken, error)

    def _reopened(self, seat: int, taken: int) -> bool:
        """Read the split on that seat on to where it was, for a step; returns whether it is there."""
        number, split = self._seats[seat]  # type: ignore[misc]  # it has just been opened
        try:
            return split.skip(taken, STEP_SECONDS)
        except GeneratorError as error:
            self._seats[seat] = number, self._left_out(number, taken, error)
            split.close()
            return True

    def _left_out(self, number: int, taken: int, error: GeneratorError) -> Split:
        """The end of a split that cannot be read, if it may be skipped."""
        if not self._may_skip or number in self._skipped:
            raise error
        self._skip(number, taken, error)
        return _Ended(taken)

    def _index_of(self, number: int) -> int:
        """The index in the list of the lane's split with this number."""
        position = self._lane + number * self._lanes
        return position if self._split_key is None else permute(self._split_key, self._n_splits, position)

    def _skip(self, number: int, samples: int, error: GeneratorError | None) -> None:
        """Let a split end after so many samples, here and wherever this lane is read again."""
        if len(self._skipped) >= MAX_SKIPPED:
            self._forget_skipped(self._behind)
        if len(self._skipped) >= MAX_SKIPPED:
            raise FeedError(
                f"too many {self._piece}s were skipped: {MAX_SKIPPED} of lane {self._lane}"
                f"{'' if self._endless else f', which has {self._count}'}. What is wrong with them is in the log",
                split=None if error is None else error.split,
                remote_traceback=None if error is None else error.remote_traceback,
            ) from error
        self._skipped[number] = samples
        self._on_skip(number, self._index_of(number), samples, error)

    def _place(self, index: int) -> _Place:
        """Where the splits stand, with nothing of a block."""
        seats = [None if seat is None else (seat[0], seat[1].taken) for seat in self._seats]
        return _Place(tuple(seats), self._next, self._done, self._block, 0, index)

    def _adds_up(self, place: _Place) -> bool:
        """Whether as many samples were read before the place as the batches before it hold."""
        if self._block_rows:
            blocks = place.block * self._block_rows
            return place.taken == blocks == (place.index - place.made) * self._batch_rows
        return place.taken == place.index * self._batch_rows

    def _said(self, place: _Place) -> str:
        """The place in words."""
        seats = [f"{seat[1]} samples into {self._piece} {seat[0]}" for seat in place.seats if seat is not None]
        return " and ".join(seats) or f"before {self._piece} {place.next}"

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
            or any(number >= place.next for number in numbers)
            or place.next > self._count
            or (place.made and place.made * self._batch_rows >= self._block_rows)
        ):
            raise ProtocolError("a restart record that was made with other splits or other options of the feed")
        if not self._adds_up(place):
            raise ProtocolError(
                f"a restart record that does not add up: it has {place.taken} samples before batch {place.index}"
            )
        return place

    def _skipped_in(self, place: _Place) -> dict[int, int]:
        """The number of each split that was skipped by the place, or by what is ahead, and the samples after which it
        ends."""
        skipped = {**dict(self._ahead.skipped if self._ahead is not None else ()), **dict(place.skipped)}
        if any(seat is not None and seat[1] > skipped.get(seat[0], seat[1]) for seat in place.seats):
            raise ProtocolError("a restart record whose splits were read beyond their ends")
        return skipped

    def _restore(self, place: _Place) -> Iterator[None]:
        """Read again what was read before the place, in steps."""
        self._next = place.next
        self._done = place.done
        self._block = place.block
        self._again = place.made > 0
        if self._may_skip_asked:
            # Before they are opened: that may have been the end of a worker.
            self._skip_asked({seat[0]: seat[1] for seat in place.seats if seat is not None})
        for i, seat in enumerate(place.seats):
            if seat is not None:
                number, taken = seat
                self._seats[i] = number, self._opened(number, taken)
                while not self._reopened(i, taken):
                    yield
        if place.made:
            yield from self._fill_block()
            self._taken = place.made * self._batch_rows
            if self._taken > len(self._order):
                raise FeedError(
                    f"block {self._block} of lane {self._lane} had {self._taken} samples or more, and only "
                    f"{len(self._order)} when its splits were read again: {_SAME_AGAIN}"
                )
            if self._done != place.closed:
                raise FeedError(
                    f"the {self._piece}s that had ended by block {self._block} of lane {self._lane} had {place.closed} "
                    f"samples, and {self._done} when they were read again: {_SAME_AGAIN}"
                )
            self._again = False
            if self._may_skip_asked:
                self._skip_asked({seat[0]: seat[1].taken for seat in self._seats if seat is not None})

    @property
    def _may_skip_asked(self) -> bool:
        return not self._again and self._ahead is None

    def _skip_asked(self, taken: dict[int, int]) -> None:
        """Skip what is to be skipped, `taken` being the samples that were read of each open split."""
        for number in self._to_skip:
            if number not in self._skipped and (number in taken or number >= self._next):
                self._skip(number, taken.get(number, 0), None)
