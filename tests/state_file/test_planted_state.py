"""A state file is not believed: what is in it cannot run, hang the daemon, or take its memory."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock_proto import DaemonStopped, StartError
from penstock_server.coordinator.admission import groups as coordinator_groups
from penstock_server.coordinator.model.group_log import SavedGroup
from penstock_server.state_file import group_reader, state_path, statefile
from penstock_server.state_file.state_path import check_option
from penstock_server.state_file.statefile import StateFile
from penstock_server.state_file.untrusted_database import MOST_VALUE, UntrustedDatabase
from tests.conftest import Serve
from tests.fakes.planted_state import KEEP, SCHEMA, run, use, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A state file with one group."""
    write(tmp_path / "state")
    return tmp_path / "state"


def damaged(path: Path, *said: str) -> None:
    """Check that a file is refused as damaged, with the next step and without control characters."""
    error = use(path)
    assert error.startswith(f"--state {path}: the content of the file"), error
    assert "is damaged (" in error
    assert "Restore a copy of it, or delete it with its -wal file" in error
    assert error.isprintable()
    assert len(error) < 1000
    for text in said:
        assert text in error


# --- the content ---


@pytest.mark.parametrize("number", range(len(SCHEMA)))
def test_views_triggers_and_everything_else_that_could_run_are_refused_before_they_run(path: Path, number: int) -> None:
    run(path, SCHEMA[number])
    before = time.process_time()
    damaged(path)
    assert time.process_time() - before < 5, "it ran"


def test_a_daemon_neither_starts_with_a_planted_view_nor_waits_for_it(serve: Serve, path: Path) -> None:
    run(path, SCHEMA[8])
    feed = "from penstock_server import Feed\nfeed = Feed(lambda: iter([1, 2]), batch_size=1)\n"
    daemon = serve(feed, ready=False, state=path)
    assert daemon.process.wait(60) == 1
    assert "has other tables, views, triggers or indices than Penstock makes" in daemon.stderr()


def test_each_value_has_a_bound_and_none_is_shown_whole(path: Path) -> None:
    for value in (f"zeroblob({MOST_VALUE + 1})", "zeroblob(100000000)", "printf('%900000s', 'x')", "'\x1b[2J'"):
        for column in ("name", "info", "feed") if "zero" in value or "print" in value else ("info", "feed"):
            os.unlink(path)
            write(path)
            run(path, f"UPDATE groups SET {column} = {value}")
            damaged(path)
    os.unlink(path)
    write(path)
    run(path, f"UPDATE groups SET info = zeroblob({MOST_VALUE + 1})")
    damaged(path, "string or blob too big")
    run(path, f"UPDATE groups SET info = zeroblob({MOST_VALUE - 500})")  # it fits with the rest of its row
    damaged(path, "Expected `object`, got `int`")


def test_the_number_of_groups_has_a_bound_when_the_file_is_read_and_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statefile, "MOST_GROUPS", 3)
    file = StateFile(path)
    file.load()
    file.keep(replace(KEEP, group="h"))
    file.keep(replace(KEEP, group="i"))
    with pytest.raises(DaemonStopped, match=r"cannot write the state file .*it has 3 groups, the maximum"):
        file.keep(replace(KEEP, group="j"))
    file.keep(replace(KEEP, group="i", batches=9))
    file.forget("train", "h")
    file.keep(replace(KEEP, group="j"))
    file.close()
    file = StateFile(path)
    assert {group for _, group in file.load()} == {"g", "i", "j"}
    file.close()
    run(path, "INSERT INTO groups SELECT 99, feed, 'k', info, epoch, batches, rows, digest, merged FROM groups LIMIT 1")
    damaged(path, "it has 4 groups, and a state file has at most 3")


def test_a_group_that_occurs_twice_is_refused(path: Path) -> None:
    run(path, "INSERT INTO groups SELECT 99, feed, name, info, epoch, batches, rows, digest, merged FROM groups")
    damaged(path, "it has a group twice")


