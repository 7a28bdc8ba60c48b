"""The state file of a daemon: where its groups stand, in SQLite, so that the next daemon goes on there.

Each `Keep` is one transaction, written when `keep` returns: a daemon that is killed at any instant leaves what it had
written by then. It survives the end of the process, not that of the machine, for which SQLite would have to wait for
the disk each time; what a machine leaves that lost its power is whole, but may be a little old.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from penstock_proto import DaemonStopped, StartError
from penstock_proto.messages import FeedInfo
from penstock_proto.position import EndedLane, Place, Position

from .coordinator import commands as do
from .coordinator.keeping import Kept

APPLICATION = 0x50454E53
"""SQLite's application_id of our files."""
SCHEMA = 2
"""The version of the tables, and of the streams in them: with another order of samples a place is another one."""
PATIENCE = 5.0
"""Seconds for which another daemon, which may be just ending, can have the file."""

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
_OF_EPOCH = ("places", "ended", "ahead")


class StateFile:
    """An open state file, which nobody else can open meanwhile.

    Raises:
        StartError: it cannot be opened, is no state file, or another daemon has it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
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
        self._do("BEGIN IMMEDIATE")  # with which the file is ours until it is closed
        ((application,),) = self._do("PRAGMA application_id")
        ((schema,),) = self._do("PRAGMA user_version")
        ((tables,),) = self._do("SELECT count(*) FROM sqlite_master")
        if not (application or schema or tables):
            for statement in _TABLES.split(";"):
                self._do(statement)
            self._do(f"PRAGMA application_id = {APPLICATION}")
            self._do(f"PRAGMA user_version = {SCHEMA}")
        elif application != APPLICATION:
            raise StartError(f"--state {self.path}: this is another program's database: give a path of its own")
        elif schema != SCHEMA:
            raise StartError(
                f"--state {self.path}: the file has version {schema}, and this Penstock writes version {SCHEMA}: give "
                "another path, with which groups begin anew, or the Penstock that wrote it"
            )
        self._do("COMMIT")

    def load(self) -> dict[tuple[str, str], Kept]:
        """What is kept, by feed and group.

        Raises:
            StartError: it is damaged.
        """
        try:
            self._groups = {
                (feed, name): number for number, feed, name in self._do("SELECT id, feed, name FROM groups")
            }
            return {key: self._kept(number) for key, number in self._groups.items()}
        except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
            raise StartError(
                f"--state {self.path}: the file is damaged ({error}): delete it; groups begin anew"
            ) from None

    def _kept(self, number: int) -> Kept:
        ((info, epoch, batches, rows, digest, merged),) = self._do(
            "SELECT info, epoch, batches, rows, digest, merged FROM groups WHERE id = ?", number
        )
        places = self._do("SELECT lane, idx, record FROM places WHERE id = ? ORDER BY lane", number)
        ended = self._do("SELECT lane, idx, leftover, record FROM ended WHERE id = ? ORDER BY number", number)
        return Kept(
            Position(
                msgspec.msgpack.decode(info, type=FeedInfo),
                epoch,
                batches,
                rows,
                digest,
                tuple(Place(*place) for place in places),
                tuple(EndedLane(*lane) for lane in ended),
                merged,
            ),
            tuple(self._do("SELECT lane, idx, batches FROM ahead WHERE id = ?", number)),
            frozenset(consumer for (consumer,) in self._do("SELECT consumer FROM consumers WHERE id = ?", number)),
        )

    def keep(self, keep: do.Keep) -> None:
        """Write what the command says.

        Raises:
            DaemonStopped: that failed, and nothing of it is written.
        """
        try:
            self._do("BEGIN")
            self._keep(keep)
            self._do("COMMIT")
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def _keep(self, keep: do.Keep) -> None:
        key = keep.feed.name, keep.group
        number = self._groups.get(key)
        if number is None:
            info = msgspec.msgpack.encode(keep.feed)
            self._do("INSERT INTO groups (feed, name, info) VALUES (?, ?, ?)", *key, info)
            ((number,),) = self._do("SELECT last_insert_rowid()")
            self._groups[key] = number
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

    def forget(self, forget: do.Forget) -> None:
        """Delete what is kept of a group.

        Raises:
            DaemonStopped: that failed.
        """
        number = self._groups.pop((forget.feed, forget.group), None)
        try:
            self._do("BEGIN")
            for table in ("groups", "consumers", *_OF_EPOCH):
                self._do(f"DELETE FROM {table} WHERE id = ?", number)
            self._do("COMMIT")
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """Let others have the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _do(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        assert self._file is not None
        return self._file.execute(statement, values).fetchall()

    def _failed(self, error: sqlite3.Error) -> DaemonStopped:
        return DaemonStopped(  # so that consumers wait for the next one
            f"the state file {self.path} cannot be written ({error}), and without it groups could be sent batches "
            "twice: mend that and start the daemon again"
        )

    def _why(self, error: sqlite3.Error) -> str:
        text = str(error)
        if "locked" in text:
            return "another daemon has this file: give each daemon its own"
        if "not a database" in text:
            return "this is no state file: give a path of its own"
        return f"the file cannot be opened and written ({text}): its folder must exist, and both must be writable"
