"""A consumer's place in a stream: enough to continue after any batch, with other workers or in another daemon.

A consumer can add up a position on its own: the last restart record of each lane, which lanes have ended with how many
rows left over, and counts. A client sends it when it comes back after a cut or to another daemon, and a checkpoint
holds it (with `skip`, as a training loop may be within a slab). The daemon trusts nothing in it: it decodes a position
strictly, and the worker that gets a record checks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..errors import ProtocolError
from ..messages import Epoch, FeedInfo, Index, Progress, Record

MAX_POSITION = 8 * 1024 * 1024
"""Most bytes of an encoded position."""

MAX_LANES = 2**16

MAX_SKIP = 512
"""Most batches that a position may skip, in addition to those of one slab."""

MAX_SKIP_FAST = 2**20
"""The same in fast order, where a consumer that resumes within a slab again and again skips more each time."""


class Place(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The progress of a lane: `index` batches were read, and `record` is the restart record after the last of them or
    an earlier one. A run that continues here passes over the batches in between.

    `ahead`: if some of the lane's batches lie within the position's `skip`, a later restart record of the lane, after
    these batches or further on. A run that continues here passes that record, and so finds out whether the batches are
    the same again. (`index` may be 0, and `record` empty: the lane's start.)
    """

    lane: Index
    index: Progress
    record: Record
    ahead: Record = b""


class EndedLane(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A lane that has ended with `index` full batches and `leftover` rows.

    `record` is the restart record from which a worker gets those rows, or empty if all of them were read already.
    """

    lane: Index
    index: Progress
    leftover: Annotated[int, Meta(ge=0, le=2**31)]
    record: Record = b""


class Position(Struct, frozen=True, forbid_unknown_fields=True):
    """A place between two batches of a stream of the feed `feed`.

    `batches` and `rows` of epoch `epoch` come before it; of these, `merged` batches were merged from leftovers.
    `places`: the lanes that have begun and not ended; none for an indexable feed. `ended`: the lanes that have ended,
    in the order in which their leftovers count. `digest`: the SHA-256 of the epoch's list of splits, or empty if
    nothing of it was read. `skip` batches after all of these were read too: the daemon makes them again and drops them.
    They lie within one slab or one pool, or are few: in exact order at most `MAX_SKIP` more than a slab or a pool can
    hold.
    """

    feed: FeedInfo
    epoch: Epoch
    batches: Progress = 0
    rows: Progress = 0
    digest: Annotated[bytes, Meta(max_length=32)] = b""
    places: Annotated[tuple[Place, ...], Meta(max_length=MAX_LANES)] = ()
    ended: Annotated[tuple[EndedLane, ...], Meta(max_length=MAX_LANES)] = ()
    merged: Progress = 0
    skip: Progress = 0

    def __post_init__(self) -> None:
        most = self.feed.most * self.feed.pool + (MAX_SKIP if self.feed.order == "exact" else MAX_SKIP_FAST)
        if self.skip > most:
            raise ValueError(
                f"it passes over {self.skip} batches, but a consumer of this feed passes over at most {most}"
            )


def differences(was: FeedInfo, now: FeedInfo) -> Iterator[str]:
    """Yield a text for each property that determines the stream and differs between two feeds, with both values."""
    for field in _DECIDING:
        before, after = getattr(was, field), getattr(now, field)
        if before != after:
            yield f"{field} was {before} and is {after} now"


_DECIDING = (
    "name",
    "spec",
    "seed",
    "batch_size",
    "turn",
    "lanes",
    "order",
    "shuffle",
    "interleave",
    "pool",
    "drop_remainder",
    "samples",
    "segment",
    "params",
)
"""(`stripe` is not among them.)"""

_decoder = msgspec.msgpack.Decoder(Position)


def pack(position: Position) -> bytes:
    """Encode `position`.

    Raises:
        ProtocolError: it takes more than `MAX_POSITION` bytes.
    """
    data = msgspec.msgpack.encode(position)
    if len(data) > MAX_POSITION:
        raise ProtocolError(f"a position of {len(data)} bytes; at most {MAX_POSITION} are sent")
    return data


def unpack(data: bytes | bytearray) -> Position:
    """Decode a position.

    Raises:
        ProtocolError: `data` is not a position, or is too large.
    """
    if len(data) > MAX_POSITION:
        raise ProtocolError(f"a position of {len(data)} bytes; at most {MAX_POSITION} are read")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a malformed position: {error}") from None
