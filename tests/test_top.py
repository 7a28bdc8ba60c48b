"""`penstock top`: rates, worker states, and the cause for which each consumer waits."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from conftest import Daemon, Serve
from fault_proxy import FaultProxy

import penstock
from penstock_proto.status_history import FEWEST_LOOKS, WINDOW, History

FEEDS = """
    import time
    import numpy as np
    from penstock_server import Feed

    def slow(split):
        while True:
            time.sleep(0.02)
            yield np.zeros(4)

    def quick(split):
        block = np.zeros(250_000)
        while True:
            yield block

    slow_generator = Feed(slow, splits=range(16), batch_size=4, turn=1)
    one_lane = Feed(slow, splits=range(1), batch_size=4, turn=1)
    fast = Feed(quick, splits=range(16), batch_size=1, turn=1)
"""


def status(seconds: float, batches: int, queued: int = 0, pid: int = 7, **more: Any) -> dict[str, Any]:
    """A status of a daemon with one feed, one worker that is always in user code, and one consumer."""
    feed = {
        "name": "train",
        "url": "tcp://127.0.0.1:5555/train",
        "spec": "(uint8[4], int64[])",
        "batch_size": 2,
        "lanes": 16,
        "order": "exact",
        "splits": 64,
        "indexable": False,
        "consumers": 1,
        "sent": {"batches": batches, "samples": 2 * batches, "bytes": 1_000_000 * batches},
    }
    spent = {
        "seconds": seconds,
        "idle_seconds": 0.0,
        "user_seconds": seconds,
        "cpu_seconds": 0.0,
        "cpu_wait_seconds": 0.0,
    }
    worker = {"number": 0, "pid": 70, "restarts": 0, "spent": spent}
    stream = {
        "feed": "train",
        "client": "host:1",
        "transport": "local",
        "rank": None,
        "epoch": 0,
        "reading": True,
        "sent": 100 + queued,
        "handed": 100,
        "unsent": False,
    }
    return {
        "endpoint": "tcp://127.0.0.1:5555",
        "pid": pid,
        "seconds": seconds,
        "cpus": 8,
        "cpu_seconds": 0.0,
        "memory": {"allowed": 100, "reserved": 10},
        "feeds": [feed],
        "workers": [worker],
        "streams": [{**stream, **more}],
        "more_streams": 0,
    }


def test_rates_are_averages_of_the_window() -> None:
    history = History()
    for second in range(30):
        history.add(status(second, 5 * second if second < 20 else 100 + 20 * (second - 20)))
    (feed,) = history.feeds()
    assert history.seconds == WINDOW
    assert (feed.batches, feed.samples, feed.megabytes) == pytest.approx((18.5, 37, 18.5))
    assert feed.history[-1] == 20
    assert feed.history[0] == 5
    assert history.workers()[0].generating == pytest.approx(1)


def test_a_consumer_waits_where_nothing_lies_ready_or_its_connection_takes_no_more() -> None:
    for looks, waiting in (
        ([{"queued": 0}] * 8, 1.0),
        ([{"queued": 2}] * 8, 0.0),
        ([{"queued": 2}, {"queued": 0}] * 4, 0.5),
        ([{"queued": 2, "unsent": True}] * 8, 1.0),
    ):
        history = History()
        for second, look in enumerate(looks):
            history.add(status(second, second, **look))
        (consumer,) = history.consumers()
        assert consumer.waiting == waiting
        assert consumer.queued == looks[-1]["queued"]
        assert consumer.verdict.startswith("The generator is the limit" if waiting else "The loader keeps up")


def test_there_is_no_verdict_before_there_is_enough_to_judge_and_none_between_epochs() -> None:
    history = History()
    for second in range(FEWEST_LOOKS - 1):
        history.add(status(second, second))
        (consumer,) = history.consumers()
        assert (consumer.waiting, consumer.verdict) == (None, "")
    history.add(status(10, 0, reading=False))
    (consumer,) = history.consumers()
    assert consumer.verdict == ""


def test_another_daemon_at_the_same_address_begins_a_new_history() -> None:
    history = History()
    for second in range(5):
        history.add(status(second, 10 * second))
    history.add(status(1, 3, pid=8))
    assert history.seconds == 0
    assert history.feeds()[0].batches == 0
    assert history.feeds()[0].history == ()
    assert history.workers() == {}


def test_two_streams_of_one_process_are_two_consumers() -> None:
    history = History()
    for second in range(5):
        state = status(second, second)
        state["streams"].append({**state["streams"][0], "sent": 105})
        history.add(state)
    assert [consumer.waiting for consumer in history.consumers()] == [1.0, 0.0]


@contextmanager
def reading(url: str, step: float = 0.0, transport: str = "auto") -> Iterator[None]:
    """A consumer on a thread, with a training step that sleeps."""
    with penstock.connect(url, transport=transport) as connection:
        ends = threading.Event()
        first = threading.Event()

        def read() -> None:
            for _ in connection.batches():
                first.set()
                if ends.wait(step) if step else ends.is_set():
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


@pytest.mark.parametrize(
    ("feed", "step", "throttled", "cause"),
    [
        ("slow_generator", 0.0, False, "The generator is the limit: 2 workers"),
        ("slow_generator", 1.0, False, "The loader keeps up"),
        ("one_lane", 0.0, False, "Only 1 of 2 workers is busy: the feed has 1 lane"),
        ("fast", 0.0, True, "The connection to the consumer is the limit"),
    ],
)
def test_the_verdict_names_the_cause(serve: Serve, feed: str, step: float, throttled: bool, cause: str) -> None:
    daemon = serve(FEEDS, feed)
    with ExitStack() as stack:
        url = daemon.url
        if throttled:
            proxy = stack.enter_context(FaultProxy(int(re.search(r":(\d+)/", url)[1])))  # type: ignore[index]
            proxy.throttle(4_000_000, 60)
            url = re.sub(r":\d+/", f":{proxy.port}/", url)
        stack.enter_context(reading(url, step, "tcp" if throttled else "auto"))
        until = time.monotonic() + 60
        while True:  # the first seconds may belong to the start
            (consumer,) = json.loads(top(daemon, "--json", "--every", "0.4"))["consumers"]
            if consumer["verdict"].startswith(cause) or time.monotonic() > until:
                break
        assert consumer["verdict"].startswith(cause), consumer


def test_the_screen_shows_feeds_workers_and_consumers(serve: Serve) -> None:
    daemon = serve(FEEDS, "slow_generator")
    with reading(daemon.url):
        said = top(daemon, "--once", "--every", "0.3")
    for words in ("slow_generator", "batches/s", "generating", "consumer", f":{os.getpid()}", "ready"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 80


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
