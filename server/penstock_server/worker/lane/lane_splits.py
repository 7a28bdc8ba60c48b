"""The splits of a lane: which are open, which comes next, and which end early because they are skipped.

A split that is skipped ends after a certain number of samples. The rest of the lane depends on that number, so it is
part of the restart record: a worker that goes on from the record has the same lane, and does not run the generator
beyond that sample.

This file calls user code only through `Split`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_proto import FeedError, GeneratorError, ProtocolError
from penstock_proto.messages import FeedPlan

from ...shuffling.permutation import make_key, permute
from ..batch.collate import Collate
from .restart_record import MAX_SKIPPED, SAME_AGAIN, RestartRecord, SourcePlace, decode

MAX_EMPTY = 1000
"""How many successive segments of an endless feed may end without a sample."""

STEP_SECONDS = 0.020
"""How long a step of replaying a split takes, in seconds, unless a single sample takes longer."""

_REMEMBERED = 64
"""How many skipped splits a record of an endless lane names although the lane has passed them."""


class Split(Protocol):
    """One split that is being read."""

    taken: int
    """Samples read so far."""

    @property
    def source_place(self) -> SourcePlace:
        """The place in its source."""

    def read(self, collate: Collate, store: Any, row: int, stop: int) -> int:
        """Fill the rows of `store` from `row` to `stop`. Return `stop`, or the first unfilled row if the split
        ended."""

    def skip(self, until: int, seconds: float, place: SourcePlace | None = None) -> bool:
        """Drop samples, for about `seconds`, until `until` samples were read in all, which is at this place of the
        source (None: it has given one sample for each). Return whether they were."""

    @property
    def helped_seconds(self) -> float:
        """How long its generator has run for other lanes, if it runs for several."""

    def close(self) -> None:
        """End the generator."""


class _Ended:
    """A split without a generator, which yields no more samples."""

    def __init__(self, taken: int, place: SourcePlace | None) -> None:
        self.taken = taken
        self.source_place = place or SourcePlace(taken, 0, 0)

    def read(self, collate: Collate, store: Any, row: int, stop: int) -> int:
        return row

    def skip(self, until: int, seconds: float, place: SourcePlace | None = None) -> bool:
        return True

    helped_seconds = 0.0

    def close(self) -> None:
        pass


class LaneSplits:
    """Reads the splits of one lane.

    Args:
        plan: the feed's options.
        epoch: from 0.
        lane: from 0.
        n_splits: length of the list of splits.
        seats: how many splits are open at once.
        collate: copies samples into stores.
        open_split: starts to read a split; called with its number within the lane and its index in the list.
        on_skip: called when a split is skipped, with its number, its index, the number of samples after which it ends,
            and the error, if there was one.
        to_skip: numbers of splits to stop reading once `skip_asked` is called.
        most_skipped: how many splits may be skipped.

    Raises:
        ProtocolError: `to_skip` is not of this lane.

    Attributes:
        count: splits of the lane.
        next: number of the next split to open.
        done: samples of the splits that were read to their ends.
        dropped: samples of their sources that gave none.
        skipped: for each skipped split, the number of samples after which it ends.
        replaying: whether samples that were consumed before are being read again; then a split that fails is not
            skipped.
    """

    def __init__(
        self,
        plan: FeedPlan,
        *,
        epoch: int,
        lane: int,
        n_splits: int,
        seats: int,
        collate: Collate,
        open_split: Callable[[int, int], Split],
        on_skip: Callable[[int, int, int, GeneratorError | None], None],
        to_skip: Iterable[int],
        most_skipped: int = MAX_SKIPPED,
    ) -> None:
        self._lanes = min(plan.lanes, n_splits)
        self._lane = lane
        self._n_splits = n_splits
        self.count = len(range(lane, n_splits, self._lanes))
        self._segment = plan.segment
        self._piece = plan.piece
        self._endless = plan.endless
        self._empty = 0  # splits in a row that had no sample
        permuted = plan.shuffle and plan.segment is None  # segments differ by their random numbers alone
        self._key = make_key(plan.seed, epoch, "splits") if permuted else None
        self._collate = collate
        self._open_split = open_split
        self._on_skip = on_skip
        self._skips_failing = plan.on_error == "skip"
        self._to_skip = tuple(dict.fromkeys(to_skip))
        if any(number >= self.count for number in self._to_skip):
            raise ProtocolError(f"split {max(self._to_skip)} is to be skipped, but lane {lane} has {self.count}")
        self._most_skipped = most_skipped
        self.replaying = False
        self._seats: list[tuple[int, Split] | None] = [None] * seats
        self.next = 0
        self.done = self.dropped = 0
        self.skipped: dict[int, int] = {}
        self._last_record = self.record(0, 0)

    @property
    def readable(self) -> list[int]:
        """The seats that can still yield samples."""
        return [i for i, seat in enumerate(self._seats) if seat is not None or self.next < self.count]

    def index_of(self, number: int) -> int:
        """Return the index, in the list, of the lane's split with this number."""
        position = self._lane + number * self._lanes
        return position if self._key is None else permute(self._key, self._n_splits, position)

    def record(self, block: int, index: int) -> RestartRecord:
        """Return a record of the splits' positions before batch `index`, with nothing taken from `block`."""
        seats = tuple(None if seat is None else (seat[0], seat[1].taken) for seat in self._seats)
        places: tuple[SourcePlace | None, ...] = ()
        for seat in self._seats:
            if seat is not None and seat[1].source_place != (seat[1].taken, 0, 0):
                places = tuple(None if other is None else other[1].source_place for other in self._seats)
                break
        return RestartRecord(seats, self.next, self.done, block, 0, index, places=places, dropped=self.dropped)

    def first_open(self, record: RestartRecord) -> tuple[int, int] | None:
        """Return the index of the split that is read first after `record`, and how many of its source's samples were
        read before; None if there is none."""
        for seat, place in zip(record.seats, record.places or record.seats, strict=True):
            if seat is not None and place is not None:
                return self.index_of(seat[0]), place.read if isinstance(place, SourcePlace) else seat[1]
        return (self.index_of(record.next), 0) if record.next < self.count else None

    @property
    def helped_seconds(self) -> float:
        """How long the generators of the open splits have run for other lanes, if they run for several."""
        return sum(seat[1].helped_seconds for seat in self._seats if seat is not None)

    @property
    def all_dropped(self) -> int:
        """How many samples of the sources gave none so far."""
        return self.dropped + sum(seat[1].source_place.dropped for seat in self._seats if seat is not None)

    def decode(self, record: bytes, batch_rows: int, block_rows: int) -> RestartRecord:
        """Read a record of this lane; see `restart_record.decode`."""
        return decode(record, seats=len(self._seats), splits=self.count, batch_rows=batch_rows, block_rows=block_rows)

    def begin(self, record: RestartRecord, skipped: dict[int, int]) -> None:
        """Go on from `record`, without opening any split yet. `skipped` becomes the attribute of that name."""
        self.next, self.done, self.dropped, self.skipped = record.next, record.done, record.dropped, skipped
        self._last_record = record

    def set_replaying(self, replaying: bool) -> None:
        """Say whether samples that were consumed before are read again from now on."""
        self.replaying = replaying

    def reopen(self, seat: int, number: int, taken: int, place: SourcePlace | None) -> None:
        """Open split `number` again, after `taken` samples were read before; `replay` then reads these."""
        self._seats[seat] = number, self._open_at_start(number, taken, place)

    def replay(self, seat: int, taken: int, place: SourcePlace | None) -> bool:
        """Read the split in that seat up to sample `taken`, at this place of its source, for one step. Return whether
        it has arrived there."""
        number, split = self._seats[seat]  # type: ignore[misc]  # `reopen` was called
        try:
            return split.skip(taken, STEP_SECONDS, place)
        except GeneratorError as error:
            self._seats[seat] = number, self._left_out(number, taken, place, error)
            split.close()
            return True

    def read(self, seat: int, store: Any, row: int, stop: int) -> int:
        """Fill rows from the split in that seat and, when it ends, from the lane's next ones.

        Returns:
            `stop`, or the first row that was not filled if the lane has no more splits.
        """
        while row < stop:
            taken = self._seats[seat]
            if taken is None:
                if self.next >= self.count:
                    break
                number = self.next
                self.next += 1
                taken = self._seats[seat] = number, self._open_at_start(number)
            row = self._read_split(*taken, store, row, stop)
            # A complete segment need not be read again.
            if row < stop or (self._segment and taken[1].source_place[:2] == (self._segment, 0)):
                self._seats[seat] = None
                self.done += taken[1].taken
                self.dropped += taken[1].source_place.dropped
                taken[1].close()
                self._count_empty(taken[1].taken)
        return row

    def fill_block(
        self, store: Any, position: int, rows: int, step_rows: int
    ) -> Generator[None, None, npt.NDArray[np.int64]]:
        """Fill the first `rows` rows of `store`, in steps, with the lane's samples from `position` on.

        Returns:
            The rows that were filled, in the order of the samples: all of them, or fewer if the lane has no more.
        """
        filled = yield from self.fill(store, 0, rows, step_rows)
        yield
        return np.arange(filled)

    def fill(self, store: Any, row: int, stop: int, step_rows: int) -> Generator[None, None, int]:
        """Fill rows from the open splits in equal runs. When one has ended, and the lane has no further split, the
        others fill its part.

        A step reads `step_rows` samples, the rows of a batch, or more while they come fast.

        Returns:
            `stop`, or the first row that was not filled if the lane has no more splits.
        """
        step = step_rows
        while row < stop:
            seats = self.readable
            if not seats:
                break
            run, longer = divmod(stop - row, len(seats))
            for place, seat in enumerate(seats):
                end = row + run + (place < longer)
                while row < end:
                    until = min(end, row + step)
                    began = time.monotonic()
                    row = self.read(seat, store, row, until)
                    if row < until:
                        break
                    step = 2 * step if time.monotonic() - began < STEP_SECONDS / 4 else step_rows
                    if row < stop:
                        yield
        return row

    def skip_asked(self) -> None:
        """Skip the splits of `to_skip` from their present positions on."""
        taken = {seat[0]: seat[1].taken for seat in self._seats if seat is not None}
        self._skip_all(taken)

    def skip_asked_before(self, record: RestartRecord) -> None:
        """Skip the splits of `to_skip` from their positions in `record` on, before any is opened: opening one may kill
        the worker."""
        self._skip_all({seat[0]: seat[1] for seat in record.seats if seat is not None})

    def advance(self, record: RestartRecord) -> RestartRecord:
        """Note that the batches up to `record` are complete. Return the record with the skipped splits added."""
        if self.skipped:
            self._forget_skipped(record)
            record = msgspec.structs.replace(record, skipped=tuple(self.skipped.items()))
        self._last_record = record
        return record

    def close(self) -> None:
        """End the generators."""
        for number, seat in enumerate(self._seats):
            self._seats[number] = None
            if seat is not None:
                seat[1].close()

    def _forget_skipped(self, record: RestartRecord) -> None:
        """In an endless lane, forget skipped splits that nobody reads again after `record`. Otherwise they would pile
        up. The latest are kept: a consumer that goes on within a slab reads from an earlier record up to this one, and
        has to skip them where they were skipped before."""
        if self._endless:
            seated = {seat[0] for seat in record.seats if seat is not None}
            passed = sorted(n for n in self.skipped if n < record.next and n not in seated)
            for number in passed[: -min(_REMEMBERED, max(1, self._most_skipped // 4))]:
                del self.skipped[number]

    def _skip_all(self, taken: dict[int, int]) -> None:
        for number in self._to_skip:
            if number not in self.skipped and (number in taken or number >= self.next):
                self._skip(number, taken.get(number, 0), None)

    def _read_split(self, number: int, split: Split, store: Any, row: int, stop: int) -> int:
        limit, before = self.skipped.get(number), split.taken
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
                f"was run again: {SAME_AGAIN}"
            )
        return filled

    def _count_empty(self, samples: int) -> None:
        """Fail an endless feed if too many segments in a row end without a sample."""
        self._empty = 0 if samples else self._empty + 1
        if self._endless and self._empty > MAX_EMPTY:
            raise FeedError(
                f"the feed has stopped yielding samples: {self._empty} segments of lane {self._lane} in a row ended "
                "without one; let the generator yield at least one, or raise where it cannot",
                split=f"segment {self.index_of(self.next - 1)}",
            )

    def _open_at_start(self, number: int, taken: int = 0, place: SourcePlace | None = None) -> Split:
        """Open the split with this number at its start. Return an ended one if it ends after the `taken` samples read
        before."""
        if self.skipped.get(number) == taken:
            return _Ended(taken, place)
        try:
            return self._open_split(number, self.index_of(number))
        except GeneratorError as error:
            return self._left_out(number, taken, place, error)

    def _left_out(self, number: int, taken: int, place: SourcePlace | None, error: GeneratorError) -> Split:
        """Return an ended split for one that cannot be read, or raise `error` if it may not be skipped."""
        if not self._may_skip or number in self.skipped:
            raise error
        self._skip(number, taken, error)
        return _Ended(taken, place)

    @property
    def _may_skip(self) -> bool:
        """Whether a split that fails is skipped. Samples that were consumed are read again as they were, or not at
        all."""
        return self._skips_failing and not self.replaying

    def _skip(self, number: int, samples: int, error: GeneratorError | None) -> None:
        """Let a split end after `samples` samples, here and wherever this lane is read again."""
        if len(self.skipped) >= self._most_skipped:
            self._forget_skipped(self._last_record)
        if len(self.skipped) >= self._most_skipped:
            raise FeedError(
                f"too many {self._piece}s were skipped: {self._most_skipped} of lane {self._lane}"
                f"{'' if self._endless else f', which has {self.count}'}. The log says what is wrong with them",
                split=None if error is None else error.split,
                remote_traceback=None if error is None else error.remote_traceback,
            ) from error
        self.skipped[number] = samples
        self._on_skip(number, self.index_of(number), samples, error)
