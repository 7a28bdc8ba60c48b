"""The splits of a lane of a mix: those of each component, and the draws that say which component a sample is from.

The draw for a sample depends on the seed, the epoch, the lane and the sample's number, but not on earlier draws. So a
restart record needs no state of the draws. Samples are read in blocks: first all draws of a block are made, then each
component fills its rows, and then the rows are put in the order of the draws. So each component is asked for many
samples at once.

A component turns out to have no more samples when it cannot fill its rows. With stop="first" the lane ends at the first
draw that cannot be filled. With stop="all" all draws that cannot be filled are made again, without the components that
have no more samples. So no component is ever asked for a sample that the block does not take.

In records and messages, split n of component k of K has the number n * K + k, and the seats of all components follow
one another.

User code runs only through the components' `LaneSplits`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_proto import ProtocolError
from penstock_proto.messages import Count, Progress

from ...shuffling.permutation import make_key, uniform
from .lane_splits import STEP_SECONDS, LaneSplits
from .restart_record import OTHER_LANE, RestartRecord, SourcePlace, check_counts, check_splits, parse

_AHEAD = 4096
"""How many draws are made at once. Made one by one, each would take 20 us."""


class MixedRecord(RestartRecord, frozen=True, forbid_unknown_fields=True):
    """The position of a lane of a mix. `next` and `done` are sums over the components.

    Attributes:
        parts: `next` and `done` of each component.
    """

    parts: tuple[tuple[Count, Progress], ...] = ()

    def where(self, piece: str) -> str:
        """Describe the position, for example "20 samples into split 3 of component 0"."""
        count = len(self.parts)
        taken = [(seat[1], *divmod(seat[0], count)) for seat in self.seats if seat is not None]
        places = [f"{samples} samples into {piece} {number} of component {part}" for samples, number, part in taken]
        return " and ".join(places) or f"after {self.done} samples"


class Draws:
    """Draws the component of each sample of a lane.

    Args:
        weights: one for each component.
        seed, epoch, lane: determine the draws.
    """

    def __init__(self, weights: Sequence[float], seed: int, epoch: int, lane: int) -> None:
        self._weights = np.array(weights, np.float64)
        self._key = (seed, epoch, "mix", lane)
        self._first: tuple[int, npt.NDArray[np.int64]] = 0, np.empty(0, np.int64)

    def first(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Draw a component for samples `start` to `start + count` of the lane, for the first time and from all
        components."""
        known, drawn = self._first
        if start < known or start + count > known + len(drawn):
            known, drawn = start, self.at(np.arange(start, start + max(count, _AHEAD)), (), 0)
            self._first = known, drawn
        return drawn[start - known : start - known + count]

    def at(self, positions: npt.NDArray[np.int64], left_out: Collection[int], again: int) -> npt.NDArray[np.int64]:
        """Draw a component for samples of the lane.

        Args:
            positions: the samples' numbers.
            left_out: components that must not be drawn; not all of them.
            again: how often a component was drawn for these samples before.

        Returns:
            The number of the component of each sample.
        """
        weights = self._weights.copy()
        weights[list(left_out)] = 0
        borders = np.cumsum(weights)
        borders /= borders[-1]
        drawn = uniform(make_key(*self._key, again), positions)
        return np.searchsorted(borders, drawn, side="right").astype(np.int64)


@dataclass
class _Block:
    """A block that is being filled.

    Attributes:
        store: the store that is being filled.
        step_rows: samples that a step reads, as in `LaneSplits.fill`.
        filled: for each component, the rows that it has filled, in the order of its samples.
        rows: how many rows are filled in all.
    """

    store: Any
    step_rows: int
    filled: list[list[npt.NDArray[np.int64]]]
    rows: int = 0


