"""The state file of a daemon: the positions of its groups, in SQLite, so that the next daemon continues them.

Each `SaveGroup` is one transaction, which is written when `keep` returns. So a daemon that is killed at any moment
loses nothing that it has written. After a power failure the file is consistent, but may be slightly out of date,
because SQLite does not wait for the disk each time.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock_proto import DaemonStopped, StartError
from penstock_proto.messages import FeedInfo, Had
from penstock_proto.position import Position

from .coordinator import commands as do
from .coordinator.group_log import SavedGroup

APPLICATION = 0x50454E53
"""SQLite's application_id of our files."""
SCHEMA = 3
"""The version of the tables, and of the order of streams, because a changed order changes the meaning of a position."""
PATIENCE = 5.0
"""Seconds to wait while another daemon, which may be about to stop, has the file."""

_TABLES = """
    CREATE TABLE groups (
        id INTEGER PRIMARY KEY, feed TEXT, name TEXT, info BLOB,
        epoch INTEGER, batches INTEGER, rows INTEGER, digest BLOB, merged INTEGER
    );
    CREATE TABLE places (id INTEGER, lane INTEGER, idx INTEGER, record BLOB, PRIMARY KEY (id, lane)) WITHOUT ROWID;
    CREATE TABLE ended (
        id INTEGER, lane INTEGER, number INTEGER, idx INTEGER, leftover INTEGER, record BLOB, PRIMARY KEY (id, lane)
    ) WITHOUT ROWID;
    CREATE TABLE ahead (id INTEGER, lane INTEGER, idx INTEGER, batches INTEGER, PRIMARY KEY (id, lane, idx))
        WITHOUT ROWID;
    CREATE TABLE consumers (id INTEGER, consumer BLOB, PRIMARY KEY (id, consumer)) WITHOUT ROWID;
"""
_GROUP = Annotated[str, Meta(min_length=1, max_length=128)]
_CONSUMER = Annotated[bytes, Meta(max_length=16)]
_OF_EPOCH = ("places", "ended", "ahead")


