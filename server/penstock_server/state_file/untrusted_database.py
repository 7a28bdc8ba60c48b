"""An SQLite database whose content is not trusted: somebody else may have written it, or a disk has damaged it.

A database can contain more than data. Views, triggers, indices and defaults hold SQL text that runs when tables of
innocent names are read or written. So the schema must be exactly the expected one. Each value has a bound, so that
SQLite allocates no more for it, and each access has a time limit, after which SQLite stops.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

MOST_VALUE = 1 << 20
"""Maximum bytes of one value, and of one row."""

_STEPS = 10_000
"""After so many steps of SQLite's interpreter it looks at the time."""

_LIMITS: Final = {
    sqlite3.SQLITE_LIMIT_LENGTH: MOST_VALUE,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


class UntrustedDatabase:
    """One open database, and the only way to its values.

    Args:
        path: the file, or ":memory:".
        patience: seconds to wait while another process has locked the file.

    Raises:
        sqlite3.Error: it cannot be opened.
    """

    def __init__(self, path: str | Path, patience: float) -> None:
        self._until = float("inf")
        place = path if path == ":memory:" else os.path.abspath(path)  # no name then has a meaning of its own
        self._database = sqlite3.connect(place, timeout=patience, isolation_level=None)
        for limit, most in _LIMITS.items():
            self._database.setlimit(limit, most)
        if sys.version_info >= (3, 12):
            self._database.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
            self._database.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_TRIGGER, False)
            self._database.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_VIEW, False)
        self._database.set_progress_handler(lambda: time.monotonic() > self._until, _STEPS)
        self.do("PRAGMA trusted_schema = OFF")
        self.do("PRAGMA cell_size_check = ON")

    def allow(self, seconds: float) -> None:
        """From now on, let statements take this long together. Later ones raise sqlite3.OperationalError."""
        self._until = time.monotonic() + seconds

    def do(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement, and return its rows. The statement must bound their number."""
        return self._database.execute(statement, values).fetchall()

    def rows(self, most: int, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement, and return its rows.

        Raises:
            ValueError: there are more than `most`.
        """
        found = self._database.execute(statement, values).fetchmany(most + 1)
        if len(found) > most:
            raise ValueError(f"more than {most} rows")
        return found

    def each(self, statement: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Run a statement, and yield its rows one by one."""
        return iter(self._database.execute(statement, values))

    def check(self, tables: Iterable[str]) -> None:
        """Check that the file has these tables (CREATE statements) and nothing else, and that its pages fit together.

        Raises:
            ValueError: it does not.
            sqlite3.Error: it cannot be read.
        """
        expected = {_words(table) for table in tables}
        found = self.rows(len(expected), "SELECT sql FROM sqlite_schema")
        if len(found) != len(expected) or {_words(str(sql)) for (sql,) in found} != expected:
            raise ValueError("it has other tables, views, triggers or indices than Penstock makes")
        ((said,),) = self.do("PRAGMA quick_check(1)")
        if said != "ok":
            raise ValueError(said)

    def close(self) -> None:
        """Close the file, so that others can open it."""
        self._until = float("inf")
        self._database.close()


def _words(statement: str) -> str:
    return " ".join(statement.split())


def one_line(error: Exception) -> str:
    """Return the text of an error without characters that a terminal would obey: it may quote the content."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(error)[:200])