def test_the_number_of_rows_has_a_bound_and_batches_in_a_row_count_as_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_reader, "MOST_ROWS", 6)  # it has two lanes, a consumer, and a run of batches
    for rows in (
        "INSERT INTO consumers SELECT id, x'{:02x}' FROM groups",
        "INSERT INTO ahead SELECT id, 1, 2 * {}, 1 FROM groups",
    ):
        os.unlink(path)
        write(path)
        run(path, rows.format(7))
        run(path, rows.format(8))
        assert use(path) == ""
        os.unlink(path)
        write(path)
        for number in (7, 8, 9):
            run(path, rows.format(number))
        damaged(path, "more than ", "rows")
    os.unlink(path)
    write(path)
    for number in range(20, 60):
        run(path, f"INSERT INTO ahead SELECT id, 2, {number}, 1 FROM groups")
    file = StateFile(path)
    (saved,) = file.load().values()
    file.close()
    assert saved.beyond == ((2, 1, 1), (2, 20, 40))


def test_a_file_that_is_cut_off_anywhere_is_damaged_or_no_state_file(path: Path) -> None:
    whole = path.read_bytes()
    for length in (1, 15, 16, 99, 100, 511, 512, 4095, 4096, 8192, len(whole) - 1):
        path.write_bytes(whole[:length])
        if length < 16:
            assert use(path) == f"--state {path}: this is not a state file: give another path"
        else:
            damaged(path)
    path.write_bytes(b"")
    assert use(path) == "", "an empty file is a new one"


def test_reading_has_a_time_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spin = "WITH RECURSIVE spin(x) AS (SELECT 1 UNION ALL SELECT x FROM spin) SELECT count(*) FROM spin"
    database = UntrustedDatabase(path, 1.0)
    database.allow(0.1)
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        database.do(spin)
    database.close()
    monkeypatch.setattr(UntrustedDatabase, "check", lambda self, tables: self.do(spin))
    monkeypatch.setattr(statefile, "OPEN_SECONDS", 0.1)
    damaged(path, "reading it takes more than 0 s")
    file = StateFile(path)
    monkeypatch.setattr(statefile, "CHANGE_SECONDS", 0.1)
    with pytest.raises(DaemonStopped, match=r"cannot write the state file .* \(interrupted\)"), file._transaction():
        file._do(spin)
    file.close()


def test_groups_of_the_file_that_nobody_reads_are_forgotten_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_groups, "MOST_FORGOTTEN", 2)
    file = StateFile(":memory:")
    file.keep(KEEP)
    saved: SavedGroup = file.load()["train", "g"]
    file.close()
    done: list[object] = []
    found = coordinator_groups.Groups({("train", f"g{number}"): saved for number in range(5)}, done.append, 60.0)
    for now, forgotten in ((0.0, 0), (59.0, 0), (61.0, 2), (62.0, 4), (63.0, 5), (64.0, 5)):
        assert found.give_up(now) == []
        assert len(done) == forgotten
    assert not found.any


# --- the path ---