class StateFile:
    """An open state file, which no other process can open at the same time.

    Attributes:
        to_forget: groups that must be deleted, but could not be deleted yet.

    Raises:
        StartError: it cannot be opened, is not a state file, or another daemon has it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.to_forget: set[tuple[str, str]] = set()
        self._groups: dict[tuple[str, str], int] = {}
        self._file: sqlite3.Connection | None = None
        try:
            self._file = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
            self._open()
        except (sqlite3.Error, StartError) as error:
            self.close()
            if isinstance(error, StartError):
                raise
            raise StartError(f"--state {path}: {self._why(error)}") from None

    def _open(self) -> None:
        self._do("PRAGMA locking_mode = EXCLUSIVE")
        self._do("PRAGMA journal_mode = WAL")
        self._do("PRAGMA synchronous = NORMAL")
        self._do("BEGIN IMMEDIATE")  # this locks the file until it is closed
        ((application,),) = self._do("PRAGMA application_id")
        ((schema,),) = self._do("PRAGMA user_version")
        ((tables,),) = self._do("SELECT count(*) FROM sqlite_master")
        if not (application or schema or tables):
            for statement in _TABLES.split(";"):
                self._do(statement)
            self._do(f"PRAGMA application_id = {APPLICATION}")
            self._do(f"PRAGMA user_version = {SCHEMA}")
        elif application != APPLICATION:
            raise StartError(f"--state {self.path}: this database belongs to another program: give another path")
        elif schema != SCHEMA:
            raise StartError(
                f"--state {self.path}: the file has version {schema}, and this Penstock writes version {SCHEMA}: give "
                "another path, and groups begin from the start, or use the Penstock that wrote it"
            )
        self._do("COMMIT")

    def load(self) -> dict[tuple[str, str], SavedGroup]:
        """Read all groups, by feed and group name.

        Raises:
            StartError: the file is damaged.
        """
        try:
            self._groups = {
                (feed, name): number for number, feed, name in self._do("SELECT id, feed, name FROM groups")
            }
        except (sqlite3.Error, TypeError, ValueError) as error:
            raise self._damaged("", error) from None
        return {(feed, name): self._read(feed, name, number) for (feed, name), number in self._groups.items()}

    def kept(self, feed: str, group: str) -> SavedGroup | None:
        """Read one group, or return None if the file does not have it.

        Raises:
            StartError: the file is damaged, or cannot be read.
        """
        number = self._groups.get((feed, group))
        return None if number is None or (feed, group) in self.to_forget else self._read(feed, group, number)

    def _read(self, feed: str, group: str, number: int) -> SavedGroup:
        """Read a group, and check its values as strictly as a peer's."""
        try:
            kept = self._kept(number)
            msgspec.convert(group, _GROUP)
            if kept.position.feed.name != feed:
                raise ValueError(f"its feed is called {kept.position.feed.name!r}")
            return kept
        except (sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise self._damaged(f" of group {group!r} of feed {feed!r}", error) from None

    def _kept(self, number: int) -> SavedGroup:
        ((info, epoch, batches, rows, digest, merged),) = self._do(
            "SELECT info, epoch, batches, rows, digest, merged FROM groups WHERE id = ?", number
        )
        ended = self._do("SELECT lane, idx, leftover, record, number FROM ended WHERE id = ? ORDER BY number", number)
        position = msgspec.convert(
            {
                "feed": msgspec.to_builtins(msgspec.msgpack.decode(info, type=FeedInfo)),
                "epoch": epoch,
                "batches": batches,
                "rows": rows,
                "digest": digest,
                "places": self._do("SELECT lane, idx, record FROM places WHERE id = ? ORDER BY lane", number),
                "ended": [lane for *lane, _ in ended],
                "merged": merged,
            },
            Position,
        )
        ahead = self._do("SELECT lane, idx, batches FROM ahead WHERE id = ?", number)
        had = msgspec.convert([(epoch, *batches) for batches in ahead], list[Had])
        consumers = self._do("SELECT consumer FROM consumers WHERE id = ?", number)
        lanes = [place.lane for place in position.places] + [lane.lane for lane in position.ended]
        most = position.feed.lanes
        if len(position.digest) not in (0, 32):
            raise ValueError(f"a SHA-256 of {len(position.digest)} bytes")
        if [count for *_, count in ended] != list(range(len(ended))):
            raise ValueError("its lanes ended in no order")
        if len(set(lanes)) < len(lanes) or max([*lanes, *(one.lane for one in had)], default=0) >= most:
            raise ValueError(f"a lane occurs twice, or is not one of {most}")
        if any(one.batches > position.feed.turn for one in had):
            raise ValueError(f"more batches at once than the {position.feed.turn} of a turn")
        return SavedGroup(
            position,
            tuple((one.lane, one.index, one.batches) for one in had),
            frozenset(msgspec.convert([consumer for (consumer,) in consumers], list[_CONSUMER])),
        )

    def _damaged(self, what: str, error: Exception) -> StartError:
        return StartError(
            f"--state {self.path}: the content of the file{what} is damaged ({error}). Restore a copy of it, or delete "
            "it with its -wal file: its groups then begin from the start"
        )

    def keep(self, keep: do.SaveGroup) -> None:
        """Write the changes of a group.

        Raises:
            DaemonStopped: writing failed, and nothing was written.
        """
        key = keep.feed.name, keep.group
        with self._transaction():
            if key in self.to_forget:
                self._delete(self._groups.get(key))
                number = None
            else:
                number = self._groups.get(key)
            number = self._keep(keep, number)
        self._groups[key] = number
        self.to_forget.discard(key)

    def _keep(self, keep: do.SaveGroup, number: int | None) -> int:
        if number is None:
            info = msgspec.msgpack.encode(keep.feed)
            self._do("INSERT INTO groups (feed, name, info) VALUES (?, ?, ?)", keep.feed.name, keep.group, info)
            ((number,),) = self._do("SELECT last_insert_rowid()")
            assert number is not None
        self._do(
            "UPDATE groups SET epoch = ?, batches = ?, rows = ?, digest = ?, merged = ? WHERE id = ?",
            *(keep.epoch, keep.batches, keep.rows, keep.digest, keep.merged, number),
        )
        if keep.fresh:
            for table in _OF_EPOCH:
                self._do(f"DELETE FROM {table} WHERE id = ?", number)
        for place in keep.places:
            self._do("INSERT OR REPLACE INTO places VALUES (?, ?, ?, ?)", number, *place)
        for lane, *rest in keep.ended:
            self._do("DELETE FROM places WHERE id = ? AND lane = ?", number, lane)
            self._do("INSERT OR REPLACE INTO ended VALUES (?, ?, ?, ?, ?, ?)", number, lane, *rest)
        for lane, index in keep.behind:
            self._do("DELETE FROM ahead WHERE id = ? AND lane = ? AND idx + batches <= ?", number, lane, index)
        for batches in keep.ahead:
            self._do(
                "INSERT INTO ahead VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET batches = max(batches, excluded.batches)",
                *(number, *batches),
            )
        if keep.arrived:
            self._do("INSERT OR IGNORE INTO consumers VALUES (?, ?)", number, keep.arrived)
        if keep.parted:
            self._do("DELETE FROM consumers WHERE id = ? AND consumer = ?", number, keep.parted)
        return number

    def forget(self, feed: str, group: str) -> None:
        """Delete a group.

        Raises:
            DaemonStopped: deleting failed; until it succeeds the group is in `to_forget`.
        """
        key = feed, group
        if key in self._groups:
            self.to_forget.add(key)
            with self._transaction():
                self._delete(self._groups[key])
            del self._groups[key]
        self.to_forget.discard(key)

    def _delete(self, number: int | None) -> None:
        for table in ("groups", "consumers", *_OF_EPOCH):
            self._do(f"DELETE FROM {table} WHERE id = ?", number)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write all statements in this context, or none."""
        try:
            self._do("BEGIN")
            yield
            self._do("COMMIT")
        except (sqlite3.Error, OverflowError) as error:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back on its own
                self._do("ROLLBACK")
            raise DaemonStopped(  # consumers wait, and connect again
                f"cannot write the state file {self.path} ({error}), and without it a group could receive batches "
                "twice: free some space on its disk, or make the file writable"
            ) from None

    def close(self) -> None:
        """Close the file, so that others can open it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _do(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        assert self._file is not None
        return self._file.execute(statement, values).fetchall()

    def _why(self, error: sqlite3.Error) -> str:
        text = str(error)
        if "locked" in text:
            return "another daemon has this file: give each daemon its own"
        if "not a database" in text:
            return "this is not a state file: give another path"
        return f"cannot open and write the file ({text}): its folder must exist, and both must be writable"
