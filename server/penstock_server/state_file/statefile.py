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
from typing import Any

import msgspec

from penstock_proto import DaemonStopped, StartError
from penstock_proto.value_text import shown

from ..coordinator.model import commands as do
from ..coordinator.model.group_log import SavedGroup
from .group_reader import GroupReader
from .state_path import MOST_NBYTES, check_files, damaged
from .untrusted_database import UntrustedDatabase, one_line

APPLICATION = 0x50454E53
"""SQLite's application_id of our files."""
SCHEMA = 3
"""The version of the tables, and of the order of streams, because a changed order changes the meaning of a position."""
PATIENCE = 5.0
"""Seconds to wait while another daemon, which may be about to stop, has the file."""

OPEN_SECONDS = 60.0
"""Maximum seconds that SQLite may take to open the file, and to read it or one of its groups."""
CHANGE_SECONDS = 5.0
"""Maximum seconds that SQLite may take for one change. Meanwhile the daemon does nothing else."""
MOST_GROUPS = 1000
"""Maximum number of groups in a file."""

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
    CREATE TABLE consumers (id INTEGER, consumer BLOB, PRIMARY KEY (id, consumer)) WITHOUT ROWID
""".split(";")
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
        self._file: UntrustedDatabase | None = None
        if path != ":memory:":  # for tests
            check_files(path)
        try:
            self._file = UntrustedDatabase(path, PATIENCE)
            self._reader = GroupReader(self._file)
            self._file.allow(OPEN_SECONDS)
            self._open()
        except (sqlite3.Error, StartError) as error:
            self.close()
            if isinstance(error, StartError):
                raise
            raise self._cannot_open(error) from None

    def _open(self) -> None:
        self._do("PRAGMA locking_mode = EXCLUSIVE")
        ((application,),) = self._do("PRAGMA application_id")
        ((schema,),) = self._do("PRAGMA user_version")
        ((tables,),) = self._do("SELECT count(*) FROM sqlite_schema")
        new = not (application or schema or tables)
        if not new and application != APPLICATION:
            raise StartError(f"--state {self.path}: this database belongs to another program: give another path")
        if not new and schema != SCHEMA:
            raise StartError(
                f"--state {self.path}: the file has version {schema}, and this Penstock writes version {SCHEMA}: give "
                "another path, and groups begin from the start, or use the Penstock that wrote it"
            )
        self._do("PRAGMA journal_mode = WAL")
        self._do("PRAGMA synchronous = NORMAL")
        ((page_nbytes,),) = self._do("PRAGMA page_size")
        self._do(f"PRAGMA max_page_count = {MOST_NBYTES // page_nbytes}")
        self._do("BEGIN IMMEDIATE")  # this locks the file until it is closed
        if new:
            for statement in _TABLES:
                self._do(statement)
            self._do(f"PRAGMA application_id = {APPLICATION}")
            self._do(f"PRAGMA user_version = {SCHEMA}")
        self._do("COMMIT")

    def load(self) -> dict[tuple[str, str], SavedGroup]:
        """Read all groups, by feed and group name.

        Raises:
            StartError: the file is damaged.
        """
        assert self._file is not None
        self._file.allow(OPEN_SECONDS)
        self._reader.begin()
        try:
            self._file.check(_TABLES)
            ((count,),) = self._do("SELECT count(*) FROM groups")
            if count > MOST_GROUPS:
                raise ValueError(f"it has {count} groups, and a state file has at most {MOST_GROUPS}")
            # As bytes, because `substr` of a text ends at a NUL, which names in files of earlier versions may have.
            name = "CAST(substr(CAST(name AS BLOB), 1, 516) AS TEXT)"
            groups = self._file.rows(MOST_GROUPS, f"SELECT id, substr(feed, 1, 129), {name} FROM groups")
            self._groups = {(feed, name): number for number, feed, name in groups}
            if len(self._groups) < len(groups):
                raise ValueError("it has a group twice")
        except (sqlite3.Error, TypeError, ValueError) as error:
            raise self._damaged("", error) from None
        return {(feed, name): self._read(feed, name, number) for (feed, name), number in self._groups.items()}

    def kept(self, feed: str, group: str) -> SavedGroup | None:
        """Read one group, or return None if the file does not have it.

        Raises:
            StartError: the file is damaged, or cannot be read.
        """
        number = self._groups.get((feed, group))
        if number is None or (feed, group) in self.to_forget:
            return None
        assert self._file is not None
        self._file.allow(OPEN_SECONDS)
        self._reader.begin()
        return self._read(feed, group, number)

    def _read(self, feed: str, group: str, number: int) -> SavedGroup:
        try:
            return self._reader.read(feed, group, number)
        except (sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise self._damaged(f" of group {shown(group)} of feed {shown(feed)}", error) from None

    def _damaged(self, what: str, error: Exception) -> StartError:
        return damaged(self.path, what, _why(error))

    def _cannot_open(self, error: sqlite3.Error) -> StartError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the extended part
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StartError(f"--state {self.path}: another daemon has this file: give each daemon its own")
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            why = (
                f"cannot open and write the file ({one_line(error)}): its folder must exist, and both must be writable"
            )
            return StartError(f"--state {self.path}: {why}")
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM):
            return StartError(
                f"--state {self.path}: cannot read or write the file ({one_line(error)}): look at its disk"
            )
        return self._damaged("", error)

    def keep(self, keep: do.SaveGroup) -> None:
        """Write the changes of a group.

        Raises:
            DaemonStopped: writing failed, and nothing was written.
        """
        key = keep.feed.name, keep.group
        if key not in self._groups and len(self._groups) >= MOST_GROUPS:
            raise self._not_written(f"(it has {MOST_GROUPS} groups, the maximum)")
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
        for lane, index in keep.passed:
            self._do("DELETE FROM ahead WHERE id = ? AND lane = ? AND idx + batches <= ?", number, lane, index)
        for batches in keep.beyond:
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
        assert self._file is not None
        self._file.allow(CHANGE_SECONDS)
        try:
            self._do("BEGIN")
            yield
            self._do("COMMIT")
        except (sqlite3.Error, OverflowError) as error:
            self._file.allow(CHANGE_SECONDS)
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back on its own
                self._do("ROLLBACK")
            raise self._not_written(f"({one_line(error)})") from None

    def _not_written(self, why: str) -> DaemonStopped:
        return DaemonStopped(  # consumers wait, and connect again
            f"cannot write the state file {self.path} {why}, and without it a group could receive batches twice: free "
            f"some space on its disk (the file may have {MOST_NBYTES >> 20} MiB), or make the file writable"
        )

    def close(self) -> None:
        """Close the file, so that others can open it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _do(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        assert self._file is not None
        return self._file.do(statement, *values)


def _why(error: Exception) -> str:
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
        return f"reading it takes more than {OPEN_SECONDS:.0f} s"
    return one_line(error)
