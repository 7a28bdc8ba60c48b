"""The position of a stream's front: where a job begins that joins between two batches, as if it had loaded a state.

As in a client's own state, messages between two batches belong to the second one: it is the position right after the
first. No I/O.
"""

from __future__ import annotations

from typing import TypeAlias

from penstock_proto.batches.cursor import Cursor
from penstock_proto.batches.layout import POOL_LANE
from penstock_proto.batches.position import Position
from penstock_proto.messages import FeedInfo, LaneEnded, PoolBegun, SentElsewhere

Before: TypeAlias = SentElsewhere | LaneEnded | PoolBegun
"""What a consumer may have to be told before its first batch."""


class FrontPlace:
    """Adds up where the front is, from what the stream delivers and passes over.

    Args:
        info: the stream's feed.
        position: where the stream begins; None: at epoch 0.
    """

    def __init__(self, info: FeedInfo, position: Position | None) -> None:
        self._info = info
        self._cursor = Cursor(position or Position(info, 0))
        self._before: list[Before] = []
        """What came since the latest batch that was delivered."""
        self._pool: list[Before] = []
        """The pool that was begun and not delivered whole, and its batches so far: the position is its start."""

    @property
    def told_first(self) -> tuple[Before, ...]:
        """What a consumer that begins at `position` has to be told before the next batch."""
        return (*self._pool, *self._before)

    def position(self, digest: bytes) -> Position:
        """Return the position, in an epoch whose splits have this digest."""
        self._cursor.digest = digest
        return self._cursor.position(self._info)

    def on_delivered(self, batches: SentElsewhere) -> None:
        """Move past batches that were delivered."""
        cursor = self._cursor
        if not (self._before or cursor.pools or cursor.skip) and batches.epoch == cursor.epoch:  # most often
            cursor.read(batches)
            return
        self._begin(batches.epoch)
        for message in (*self._before, batches):
            self._move(message)
        self._before.clear()

    def on_message(self, message: Before) -> None:
        """Note what consumers are told before the next batch. `SentElsewhere`: batches that are passed over, because
        they lie within the `skip` of the position at which the stream began."""
        self._begin(message.epoch)
        self._before.append(message)

    def _begin(self, epoch: int) -> None:
        if epoch > self._cursor.epoch:
            self._cursor.begin(epoch)
            self._before.clear()
            self._pool.clear()

    def _move(self, message: Before) -> None:
        cursor = self._cursor
        if isinstance(message, LaneEnded):
            cursor.end(message)
            return
        if isinstance(message, PoolBegun):
            cursor.begin_pool(message)
        else:
            if not cursor.pools:
                cursor.skip -= min(cursor.skip, message.batches)
            cursor.read(message)
        if isinstance(message, PoolBegun) or message.lane == POOL_LANE:
            self._pool.append(message)
        if not cursor.pools:
            self._pool.clear()
