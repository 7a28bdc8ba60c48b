"""With `--state FILE` a group's stream outlives its daemon, however that ends."""

from __future__ import annotations

import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import Serve
from msgspec.structs import replace
from simulation import SimFeed, World

import penstock
from penstock import StateMismatch, StreamClosed
from penstock_proto import StartError
from penstock_server import statefile
from penstock_server.coordinator import commands as do
from penstock_server.coordinator.gathering import Ask
from penstock_server.statefile import StateFile

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


def an_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


class Consumer(threading.Thread):
    """Reads epochs of a group, and notes what it was handed in each; `error` says why it could not."""

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
    """Wait until they were handed so many batches together."""
    deadline = time.monotonic() + 60
    while sum(consumer.batches for consumer in consumers) < batches:
        assert time.monotonic() < deadline
        assert [consumer.error for consumer in consumers if consumer.error] == []
        time.sleep(0.002)


def test_each_batch_is_handed_over_once_though_the_daemon_is_killed_again_and_again(
    serve: Serve, tmp_path: Path
) -> None:
    options = {"bind": an_address(), "state": tmp_path / "state"}
    daemon = serve(FEED, **options)
    consumers = [Consumer(daemon.url, transport, epochs=3) for transport in ("local", "local", "tcp")]
    for batches in (20, 45, 80):  # of 115 in an epoch
        until(consumers, batches)
        daemon.stop(signal.SIGKILL)
        daemon = serve(FEED, **options)
    until(consumers, 130)
    assert daemon.stop() == 0, "it stopped when the second epoch had ended"
    serve(FEED, **options)
    for consumer in consumers:
        consumer.join(60)
    assert [consumer.error for consumer in consumers] == [None] * 3
    for epoch in range(3):
        assert Counter(number for consumer in consumers for number in consumer.read[epoch]) == samples(epoch)
        assert all(consumer.read[epoch] for consumer in consumers), "everybody got some"


def test_another_feed_is_refused_and_both_are_named(serve: Serve, tmp_path: Path) -> None:
    options = {"bind": an_address(), "state": tmp_path / "state"}
    daemon = serve(FEED, **options)
    consumer = Consumer(daemon.url, "local", epochs=1, reconnect=5)
    until([consumer], 5)
    daemon.stop(signal.SIGKILL)
    daemon = serve(FEED, env={"SEED": "1"}, **options)
    with pytest.raises(StateMismatch, match=r"'g'.*seed was 0 and is 1 now"):
        penstock.connect(daemon.url, group="g")
    consumer.join(60)
    assert isinstance(consumer.error, StateMismatch)


def test_without_a_state_file_the_error_tells_of_it() -> None:
    ask = Ask(credit=4, credit_bytes=0, quota=0, again=True, group="g")
    with pytest.raises(StreamClosed, match=r"'g' is not here any more.*`penstock serve --state FILE`"):
        World(SimFeed()).coordinator.open("train", ask)


def test_without_a_state_file_the_consumers_of_a_killed_daemon_fail_at_once(serve: Serve) -> None:
    bind = an_address()
    daemon = serve(FEED, bind=bind)
    consumers = [Consumer(daemon.url, transport, epochs=1) for transport in ("local", "tcp")]
    until(consumers, 5)
    daemon.stop(signal.SIGKILL)
    daemon = serve(FEED, bind=bind)
    with penstock.connect(daemon.url, group="g") as another:  # who begins anew is not joined by who comes back
        for consumer in consumers:
            consumer.join(30)  # and not the 60 s for which a connection is looked for
            assert isinstance(consumer.error, StreamClosed)
        assert Counter(int(number) for _, numbers in another.batches() for number in numbers) == samples(0)


class TestFile:
    def test_a_file_is_one_daemons_until_that_ends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(statefile, "PATIENCE", 0.1)
        first = StateFile(tmp_path / "state")
        with pytest.raises(StartError, match="another daemon has this file"):
            StateFile(tmp_path / "state")
        first.close()
        StateFile(tmp_path / "state").close()

    def test_batches_ahead_stay_until_all_of_them_are_behind(self, tmp_path: Path) -> None:
        keep = do.Keep(World(SimFeed(turn=4)).coordinator.feeds["train"].info, "g", 0, 0, 0, bytes(32), 0)
        file = StateFile(tmp_path / "state")
        file.keep(replace(keep, ahead=((0, 4, 4), (0, 9, 1)), arrived=b"a"))
        file.keep(replace(keep, batches=6, places=((0, 6, b"record"),), behind=((0, 6),), ahead=((0, 9, 1), (0, 4, 2))))
        file.close()
        file = StateFile(tmp_path / "state")
        (kept,) = file.load().values()
        file.close()
        assert kept.ahead == ((0, 4, 4), (0, 9, 1)), "numbers 6 and 7 were handed over"
        assert (kept.position.batches, kept.position.places[0].index, kept.consumers) == (6, 6, {b"a"})

    def test_a_file_that_is_no_database_stays_as_it_is(self, tmp_path: Path) -> None:
        path = tmp_path / "notes"
        path.write_text("not to be lost\n" * 100)
        with pytest.raises(StartError, match="this is no state file"):
            StateFile(path)
        assert path.read_text() == "not to be lost\n" * 100

    def test_another_programs_database_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "other"
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE theirs (x)")
        other.close()
        with pytest.raises(StartError, match="another program's database"):
            StateFile(path)

    def test_a_file_of_another_version_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        StateFile(tmp_path / "state").close()
        monkeypatch.setattr(statefile, "SCHEMA", 7)
        with pytest.raises(StartError, match="has version 2, and this Penstock writes version 7"):
            StateFile(tmp_path / "state")

    def test_a_daemon_that_cannot_write_its_file_does_not_start(self, tmp_path: Path) -> None:
        (tmp_path / "feeds.py").write_text("from penstock_server import Feed\nfeed = Feed(lambda: [], batch_size=1)\n")
        command = [sys.executable, "-m", "penstock_server", "serve", "feeds.py:feed", "--state", "nowhere/state"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert done.returncode == 1
        assert "--state nowhere/state: the file cannot be opened and written" in done.stderr