class MixedSplits:
    """Reads the splits of one lane of a mix. Has the methods of `LaneSplits` that `LaneRun` needs; see there.

    Args:
        parts: the splits of each component, with `seats` seats each.
        draws: decides which component is next.
        seats: how many seats each component has.
        stop_first: whether the lane ends when a drawn component has no more samples.
    """

    def __init__(self, parts: Sequence[LaneSplits], draws: Draws, *, seats: int, stop_first: bool) -> None:
        self._parts = parts
        self._draws = draws
        self._seats = seats
        self._stop_first = stop_first

    @property
    def done(self) -> int:
        """Samples of the splits that were read to their ends."""
        return sum(part.done for part in self._parts)

    @property
    def all_dropped(self) -> int:
        """How many samples of the sources gave none so far."""
        return sum(part.all_dropped for part in self._parts)

    @property
    def replaying(self) -> bool:
        """Whether samples that were consumed before are being read again."""
        return self._parts[0].replaying

    @property
    def skipped(self) -> dict[int, int]:
        """For each skipped split, the number of samples after which it ends."""
        count = len(self._parts)
        return {n * count + k: end for k, part in enumerate(self._parts) for n, end in part.skipped.items()}

    def record(self, block: int, index: int) -> MixedRecord:
        """Return a record of the splits' positions before batch `index`, with nothing taken from `block`."""
        records, count = [part.record(block, index) for part in self._parts], len(self._parts)
        places: tuple[SourcePlace | None, ...] = ()
        if any(record.places for record in records):
            places = tuple(place for record in records for place in record.all_places)
        return MixedRecord(
            seats=tuple(
                None if seat is None else (seat[0] * count + k, seat[1])
                for k, record in enumerate(records)
                for seat in record.seats
            ),
            next=sum(record.next for record in records),
            done=sum(record.done for record in records),
            block=block,
            made=0,
            index=index,
            parts=tuple((record.next, record.done) for record in records),
            places=places,
            dropped=sum(record.dropped for record in records),
        )

    def decode(self, record: bytes, batch_rows: int, block_rows: int) -> MixedRecord:
        """Read a record of this lane.

        Raises:
            ProtocolError: it is malformed, or not of this lane.
        """
        found, count = parse(record, MixedRecord), len(self._parts)
        owners = [seat and seat[0] % count for seat in found.seats]
        if (
            len(found.parts) != count
            or len(found.seats) != count * self._seats
            or len(found.places) not in (0, len(found.seats))
            or any(owner not in (None, i // self._seats) for i, owner in enumerate(owners))
            or len(dict(found.skipped)) != len(found.skipped)
            or found.next != sum(part[0] for part in found.parts)
            or found.done != sum(part[1] for part in found.parts)
        ):
            raise ProtocolError(OTHER_LANE)
        for k, part in enumerate(self._parts):
            check_splits(self._of_part(found, k), seats=self._seats, splits=part.count)
        check_counts(found, batch_rows, block_rows)
        return found

    def begin(self, record: RestartRecord, skipped: Mapping[int, int]) -> None:
        """Go on from `record`, without opening any split yet. `skipped` becomes the attribute of that name."""
        count = len(self._parts)
        for k, part in enumerate(self._parts):
            ends = {number // count: end for number, end in skipped.items() if number % count == k}
            part.begin(self._of_part(record, k), ends)

    def set_replaying(self, replaying: bool) -> None:
        """Say whether samples that were consumed before are read again from now on."""
        for part in self._parts:
            part.set_replaying(replaying)

    def reopen(self, seat: int, number: int, taken: int, place: SourcePlace | None) -> None:
        """Open split `number` again; see `LaneSplits`."""
        self._parts[seat // self._seats].reopen(seat % self._seats, number // len(self._parts), taken, place)

    def replay(self, seat: int, taken: int, place: SourcePlace | None) -> bool:
        """Read the split in that seat up to sample `taken`, for one step; see `LaneSplits`."""
        return self._parts[seat // self._seats].replay(seat % self._seats, taken, place)

    def fill_block(
        self, store: Any, position: int, rows: int, step_rows: int
    ) -> Generator[None, None, npt.NDArray[np.int64]]:
        """Fill rows of `store`, in steps, with the lane's samples from `position` on.

        Returns:
            The rows in the order of the draws: `rows` of them, or fewer if the lane ends.
        """
        choices = self._draws.first(position, rows)
        block = _Block(store, step_rows, [[] for _ in self._parts])
        short = yield from self._fill(block, np.bincount(choices, minlength=len(self._parts)).tolist())
        if not short:
            return _in_groups(choices)
        owners = np.full(rows, -1, np.int64)
        drawn, again, ended = np.arange(rows), 0, set(short)
        while True:
            missing = []
            for k in range(len(self._parts)):
                wanted = drawn[choices == k]
                got = len(wanted) - short.get(k, 0)
                owners[wanted[:got]] = k
                missing.append(wanted[got:])
            if self._stop_first:
                owners = owners[: min(int(places[0]) for places in missing if places.size)]
                break
            drawn, again = np.sort(np.concatenate(missing)), again + 1
            if not drawn.size or len(ended) == len(self._parts):
                break
            choices = self._draws.at(position + drawn, ended, again)
            short = yield from self._fill(block, np.bincount(choices, minlength=len(self._parts)).tolist())
            ended |= short.keys()
        return _in_order(owners[owners >= 0], block.filled)

    def skip_asked(self) -> None:
        """Skip the splits of `to_skip` from their present positions on."""
        for part in self._parts:
            part.skip_asked()

    def skip_asked_before(self, record: RestartRecord) -> None:
        """Skip the splits of `to_skip` from their positions in `record` on, before any is opened."""
        for k, part in enumerate(self._parts):
            part.skip_asked_before(self._of_part(record, k))

    def advance(self, record: RestartRecord) -> RestartRecord:
        """Note that the batches up to `record` are complete. Return the record with the skipped splits added."""
        for k, part in enumerate(self._parts):
            if part.skipped:
                part.advance(self._of_part(record, k))
        skipped = self.skipped
        return msgspec.structs.replace(record, skipped=tuple(skipped.items())) if skipped else record

    @property
    def helped_seconds(self) -> float:
        """As in `LaneSplits`."""
        return sum(part.helped_seconds for part in self._parts)

    def close(self) -> None:
        """End the generators."""
        for part in self._parts:
            part.close()

    def _fill(self, block: _Block, counts: Sequence[int]) -> Generator[None, None, dict[int, int]]:
        """Read `counts[k]` samples of each component `k` into the next rows of a block.

        Returns:
            For each component that had fewer samples, the number of missing ones.
        """
        short = {}
        began = time.monotonic()
        for k, (part, count) in enumerate(zip(self._parts, counts, strict=True)):
            if not count:
                continue
            until = yield from part.fill(block.store, block.rows, block.rows + count, block.step_rows)
            if missing := block.rows + count - until:
                short[k] = missing
            block.filled[k].append(np.arange(block.rows, until))
            block.rows = until
            if time.monotonic() - began > STEP_SECONDS / 4:
                yield
                began = time.monotonic()
        return short

    def _of_part(self, record: RestartRecord, k: int) -> RestartRecord:
        """Return the record of component `k`, in which splits have the component's own numbers."""
        assert isinstance(record, MixedRecord)
        count, (following, done) = len(self._parts), record.parts[k]
        return RestartRecord(
            seats=tuple(
                None if seat is None else (seat[0] // count, seat[1])
                for seat in record.seats[k * self._seats : (k + 1) * self._seats]
            ),
            next=following,
            done=done,
            block=record.block,
            made=record.made,
            index=record.index,
            skipped=tuple((number // count, end) for number, end in record.skipped if number % count == k),
            places=record.places[k * self._seats : (k + 1) * self._seats],
            dropped=0 if k else record.dropped,  # only the sum over the components is kept
        )


def _in_groups(choices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the row of each sample, if each component has filled all of its rows at once."""
    order = np.empty(len(choices), np.int64)
    order[np.argsort(choices, kind="stable")] = np.arange(len(choices))
    return order


def _in_order(
    owners: npt.NDArray[np.int64], filled: Sequence[Sequence[npt.NDArray[np.int64]]]
) -> npt.NDArray[np.int64]:
    """Return the row of each sample. `owners` has the components of the samples. Samples of a component keep their
    order."""
    order = np.empty(len(owners), np.int64)
    for k, ranges in enumerate(filled):
        places = np.flatnonzero(owners == k)
        if places.size:
            order[places] = np.concatenate(ranges)[: len(places)]
    return order