@pytest.mark.parametrize("option", ["", ":memory:", "file:state?mode=memory"])
def test_a_path_that_means_something_else_in_sqlite_is_refused(serve: Serve, option: str) -> None:
    with pytest.raises(StartError, match=r"--state '.*': give the path of a file, such as groups\.sqlite"):
        check_option(option)
    feed = "from penstock_server import Feed\nfeed = Feed(lambda: iter([1, 2]), batch_size=1)\n"
    daemon = serve(feed, ready=False, state=option)
    assert daemon.process.wait(60) == 1
    assert f"--state {option!r}: give the path of a file" in daemon.stderr()
    check_option("./:memory:")


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_folders_pipes_devices_and_files_that_others_can_change_are_refused_at_once(path: Path, suffix: str) -> None:
    place = Path(f"{path}{suffix}")
    here = f"--state {path}: "
    aside = path.with_name("aside")
    path.rename(aside)
    makes: dict[str, Callable[[], object]] = {
        f"{here}{place} is a folder: give the path of a file": lambda: place.mkdir(),
        f"{here}{place} is not a regular file: give the path of a file": lambda: os.mkfifo(place),
        f"{here}{place} is not a regular file: give": lambda: place.symlink_to("/dev/zero"),
        f"{here}every user of this host can change {place}: chmod o-w": lambda: (place.touch(), place.chmod(0o606)),
    }
    if os.geteuid() == 0:
        makes[f"{here}{place} belongs to the user 65534, who could change it: run as that user"] = lambda: (
            place.touch(),
            os.chown(place, 65534, 65534),
        )
    for said, make in makes.items():
        make()
        assert use(path).startswith(said)
        place.rmdir() if place.is_dir() else place.unlink()
    if os.geteuid() == 0:
        link = path.with_name("link")
        link.symlink_to(aside)
        assert use(link) == ""
        os.chown(link, 65534, 65534, follow_symlinks=False)
        assert "link belongs to the user 65534" in use(link)


def test_the_size_of_a_file_has_a_bound_when_it_is_opened_and_when_it_grows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_path, "MOST_NBYTES", path.stat().st_size)
    assert use(path) == ""
    monkeypatch.setattr(state_path, "MOST_NBYTES", path.stat().st_size - 1)
    assert f"the file and those beside it have {path.stat().st_size} bytes, and a state file has at most" in use(path)
    monkeypatch.setattr(state_path, "MOST_NBYTES", 1 << 20)
    monkeypatch.setattr(statefile, "MOST_NBYTES", 1 << 20)
    file = StateFile(path)
    with pytest.raises(DaemonStopped, match=r"database or disk is full.*\(the file may have 1 MiB\)"):
        for number in range(100):
            file.keep(replace(KEEP, group=f"g{number}", places=((0, 4, bytes(30_000)),)))
    file.close()
    assert path.stat().st_size <= 1 << 20
    assert use(path) == ""
    os.truncate(path, 2_000_000_000)  # it takes no room on the disk
    assert "2000000000 bytes, and a state file has at most 1048576" in use(path)


def test_a_database_of_another_program_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    assert "this database belongs to another program: give another path" in use(path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


# --- random changes ---

MEMORY = """
import resource, sys, time
sys.path.insert(0, sys.argv[1])
import random
from pathlib import Path
from tests.fakes import planted_state
from penstock_server.state_file import statefile
statefile.PATIENCE = 0.1
path = Path(sys.argv[2])
first, count = int(sys.argv[3]), int(sys.argv[4])
used = refused = 0
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for number in range(first, first + count):
    for beside in path.parent.glob(path.name + "*"):
        beside.unlink()
    planted_state.write(path)
    planted_state.change(path, random.Random(number))
    began = time.process_time()
    error = planted_state.use(path)
    took = time.process_time() - began
    assert error.isprintable() and len(error) < 1000, (number, error)
    assert took < 20, (number, took)
    used += not error
    refused += bool(error)
print(used, refused, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)
"""


def changed_at_random(tmp_path: Path, first: int, count: int) -> tuple[int, int]:
    """Use state files with random changes in a process of its own. Return how many could be used and how many not."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            MEMORY,
            str(Path(__file__).resolve().parents[2]),
            tmp_path / "state",
            str(first),
            str(count),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    used, refused, kilobytes = map(int, done.stdout.split())
    assert kilobytes < 200_000
    return used, refused


def test_files_with_random_changes_are_used_or_refused_by_name(tmp_path: Path) -> None:
    used, refused = changed_at_random(tmp_path, 0, 100)
    assert used > 0
    assert refused > 40


@pytest.mark.fuzz
def test_fuzz_state_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds, first = request.config.getoption("--fuzz-seconds"), request.config.getoption("--fuzz-seed") * 1_000_000
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        changed_at_random(tmp_path, first, 200)
        first += 200
