"""Reads groups from the tables of a state file (statefile.py), and checks their values as strictly as a peer's."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock_proto.batches.position import Position
from penstock_proto.messages import FeedInfo, Had

from ..coordinator.model.group_log import SavedGroup
from .untrusted_database import UntrustedDatabase

MOST_ROWS = 1 << 20
"""Maximum number of rows of all groups together: one for each lane that has begun, for each consumer, and for each run
of batches that was handed over out of order."""

_GROUP = Annotated[str, Meta(min_length=1, max_length=128)]
_CONSUMER = Annotated[bytes, Meta(max_length=16)]


class GroupReader:
    """Reads one group after another, and bounds the rows of all of them together."""

    def __init__(self, database: UntrustedDatabase) -> None:
        self._database = database
        self._rows_left = MOST_ROWS
        """How many rows may still be read."""

    def begin(self) -> None:
        """Begin to count the rows that are read."""
        self._rows_left = MOST_ROWS

    def read(self, feed: str, group: str, number: int) -> SavedGroup:
        """Read the group with this number.

        Raises:
            sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError: it is damaged.
        """
        found = self._group(number)
        msgspec.convert(group, _GROUP)
        if found.position.feed.name != feed:
            raise ValueError(f"its feed is called {found.position.feed.name!r}")
        return found

    def _group(self, number: int) -> SavedGroup:
        ((info, epoch, batches, rows, digest, merged),) = self._database.do(
            "SELECT info, epoch, batches, rows, digest, merged FROM groups WHERE id = ?", number
        )
        ended = self._rows("SELECT lane, idx, leftover, record, number FROM ended WHERE id = ? ORDER BY number", number)
        position = msgspec.convert(
            {
                "feed": msgspec.to_builtins(msgspec.msgpack.decode(info, type=FeedInfo)),
                "epoch": epoch,
                "batches": batches,
                "rows": rows,
                "digest": digest,
                "places": self._rows("SELECT lane, idx, record FROM places WHERE id = ? ORDER BY lane", number),
                "ended": [lane for *lane, _ in ended],
                "merged": merged,
            },
            Position,
        )
        beyond = self._beyond(number, position)
        consumers = self._rows("SELECT consumer FROM consumers WHERE id = ?", number)
        lanes = [place.lane for place in position.places] + [lane.lane for lane in position.ended]
        most = position.feed.lanes
        if len(position.digest) not in (0, 32):
            raise ValueError(f"a SHA-256 of {len(position.digest)} bytes")
        if [count for *_, count in ended] != list(range(len(ended))):
            raise ValueError("its lanes ended in no order")
        if len(set(lanes)) < len(lanes) or max([*lanes, *(lane for lane, *_ in beyond)], default=0) >= most:
            raise ValueError(f"a lane occurs twice, or is not one of {most}")
        return SavedGroup(
            position,
            beyond,
            frozenset(msgspec.convert([consumer for (consumer,) in consumers], list[_CONSUMER])),
        )

    def _beyond(self, number: int, position: Position) -> tuple[tuple[int, int, int], ...]:
        """Return the batches that were handed over beyond a position, as runs. One consumer that stops for hours leaves
        a row for each later slab of the others, but only few runs."""
        runs: list[tuple[int, int, int]] = []
        for row in self._database.each("SELECT lane, idx, batches FROM ahead WHERE id = ? ORDER BY lane, idx", number):
            had = msgspec.convert((position.epoch, *row), Had)
            if had.batches > position.feed.turn:
                raise ValueError(f"more batches at once than the {position.feed.turn} of a turn")
            if runs and runs[-1][0] == had.lane and sum(runs[-1][1:]) == had.index:
                _, index, batches = runs.pop()
                runs.append((had.lane, index, batches + had.batches))
                continue
            runs.append((had.lane, had.index, had.batches))
            if len(runs) > self._rows_left:
                raise ValueError(f"more than {MOST_ROWS} rows")
        self._rows_left -= len(runs)
        return tuple(runs)

    def _rows(self, statement: str, number: int) -> list[tuple[Any, ...]]:
        """Return the rows of a group in one table. All groups together have at most `MOST_ROWS`."""
        rows = self._database.rows(self._rows_left, statement, number)
        self._rows_left -= len(rows)
        return rows
