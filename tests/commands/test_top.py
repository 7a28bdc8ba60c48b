"""`penstock top` shows the rates, the states of workers, and why each consumer waits."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

import penstock
from penstock.commands.top_history import Looks
from penstock.commands.top_screen import _name_of, as_json, screen
from penstock_proto.status.feed_status import Feed, Sent
from penstock_proto.status.status_shape import Status
from penstock_proto.status.stream_status import Stream
from penstock_proto.status.worker_status import Worker
from penstock_server.cli.status_lines import status_lines
from tests.conftest import Daemon, Serve
from tests.fakes.statuses import of

FEEDS = """
    import time
    import numpy as np
    from penstock_server import Feed

    def slow(split):
        while True:
            time.sleep(0.02)
            yield np.zeros(4)

    slow_generator = Feed(slow, splits=range(16), batch_size=4, turn=1)
"""


def test_the_history_of_a_feed_is_its_speed_between_looks_and_ends_with_its_daemon() -> None:
    def status(seconds: float, batches: int, daemon: str = "a") -> Status:
        return of(Status, id=daemon, seconds=seconds, feeds=[of(Feed, name="train", sent=of(Sent, batches=batches))])

    looks = Looks()
    for state in (status(1, 0), status(2, 5), status(4, 25), status(4, 25)):
        looks.add(state)
    assert looks.rates("train") == (5, 10)
    looks.add(status(1, 3, "renewed"))
    assert looks.rates("train") == ()
    assert looks.latest.id == "renewed"


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Read a feed on a thread."""
    with penstock.connect(url) as connection:
        ends = threading.Event()
        first = threading.Event()

        def read() -> None:
            for _ in connection.batches():
                first.set()
                if ends.is_set():
                    break

        thread = threading.Thread(target=read)
        thread.start()
        try:
            assert first.wait(60)
            yield
        finally:
            ends.set()
            thread.join()


def top(daemon: Daemon, *options: str) -> str:
    words = [sys.executable, "-m", "penstock_command", "top", daemon.url, *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_json_has_what_the_screen_shows(serve: Serve) -> None:
    daemon = serve(FEEDS, "slow_generator")
    with reading(daemon.url):
        until = time.monotonic() + 60
        while True:
            said = json.loads(top(daemon, "--json", "--every", "0.4"))
            (consumer,), (feed,), shares = said["consumers"], said["feeds"], said["workers"][0]["shares"]
            if (consumer["limit"] == "generator" and feed["rates"] and shares) or time.monotonic() > until:
                break
    assert consumer["limit"] == "generator", consumer
    assert consumer["verdict"].startswith("The generator is the limit: 2 workers")
    assert consumer["waiting"] > 0.5
    assert feed["rates"]["batches"] > 0
    assert [worker["number"] for worker in said["workers"]] == [0, 1]
    assert shares["generating"] > 0.5


def test_the_screen_shows_feeds_workers_and_consumers(serve: Serve) -> None:
    daemon = serve(FEEDS, "slow_generator")
    with reading(daemon.url):
        said = top(daemon, "--once", "--every", "0.3")
    for words in ("slow_generator", "batches/s", "generating", "consumer", f":{os.getpid()}", "ready"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 80


def test_without_a_terminal_the_screen_is_printed_once(serve: Serve) -> None:
    assert "slow_generator" in top(serve(FEEDS, "slow_generator"), "--every", "0.2")


def test_the_screen_says_what_was_left_out() -> None:
    feeds = [
        of(Feed, name="train", dropped=1204, skipped_count=1),
        of(Feed, name="val", dropped=1, skipped_count=0),
        of(Feed, name="whole", dropped=0, skipped_count=0),
    ]
    looks = Looks()
    looks.add(of(Status, feeds=feeds))
    console = Console(file=io.StringIO(), width=80)
    console.print(screen(looks))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "train: 1204 samples dropped, 1 split skipped\n" in said
    assert "val: 1 sample dropped\n" in said
    assert "whole:" not in said
    assert as_json(looks)["feeds"][0]["dropped"] == 1204


def test_status_and_top_say_which_jobs_share_and_why_one_does_not() -> None:
    feed = of(Feed, name="train", url="tcp://loader:5555/train", made=12000, sent=of(Sent, batches=35900))
    jobs = [of(Stream, stream=1, feed="train", client=f"gpu:{pid}", jobs=2) for pid in (1, 2)]
    why = "it reads epoch 3, and the others read epoch 1"
    jobs.append(of(Stream, stream=2, feed="train", client="gpu:3", jobs=1, apart_because=why))
    status, looks = of(Status, feeds=[feed], streams=jobs), Looks()
    looks.add(status)
    console = Console(width=80, file=io.StringIO())
    console.print(screen(looks))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    shared = "train: 2 of 3 jobs share: 12,000 batches made, 35,900 sent"
    assert shared in drawn
    assert f"gpu:3: shares with no other: {why}" in drawn.replace("\n", " ")
    assert f"shared   {shared}" in list(status_lines(status))
    together = of(Status, feeds=[feed], streams=jobs[:2])
    assert "shared   train: 2 jobs share: 12,000 batches made, 35,900 sent" in list(status_lines(together))
    alone = of(Status, feeds=[feed], streams=[of(Stream, stream=1, feed="train", client="gpu:1", jobs=1)])
    assert not any("share" in line for line in status_lines(alone))


def test_a_long_name_of_a_host_leaves_room_for_the_figures() -> None:
    assert _name_of(of(Worker, name="second/3")) == "second/3"
    assert _name_of(of(Worker, name="loader-17.cluster.example.org/12")) == "loader-17.clust…/12"
    assert _name_of(of(Worker, name="3")) == "3"


def test_the_live_screen_survives_the_daemon_and_ends_with_ctrl_c(serve: Serve) -> None:
    daemon = serve(FEEDS, "slow_generator")
    parent, child = pty.openpty()
    words = [sys.executable, "-m", "penstock_command", "top", daemon.url, "--every", "0.2"]
    process = subprocess.Popen(words, stdin=child, stdout=child, stderr=child, start_new_session=True)
    os.close(child)
    try:
        seen = ""

        def until(true: Callable[[], bool]) -> None:
            nonlocal seen
            deadline = time.monotonic() + 60
            while not true():
                assert time.monotonic() < deadline, seen
                if select.select([parent], [], [], 0.1)[0]:
                    seen += os.read(parent, 65536).decode(errors="replace")

        until(lambda: "slow_generator" in seen)
        daemon.stop()
        until(lambda: "no daemon answered" in seen)
        process.send_signal(2)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def test_a_daemon_that_is_not_there_is_an_error() -> None:
    words = [sys.executable, "-m", "penstock_command", "top", "tcp://127.0.0.1:9", "--once"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no daemon answered at tcp://127.0.0.1:9" in done.stderr
