"""With `--state FILE` a group's stream outlives its daemon, however the daemon ends."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import penstock
from penstock import StateMismatch, StreamClosed
from penstock_proto import DaemonStopped, StartError
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model.open_request import OpenRequest
from penstock_server.state_file import statefile
from penstock_server.state_file.statefile import StateFile
from penstock_server.to_daemon import control
from tests.conftest import Serve, wait_until
from tests.fakes.fault_proxy import FaultProxy
from tests.processes.free_ports import free_address
from tests.simulation.simulation import SimFeed, World

FEED = """
    import os
    import time
    import numpy as np
    from penstock_server import Feed

    def numbers(split, epoch):
        for i in range(100):
            time.sleep(0.001)
            yield np.full((16, 16), i, "float32"), np.int64(1000 * (10 * epoch + split) + i)

    feed = Feed(numbers, splits=range(8), batch_size=7, lanes=4, turn=3, seed=int(os.environ.get("SEED", 0)))
"""


def samples(epoch: int) -> Counter[int]:
    return Counter(1000 * (10 * epoch + split) + i for split in range(8) for i in range(100))


class Consumer(threading.Thread):
    """Reads epochs of a group, and notes what it was handed in each. `error`: the error that stopped it."""

    def __init__(self, url: str, transport: str, epochs: int, **options: Any) -> None:
        super().__init__()
        self.read: list[list[int]] = []
        self.batches = 0
        self.error: penstock.PenstockError | None = None
        self._connection = penstock.connect(url, group="g", transport=transport, **options)
        self._epochs = epochs
        self.start()

    def run(self) -> None:
        try:
            with self._connection as connection:
                for _ in range(self._epochs):
                    self.read.append([])
                    for _, numbers in connection.batches():
                        self.read[-1] += [int(number) for number in numbers]
                        self.batches += 1
                        time.sleep(0.005)
        except penstock.PenstockError as error:
            self.error = error


def until(consumers: list[Consumer], batches: int) -> None:
    """Wait until the consumers were handed `batches` batches together."""
    deadline = time.monotonic() + 60
    while sum(consumer.batches for consumer in consumers) < batches:
        assert time.monotonic() < deadline
        assert [consumer.error for consumer in consumers if consumer.error] == []
        time.sleep(0.002)


def test_each_batch_is_handed_over_once_though_the_daemon_is_killed_again_and_again(
    serve: Serve, tmp_path: Path
) -> None:
    options = {"bind": free_address(), "state": tmp_path / "state"}
    daemon = serve(FEED, **options)
    consumers = [Consumer(daemon.url, transport, epochs=3) for transport in ("local", "local", "tcp")]
    for batches in (20, 45, 80):  # of 115 in an epoch
        until(consumers, batches)
        daemon.stop(signal.SIGKILL)
        daemon = serve(FEED, **options)
    until(consumers, 130)
    assert daemon.stop() == 0, "it finished the second epoch before it stopped"
    serve(FEED, **options)
    for consumer in consumers:
        consumer.join(60)
    assert [consumer.error for consumer in consumers] == [None] * 3
    for epoch in range(3):
        assert Counter(number for consumer in consumers for number in consumer.read[epoch]) == samples(epoch)
        assert all(consumer.read[epoch] for consumer in consumers), "every consumer got some"


def test_a_member_comes_back_to_a_daemon_that_was_told_to_stop_before_it_could(serve: Serve, tmp_path: Path) -> None:
    options = {"bind": free_address(), "state": tmp_path / "state"}
    daemon = serve(FEED, **options)
    with FaultProxy(int(daemon.url.rpartition(":")[2].partition("/")[0])) as proxy:
        consumers = [
            Consumer(daemon.url, "local", epochs=1),
            Consumer(f"tcp://127.0.0.1:{proxy.port}/feed", "tcp", epochs=1),
        ]
        until(consumers[1:], 10)
        daemon.stop(signal.SIGKILL)
        proxy.cut(refusing=3600)
        handed = [consumer.batches for consumer in consumers]
        daemon = serve(FEED, **options)
        wait_until(lambda: any(one.reading for one in control.status(daemon.url, 60).streams))
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping when the epochs that are being read have ended" in daemon.stderr())
        proxy.mend()
        for consumer in consumers:
            consumer.join(60)
        assert daemon.stop() == 0
    assert [consumer.error for consumer in consumers] == [None] * 2
    assert Counter(number for consumer in consumers for number in consumer.read[0]) == samples(0)
    assert all(consumer.batches > before for consumer, before in zip(consumers, handed, strict=True))


def test_another_feed_is_refused_and_both_are_named(serve: Serve, tmp_path: Path) -> None:
    options = {"bind": free_address(), "state": tmp_path / "state"}
    daemon = serve(FEED, **options)
    consumer = Consumer(daemon.url, "local", epochs=1)
    until([consumer], 5)
    daemon.stop(signal.SIGKILL)
    daemon = serve(FEED, env={"SEED": "1"}, **options)
    with pytest.raises(StateMismatch, match=r"'g'.*seed was 0 and is 1 now"):
        penstock.connect(daemon.url, group="g")
    consumer.join(100)
    assert isinstance(consumer.error, StateMismatch)


def test_without_a_state_file_the_error_tells_of_it() -> None:
    ask = OpenRequest(credit=4, credit_bytes=0, quota=0, again=True, group="g")
    with pytest.raises(StreamClosed, match=r"'g' no longer exists.*`penstock serve --state FILE`"):
        World(SimFeed()).ask("train", ask)


def test_without_a_state_file_the_consumers_of_a_killed_daemon_fail_at_once(serve: Serve) -> None:
    bind = free_address()
    daemon = serve(FEED, bind=bind)
    consumers = [Consumer(daemon.url, transport, epochs=1) for transport in ("local", "tcp")]
    until(consumers, 5)
    daemon.stop(signal.SIGKILL)
    daemon = serve(FEED, bind=bind)
    with penstock.connect(daemon.url, group="g") as another:  # consumers that come back must not join this new stream
        for consumer in consumers:
            consumer.join(30)  # less than the 60 s for which a client tries to reconnect
            assert isinstance(consumer.error, StreamClosed)
        assert Counter(int(number) for _, numbers in another.batches() for number in numbers) == samples(0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system that a test can fill."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return ballast


def test_while_the_disk_is_full_only_groups_wait_and_go_on_where_they_were(serve: Serve, disk: Path) -> None:
    other = "\n    other = Feed(numbers, splits=range(8), batch_size=7, lanes=4)\n"
    daemon = serve(FEED + other, "feed", "other", state=disk / "state")
    consumers = [Consumer(daemon.urls["feed"], transport, epochs=2) for transport in ("local", "tcp")]
    until(consumers, 20)
    with penstock.connect(daemon.urls["other"], reconnect=0) as victim:
        batches = victim.batches()
        next(batches)
        ballast = fill(disk)
        wait(lambda: "group 'g' waits: cannot write the state file" in daemon.stderr())
        seen = 7 + sum(len(numbers) for _, numbers in batches)
        assert seen == 800
        before = sum(consumer.batches for consumer in consumers)
        time.sleep(1)  # they reconnect again and again, and are sent nothing
        assert sum(consumer.batches for consumer in consumers) <= before + 40
        with pytest.raises(penstock.DaemonStopped, match=r"cannot write the state file.*free some space"):
            penstock.connect(daemon.urls["feed"], group="another")
        ballast.unlink()
        assert len(list(victim.batches())) == 115
    for consumer in consumers:
        consumer.join(60)
    assert [consumer.error for consumer in consumers] == [None, None]
    for epoch in range(2):
        assert Counter(number for consumer in consumers for number in consumer.read[epoch]) == samples(epoch)


def test_who_comes_after_the_disk_was_full_gets_what_nobody_was_handed(serve: Serve, disk: Path) -> None:
    daemon = serve(FEED, state=disk / "state", patched={"coordinator.admission.groups.PATIENCE": 1.0})
    consumer = Consumer(daemon.url, "local", epochs=1, reconnect=0)
    until([consumer], 5)
    ballast = fill(disk)
    consumer.join(60)
    assert isinstance(consumer.error, penstock.DaemonStopped), "with reconnect=0 it must not wait"
    ballast.unlink()
    with penstock.connect(daemon.url, group="g") as another:
        rest = Counter(int(number) for _, numbers in another.batches() for number in numbers)
    assert rest <= samples(0)
    assert rest + Counter(consumer.read[0]) >= samples(0)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


FORGED = {
    "a negative count": "UPDATE groups SET batches = -1",
    "a text for a number": "UPDATE groups SET epoch = 'x'",
    "nothing for a number": "UPDATE groups SET rows = NULL",
    "an epoch that nobody can begin": "UPDATE groups SET epoch = 9007199254740993",
    "a number that is too large": "UPDATE groups SET merged = 9223372036854775807",
    "a digest of another length": "UPDATE groups SET digest = x'00'",
    "a text for a digest": "UPDATE groups SET digest = 7",
    "a feed that is none": "UPDATE groups SET info = x'c0'",
    "a number for a feed": "UPDATE groups SET info = 5",
    "another feed's name": "UPDATE groups SET feed = 'other'",
    "a number for a name": "UPDATE groups SET name = x'ff'",
    "an index out of range": "UPDATE places SET idx = 4611686018427387904",
    "a lane that is none": "UPDATE places SET lane = 99 WHERE lane = (SELECT max(lane) FROM places)",
    "a lane below all": "UPDATE places SET lane = -1 WHERE lane = (SELECT max(lane) FROM places)",
    "a record that is too large": "UPDATE places SET record = zeroblob(40000)",
    "a text for a record": "UPDATE places SET record = 12",
    "a lane twice": "INSERT INTO ended SELECT id, lane, 0, idx, 0, record FROM places LIMIT 1",
    "a lane that ended out of turn": "INSERT INTO ended SELECT id, 3, 5, 0, 0, x'' FROM places LIMIT 1",
    "batches of no lane": "INSERT INTO ahead SELECT id, 99, 5, 1 FROM groups",
    "too many batches at once": "INSERT INTO ahead SELECT id, 0, 5, 10000000 FROM groups",
    "no batches": "INSERT INTO ahead SELECT id, 0, 5, 0 FROM groups",
    "a consumer with a long name": "INSERT INTO consumers SELECT id, zeroblob(17) FROM groups",
    "a table that is missing": "DROP TABLE ahead",
}


class TestFile:
    @pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED.keys())
    def test_wrong_values_are_refused_at_the_start(self, tmp_path: Path, forged: str) -> None:
        path = tmp_path / "state"
        feed = World(SimFeed(turn=4, splits=(8, 8, 8), lanes=3)).coordinator.feeds["train"].info
        file = StateFile(path)
        keep = do.SaveGroup(
            feed, "g", 0, 8, 8, bytes(32), 0, places=((0, 4, b"record"), (1, 4, b"record")), arrived=b"a"
        )
        file.keep(keep)
        file.close()
        file = StateFile(path)
        assert list(file.load()) == [("train", "g")]
        file.close()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute(forged)
        file = StateFile(path)
        try:
            with pytest.raises(StartError, match=r"damaged.*Restore a copy of it, or delete it"):
                file.load()
        finally:
            file.close()

    def test_groups_whose_names_have_a_nul_are_told_apart(self, tmp_path: Path) -> None:
        feed = World(SimFeed(turn=4)).coordinator.feeds["train"].info
        names = ["a\0b", "a\0c", "é" * 128]
        file = StateFile(tmp_path / "state")
        for name in names:
            file.keep(do.SaveGroup(feed, name, 0, 0, 0, bytes(32), 0, arrived=b"a"))
        file.close()
        file = StateFile(tmp_path / "state")
        assert sorted(file.load()) == [("train", name) for name in names]
        file.close()

    def test_what_cannot_be_written_is_not_written_in_part_and_can_be_written_later(self, tmp_path: Path) -> None:
        feed = World(SimFeed(turn=4)).coordinator.feeds["train"].info
        keep = do.SaveGroup(feed, "g", 0, 0, 0, bytes(32), 0, arrived=b"a")
        file = StateFile(tmp_path / "state")
        (pages,) = file._do("PRAGMA page_count")[0]
        file._do(f"PRAGMA max_page_count = {pages}")
        large = tuple((lane, 4, bytes(30_000)) for lane in range(3))
        with pytest.raises(
            DaemonStopped, match=r"cannot write the state file .*\(database or disk is full\).*free some space"
        ):
            file.keep(replace(keep, places=large))
        assert file.kept("train", "g") is None
        file.keep(keep)
        with pytest.raises(DaemonStopped):
            file.keep(replace(keep, batches=12, places=large))
        kept = file.kept("train", "g")
        assert kept is not None
        assert (kept.position.batches, kept.position.places, kept.consumers) == (0, (), {b"a"})
        file._do("PRAGMA max_page_count = 1000000")
        file.keep(replace(keep, batches=12, places=large))
        file.forget("train", "g")
        file.close()
        file = StateFile(tmp_path / "state")
        assert not file.load()
        file.close()

    def test_a_group_that_could_not_be_deleted_is_deleted_before_another_of_its_name_begins(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        feed = World(SimFeed(turn=4)).coordinator.feeds["train"].info
        keep = do.SaveGroup(feed, "g", 3, 0, 0, bytes(32), 0, places=((0, 4, b"record"),), arrived=b"a")
        file = StateFile(tmp_path / "state")
        file.keep(keep)
        file._do("PRAGMA query_only = 1")
        with pytest.raises(DaemonStopped):
            file.forget("train", "g")
        assert file.to_forget == {("train", "g")}
        assert file.kept("train", "g") is None
        file._do("PRAGMA query_only = 0")
        file.keep(do.SaveGroup(feed, "g", 0, 0, 0, b"", 0, arrived=b"b"))
        assert not file.to_forget
        kept = file.kept("train", "g")
        file.close()
        assert kept is not None
        assert (kept.position.epoch, kept.position.places, kept.consumers) == (0, (), {b"b"})

    def test_a_file_is_one_daemons_until_that_ends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(statefile, "PATIENCE", 0.1)
        first = StateFile(tmp_path / "state")
        with pytest.raises(StartError, match="another daemon has this file"):
            StateFile(tmp_path / "state")
        first.close()
        StateFile(tmp_path / "state").close()

    def test_batches_beyond_the_position_stay_until_it_has_passed_all_of_them(self, tmp_path: Path) -> None:
        keep = do.SaveGroup(World(SimFeed(turn=4)).coordinator.feeds["train"].info, "g", 0, 0, 0, bytes(32), 0)
        file = StateFile(tmp_path / "state")
        file.keep(replace(keep, beyond=((0, 4, 4), (0, 9, 1)), arrived=b"a"))
        file.keep(
            replace(keep, batches=6, places=((0, 6, b"record"),), passed=((0, 6),), beyond=((0, 9, 1), (0, 4, 2)))
        )
        file.close()
        file = StateFile(tmp_path / "state")
        (kept,) = file.load().values()
        file.close()
        assert kept.beyond == ((0, 4, 4), (0, 9, 1)), "numbers 6 and 7 were handed over"
        assert (kept.position.batches, kept.position.places[0].index, kept.consumers) == (6, 6, {b"a"})

    def test_a_file_that_is_no_database_stays_as_it_is(self, tmp_path: Path) -> None:
        path = tmp_path / "notes"
        path.write_text("not to be lost\n" * 100)
        with pytest.raises(StartError, match="this is not a state file"):
            StateFile(path)
        assert path.read_text() == "not to be lost\n" * 100

    def test_another_programs_database_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "other"
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE theirs (x)")
        other.close()
        with pytest.raises(StartError, match="belongs to another program"):
            StateFile(path)

    def test_a_file_of_another_version_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        StateFile(tmp_path / "state").close()
        monkeypatch.setattr(statefile, "SCHEMA", 7)
        with pytest.raises(StartError, match="has version 3, and this Penstock writes version 7"):
            StateFile(tmp_path / "state")

    def test_a_daemon_that_cannot_write_its_file_does_not_start(self, tmp_path: Path) -> None:
        (tmp_path / "feeds.py").write_text("from penstock_server import Feed\nfeed = Feed(lambda: [], batch_size=1)\n")
        command = [sys.executable, "-m", "penstock_server", "serve", "feeds.py:feed", "--state", "nowhere/state"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "--state nowhere/state: cannot open and write the file" in done.stderr
