"""State files that somebody else has written: real ones with random changes, in their bytes or their content."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
from pathlib import Path

from penstock_proto import DaemonStopped, StartError
from penstock_server.coordinator.model import commands as do
from penstock_server.state_file.statefile import StateFile
from tests.simulation.simulation import SimFeed, World

FEED = World(SimFeed(turn=4, splits=(8, 8, 8), lanes=3)).coordinator.feeds["train"].info
KEEP = do.SaveGroup(
    FEED, "g", 0, 8, 8, bytes(32), 0, places=((0, 4, b"record"), (1, 4, b"record")), beyond=((2, 1, 1),), arrived=b"a"
)

SCHEMA = [
    "CREATE VIEW v AS WITH RECURSIVE spin(x) AS (SELECT 1 UNION ALL SELECT x FROM spin) SELECT x FROM spin",
    "CREATE TRIGGER t AFTER UPDATE ON groups BEGIN "
    "INSERT INTO consumers WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x, x FROM n; END",
    "CREATE TRIGGER t BEFORE DELETE ON groups BEGIN SELECT raise(FAIL, '\x1b[2Jgone'); END",
    "CREATE INDEX i ON groups (lower(name))",
    "CREATE TABLE more (x)",
    "DROP TABLE ahead",
    "ALTER TABLE places ADD COLUMN more DEFAULT 1",
    "ALTER TABLE groups RENAME COLUMN merged TO merge",
    "DROP TABLE groups; CREATE VIEW groups AS WITH RECURSIVE spin(x) AS (SELECT 1 UNION ALL SELECT x FROM spin) "
    "SELECT x AS id, 'train' AS feed, 'g' AS name, x AS info, 0 AS epoch, 0 AS batches, 0 AS rows, x AS digest, "
    "0 AS merged FROM spin",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE TABLE groups (\x1b[2J'",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage = 2",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET name = '\x1b]0;x' WHERE name = 'ended'",
]
"""Statements that change the schema of a state file, or what may run with it."""

VALUES = (
    "NULL",
    "-1",
    "9223372036854775807",
    "1e300",
    "'\x1b[2J'",
    "x'ff'",
    "zeroblob(2000000)",
    "printf('%900000s', 1)",
)
CONSUMERS = (
    "INSERT INTO consumers WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {}) "
    "SELECT 1, x FROM n"
)
COLUMNS = {
    "groups": ("id", "feed", "name", "info", "epoch", "batches", "rows", "digest", "merged"),
    "places": ("id", "lane", "idx", "record"),
    "ahead": ("id", "lane", "idx", "batches"),
    "consumers": ("id", "consumer"),
}


def write(path: Path) -> None:
    """Write a state file with one group."""
    file = StateFile(path)
    file.keep(KEEP)
    file.close()


def run(path: Path, script: str) -> None:
    """Run SQL statements on a file, as another program. They may fail."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        for statement in script.split("; ") if "BEGIN" not in script else [script]:
            with contextlib.suppress(sqlite3.Error):
                other.execute(statement)


def change(path: Path, dice: random.Random) -> None:
    """Change a state file at random."""
    for _ in range(dice.choice((1, 1, 1, 3))):
        kind = dice.randrange(6)
        if kind == 0:
            run(path, dice.choice(SCHEMA))
        elif kind == 1:
            table = dice.choice(list(COLUMNS))
            run(path, f"UPDATE {table} SET {dice.choice(COLUMNS[table])} = {dice.choice(VALUES)}")
        elif kind == 2:
            run(path, CONSUMERS.format(dice.choice((10, 100_000))))
        elif kind == 3:
            os.truncate(path, dice.randrange(path.stat().st_size + 1))
        elif path.stat().st_size:
            content = bytearray(path.read_bytes())
            for _ in range(dice.choice((1, 5, 100))):
                content[min(int(dice.paretovariate(0.3)), len(content)) - 1] = dice.randrange(256)
            if kind == 5:
                page = dice.randrange(len(content) // 4096 + 1) * 4096
                content[page : page + 4096] = dice.choice((b"", dice.randbytes(4096), content[:4096]))
            path.write_bytes(content)
    if dice.random() < 0.1:
        Path(f"{path}-{dice.choice(('wal', 'shm', 'journal'))}").write_bytes(
            dice.randbytes(dice.choice((0, 500, 50_000)))
        )


def use(path: Path) -> str:
    """Open a state file, read it, and change it, as a daemon does. Return the error, or "" if there was none."""
    try:
        file = StateFile(path)
    except StartError as error:
        return str(error)
    try:
        file.load()
        file.keep(KEEP)
        file.forget("train", "g")
    except (StartError, DaemonStopped) as error:
        return str(error)
    finally:
        file.close()
    return ""
