"""Restart records: the position of a lane after its last full batch, in a form from which any worker can go on.

A record adds up: as many samples were read, by its own numbers, as the batches before it hold. It comes back through a
trainer's checkpoint, so everything in it is checked.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock_proto import ProtocolError
from penstock_proto.batches import arrays
from penstock_proto.messages import Count, Progress

MAX_SKIPPED = 1024
"""How many splits of a lane may be skipped. They stay in its record."""

SAME_AGAIN = "a stream can continue elsewhere only if a split always yields the same samples"
"""The end of an error message about samples that differ when they are read again."""


OTHER_LANE = "the restart record was made with other splits or other options of the feed"


class SourcePlace(NamedTuple):
    """A place in what the source of a split yields, where transforms make more or less than one sample of each.

    Attributes:
        read: samples of the source that are used up.
        within: samples taken of those that transforms made of the next one.
        dropped: how many of the samples that were read gave none.
    """

    read: Progress
    within: Progress
    dropped: Progress


class RestartRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The position of a lane. With shuffling, `seats`, `next` and `done` are those at the start of the block.

    Attributes:
        seats: for each open split, its number within the lane and the number of samples taken from it; None for an
            empty seat.
        next: number of the lane's next split.
        done: samples of the splits that were read to their ends.
        block: number of the shuffle block.
        made: the number of batches taken from the block.
        index: number of the lane's next batch.
        skipped: for each split that was or will be cut short, its number within the lane, and the number of samples
            after which it ends.
        closed: if any batch was taken from the block, the value of `done` when the block was full.
        places: for each seat, the place in its source. Empty if all sources have given one sample for each.
        dropped: how many samples the sources of splits that were read to their ends have yielded that gave none.
    """

    seats: tuple[tuple[Count, Progress] | None, ...]
    next: Count
    done: Progress
    block: Progress
    made: Progress
    index: Progress
    skipped: Annotated[tuple[tuple[Count, Progress], ...], Meta(max_length=MAX_SKIPPED)] = ()
    closed: Progress = 0
    places: tuple[SourcePlace | None, ...] = ()
    dropped: Progress = 0

    @property
    def taken(self) -> int:
        """The number of samples that were read before the record, or before its block."""
        return self.done + self.open_samples

    @property
    def open_samples(self) -> int:
        """The number of samples that were read from the open splits before the record, or before its block."""
        return sum(seat[1] for seat in self.seats if seat is not None)

    def place(self, seat: int) -> SourcePlace | None:
        """Return the place in the source of the split in that seat. None: one sample was taken for each."""
        return self.places[seat] if self.places else None

    @property
    def all_places(self) -> tuple[SourcePlace | None, ...]:
        """The place of each seat."""
        return self.places or tuple(None if seat is None else SourcePlace(seat[1], 0, 0) for seat in self.seats)

    @property
    def all_dropped(self) -> int:
        """How many samples of the sources gave none before the record, or before its block."""
        return self.dropped + sum(place.dropped for place in self.places if place is not None)

    def adds_up(self, batch_rows: int, block_rows: int) -> bool:
        """Whether as many samples were read before the record as the batches before it hold."""
        if block_rows:
            return self.taken == self.block * block_rows == (self.index - self.made) * batch_rows
        return self.taken == self.index * batch_rows

    def ends_of_skipped(self, ahead: RestartRecord | None) -> dict[int, int]:
        """Return the skipped splits of this record and of the later record `ahead`, each with the number of samples
        after which it ends.

        Raises:
            ProtocolError: a split was read beyond its end.
        """
        skipped = {**dict(ahead.skipped if ahead is not None else ()), **dict(self.skipped)}
        if any(seat is not None and seat[1] > skipped.get(seat[0], seat[1]) for seat in self.seats):
            raise ProtocolError("the splits of a restart record were read beyond their ends")
        return skipped

    def where(self, piece: str) -> str:
        """Describe the position, for example "20 samples into split 3"."""
        seats = [f"{seat[1]} samples into {piece} {seat[0]}" for seat in self.seats if seat is not None]
        return " and ".join(seats) or f"before {piece} {self.next}"

    def encode(self) -> bytes:
        """Return the record as bytes, for `decode`."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("places", "dropped"):
            if not fields[name]:
                del fields[name]  # so the records of other feeds stay as they are
        return arrays.pack(fields)


Record = TypeVar("Record", bound=RestartRecord)


def decode(data: bytes, *, seats: int, splits: int, batch_rows: int, block_rows: int) -> RestartRecord:
    """Read a record of a lane.

    Args:
        data: what `RestartRecord.encode` returned.
        seats: how many splits the lane has open at once.
        splits: how many splits the lane has.
        batch_rows: samples in a batch.
        block_rows: samples in a shuffle block; 0 without shuffling.

    Raises:
        ProtocolError: it is malformed, or not of this lane.
    """
    record = parse(data, RestartRecord)
    check_splits(record, seats=seats, splits=splits)
    check_counts(record, batch_rows, block_rows)
    return record


def parse(data: bytes, kind: type[Record]) -> Record:
    """Read a record of this kind.

    Raises:
        ProtocolError: it is malformed.
    """
    try:
        return msgspec.convert(arrays.unpack(data), type=kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a malformed restart record: {error}") from None


def check_splits(record: RestartRecord, *, seats: int, splits: int) -> None:
    """Check the splits of a record; see `decode`."""
    numbers = [seat[0] for seat in record.seats if seat is not None]
    skipped = dict(record.skipped)
    if (
        len(record.seats) != seats
        or len(set(numbers)) != len(numbers)
        or len(skipped) != len(record.skipped)
        or any(number >= splits for number in skipped)
        or any(number >= record.next for number in numbers)
        or (record.places and [one is None for one in record.places] != [seat is None for seat in record.seats])
        or record.next > splits
    ):
        raise ProtocolError(OTHER_LANE)


def check_counts(record: RestartRecord, batch_rows: int, block_rows: int) -> None:
    """Check the numbers of samples and batches of a record; see `decode`."""
    if record.made and record.made * batch_rows >= block_rows:
        raise ProtocolError(OTHER_LANE)
    if not record.adds_up(batch_rows, block_rows):
        raise ProtocolError(
            f"the restart record does not add up: it has {record.taken} samples before batch {record.index}"
        )
