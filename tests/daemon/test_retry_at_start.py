"""`on_error="retry"` applies from the start: a disk that is away for a while ends neither a daemon nor a stream."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock_server.cli.status_lines import status_lines
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve, kill

FEEDS = """
    import glob, os, signal
    import numpy as np
    from penstock_server import Feed

    def disk():
        if not os.path.exists("disk"):
            raise FileNotFoundError("the disk is away")

    def numbers(split):
        disk()
        for i in range(10):
            yield np.int64(10 * int(str(split)[-1]) + i)

    def listed():
        disk()
        return range(3)

    def globbed():
        return sorted(glob.glob("disk/*"))

    def killed():
        if not os.path.exists("disk"):
            os.kill(os.getpid(), signal.SIGKILL)
        return range(3)

    def at_first(split):
        if not os.path.exists("disk"):
            os.kill(os.getpid(), signal.SIGKILL)
        return numbers(split)

    class Items:
        def __len__(self):
            return 30
        def __getitem__(self, i):
            disk()
            return np.int64(i)

    sample = Feed(numbers, splits=range(3), batch_size=5, on_error="retry")
    listing = Feed(numbers, splits=listed, batch_size=5, on_error="retry")
    globbing = Feed(numbers, splits=globbed, batch_size=5, on_error="retry")
    item = Feed(Items(), batch_size=5, on_error="retry")
    dying = Feed(numbers, splits=killed, batch_size=5, on_error="retry")
    dying_later = Feed(at_first, splits=range(3), batch_size=5, on_error="retry")
    raising = Feed(numbers, splits=listed, batch_size=5)
    wrong = Feed(numbers, splits=lambda: 7, batch_size=5, on_error="retry")
    there = Feed(lambda split: iter([np.int64(split)]), splits=range(3), batch_size=1)
"""


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def come_back(daemon: Daemon) -> None:
    (daemon.folder / "new").mkdir()
    for name in range(3):
        (daemon.folder / "new" / str(name)).touch()
    os.rename(daemon.folder / "new", daemon.folder / "disk")


def collect(url: str, seen: list[list[int]]) -> None:
    seen.append(read(url))


def read(url: str) -> list[int]:
    with penstock.connect(url) as connection:
        return sorted(n for batch in connection.batches() for n in batch.tolist())


@pytest.mark.parametrize(
    ("feed", "why"),
    [
        ("sample", "the disk is away"),
        ("listing", "the disk is away"),
        ("globbing", "globbed returned none"),
        ("item", "the disk is away"),
        ("dying", "was killed by SIGKILL"),
        ("dying_later", "was killed by SIGKILL"),
    ],
)
def test_a_start_that_fails_is_tried_again_until_it_succeeds(serve: Serve, feed: str, why: str) -> None:
    daemon = serve(FEEDS, feed, ready=False, patched={"workers.supervisor.LAST_PAUSE": 0.1})
    until(lambda: "cannot be started yet" in daemon.stderr())
    assert why in daemon.stderr()
    time.sleep(0.7)  # time for some more tries
    assert daemon.process.poll() is None
    assert daemon.stderr().count("cannot be started yet") == 1, "the log says it once"
    come_back(daemon)
    daemon.wait_ready(1)
    assert read(daemon.url) == list(range(30))


def test_while_a_feed_waits_others_are_read_and_its_clients_wait_as_they_do_for_imports(serve: Serve) -> None:
    daemon = serve(FEEDS, "sample", "there", ready=False)
    daemon.wait_ready(1)
    url = daemon.urls["there"]
    assert read(url) == [0, 1, 2]
    until(lambda: "cannot be started yet" in daemon.stderr())
    state = control.status(url, 60)
    assert not state.ready
    (failing,) = state.failing
    assert failing.feed == "sample"
    assert failing.times >= 1
    assert "the disk is away" in failing.error
    lines = list(status_lines(state))
    assert any("sample" in line and "not ready" in line and "the disk is away" in line for line in lines)
    waiting = url.replace("there", "sample")
    with pytest.raises(penstock.PenstockError):
        penstock.connect(waiting, timeout=0.5)
    seen: list[list[int]] = []
    reader = threading.Thread(target=collect, args=(waiting, seen))
    reader.start()
    time.sleep(0.2)
    come_back(daemon)
    reader.join()
    assert seen == [list(range(30))]
    assert control.status(url, 60).failing == []


def test_a_daemon_that_waits_can_be_stopped(serve: Serve) -> None:
    daemon = serve(FEEDS, "sample", ready=False)
    until(lambda: "cannot be started yet" in daemon.stderr())
    assert daemon.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("feed", "why"), [("raising", "the disk is away"), ("wrong", "given as splits=, must return a list")]
)
def test_other_failures_still_end_the_start(serve: Serve, feed: str, why: str) -> None:
    daemon = serve(FEEDS, feed, ready=False)
    assert daemon.process.wait(60) == 1
    assert why in daemon.stderr()


def test_a_list_of_splits_that_cannot_be_made_for_an_epoch_is_asked_for_again(serve: Serve) -> None:
    daemon = serve(FEEDS, "listing", "dying", "raising", ready=False, patched={"workers.supervisor.LAST_PAUSE": 0.1})
    come_back(daemon)
    daemon.wait_ready(3)
    os.rename(daemon.folder / "disk", daemon.folder / "gone")
    with penstock.connect(daemon.urls["raising"]) as connection:
        with pytest.raises(penstock.GeneratorError, match="the disk is away"):
            list(connection.batches())
    for feed in ("listing", "dying"):
        seen: list[list[int]] = []
        reader = threading.Thread(target=collect, args=(daemon.urls[feed], seen))
        reader.start()
        time.sleep(0.7)
        assert not seen
        os.rename(daemon.folder / "gone", daemon.folder / "disk")
        reader.join()
        assert seen == [list(range(30))]
        os.rename(daemon.folder / "disk", daemon.folder / "gone")


def test_workers_that_cannot_import_for_a_while_come_back(serve: Serve) -> None:
    daemon = serve(
        """
        import os
        if os.path.exists("away"):
            raise FileNotFoundError("the disk is away")
        """
        + FEEDS.replace("\n    ", "\n        "),
        "there",
        "item",
        ready=False,
        patched={"workers.supervisor.LAST_PAUSE": 0.1, "coordinator.model.failures.LAST_PAUSE": 0.2},
    )
    come_back(daemon)
    daemon.wait_ready(2)
    (daemon.folder / "away").touch()
    kill(daemon.workers())
    until(lambda: daemon.stderr().count("can no longer start") >= 12)
    (daemon.folder / "away").unlink()
    assert read(daemon.urls["item"]) == list(range(30))
