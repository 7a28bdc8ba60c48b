"""`penstock status` and the web page say why each consumer waits, whatever the cause.

(test_feeding.py tests that Keras' progress bar does so too, and test_page.py that a browser shows it.)
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

import penstock
from penstock_proto.status.stream_status import Stream
from penstock_server.cli.status_lines import status_lines
from penstock_server.to_daemon import control
from tests.conftest import Join, Serve
from tests.fakes.fault_proxy import FaultProxy
from tests.http.test_http import get

FEEDS = """
    import os
    import time
    import numpy as np
    from penstock_server import Feed, Leaf

    def slow(split):
        while True:
            time.sleep(0.02)
            yield np.zeros(4)

    def quick(split):
        block = np.zeros(250_000)
        while True:
            yield block

    def large(split):
        block = np.zeros(250_000)
        while True:
            time.sleep(0.02)
            yield block

    def one_slow(split):
        while True:
            time.sleep(0.05 if split == 3 else 0.001)
            yield np.zeros(4)

    def raises(split):
        raise OSError("the disk is away")
        yield

    def listed():
        time.sleep(0.5)
        return range(4)

    def late(split):
        for _ in range(64):
            time.sleep(0.1)
            yield np.zeros(4)

    def short(split):
        for _ in range(32):
            time.sleep(0.02)
            yield np.zeros(4)

    def slow_where_told(split):
        while True:
            time.sleep(0.005 + float(os.environ.get("SLOW", "0")))
            yield np.zeros(4)

    slow_on_one_host = Feed(slow_where_told, splits=range(16), batch_size=4)
    slow_split = Feed(one_slow, splits=range(16), batch_size=4)
    long_turns = Feed(slow, splits=range(16), batch_size=4, turn=128)
    odd_lanes = Feed(slow, splits=range(3), batch_size=4)
    raising = Feed(raises, splits=range(4), batch_size=4, on_error="retry", spec=Leaf("float64", (4,)))
    slow_listing = Feed(lambda split: iter([np.zeros(4)] * 4), splits=listed, batch_size=4)
    late_start = Feed(late, splits=range(16), batch_size=64)
    short_splits = Feed(short, splits=range(64), batch_size=4)
    slow_generator = Feed(slow, splits=range(16), batch_size=4, turn=1)
    one_lane = Feed(slow, splits=range(1), batch_size=4, turn=1)
    fast = Feed(quick, splits=range(16), batch_size=1, turn=1)
    large = Feed(large, splits=range(16), batch_size=4, turn=1)
"""


@contextmanager
def reading(url: str, *steps: float, transport: str = "auto") -> Iterator[None]:
    """Read epochs on threads, with training steps that sleep. Several consumers are ranks."""
    ends = threading.Event()
    began = threading.Barrier(len(steps) + 1)
    connections = []

    def read(rank: int, step: float) -> None:
        ranks: dict[str, Any] = {"rank": rank, "world_size": len(steps)} if len(steps) > 1 else {}
        with (
            suppress(penstock.StreamClosed),  # closed below, or by another rank
            penstock.connect(url, transport=transport, **ranks) as connection,
        ):
            connections.append(connection)
            began.wait(60)
            while not ends.is_set():
                for _ in connection.batches():
                    if ends.wait(step):
                        break

    threads = [threading.Thread(target=read, args=place) for place in enumerate(steps)]
    for thread in threads:
        thread.start()
    try:
        began.wait(60)
        yield
    finally:
        ends.set()
        for connection in connections:
            connection.close()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("feed", "steps", "options", "limits"),
    [
        ("slow_generator", [0.5], {}, ["consumer"]),
        ("slow_generator", [0.0], {}, ["generator"]),
        ("one_lane", [0.0], {}, ["lanes"]),
        ("fast", [0.0], {"throttled": True}, ["transport"]),
        ("large", [0.0], {"workers": 4, "memory": "60M"}, ["memory"]),
        ("slow_split", [0.0], {"workers": 4}, ["split"]),
        ("long_turns", [0.0], {"workers": 4}, ["turn"]),
        ("odd_lanes", [0.0], {"workers": 2}, ["lanes"]),
        ("slow_listing", [0.0], {}, ["listing"]),
        ("raising", [0.0], {}, ["workers"]),
        ("late_start", [0.0], {}, ["start"]),
        ("slow_generator", [0.0, 1.0], {}, ["ranks", "consumer"]),
    ],
)
def test_the_verdict_names_the_cause(
    serve: Serve, feed: str, steps: list[float], options: dict[str, Any], limits: list[str]
) -> None:
    throttled = options.pop("throttled", False)
    daemon = serve(FEEDS, feed, http=0, **options)
    with ExitStack() as stack:
        url = daemon.url
        if throttled:
            proxy = stack.enter_context(FaultProxy(int(re.search(r":(\d+)/", url)[1])))  # type: ignore[index]
            proxy.throttle(4_000_000, 60)
            url = re.sub(r":\d+/", f":{proxy.port}/", url)
        stack.enter_context(reading(url, *steps, transport="tcp" if throttled else "auto"))
        until = time.monotonic() + 60
        while True:  # the first seconds may belong to the start
            state = control.status(daemon.url, 60)
            streams = sorted(state.streams, key=lambda stream: stream.rank or 0)
            if [stream.limit for stream in streams] == limits or time.monotonic() > until:
                break
            time.sleep(0.2)
        assert [stream.limit for stream in streams] == limits, streams
        shown = "\n".join(status_lines(state))
        for stream in streams:
            assert stream.headline in shown
        _, _, text = get(daemon, "/api/live?seconds=0&minutes=0&looks=0&changes=0")
        page = json.loads(text)["status"]["streams"]
        assert [one["limit"] for one in sorted(page, key=lambda one: one["rank"] or 0)] == limits
        assert all(one["verdict"] for one in page)


def judged(url: str, limit: str) -> Stream:
    """Wait until the only stream has this verdict, and return it."""
    until = time.monotonic() + 60
    while True:
        (stream,) = control.status(url, 60).streams
        if stream.limit == limit or time.monotonic() > until:
            assert stream.limit == limit, stream
            return stream
        time.sleep(0.1)


def test_after_a_change_of_the_workers_the_verdict_waits_and_then_counts_the_new_ones(serve: Serve) -> None:
    daemon = serve(FEEDS, "short_splits")
    with reading(daemon.url, 0.0):
        assert "add workers (2 -> " in judged(daemon.url, "generator").headline
        control.scale(daemon.url, 8, now=False, timeout=60)
        assert "the number of workers went from 2 to 8" in judged(daemon.url, "unknown").verdict
        assert "8 workers make" in judged(daemon.url, "generator").verdict


def test_a_worker_that_a_signal_has_stopped_is_named(serve: Serve) -> None:
    daemon = serve(FEEDS, "slow_generator")
    with reading(daemon.url, 0.0):
        judged(daemon.url, "generator")
        one, _ = daemon.workers()
        one.suspend()
        try:
            assert re.search(r"worker [01] is stopped by a signal", judged(daemon.url, "workers").headline)
        finally:
            one.resume()


def test_a_slow_host_is_named(serve: Serve, join: Join) -> None:
    daemon = serve(FEEDS, "slow_on_one_host")
    join(daemon, "slow_on_one_host", workers=2, env={"SLOW": "0.1"})
    with reading(daemon.url, 0.0):
        assert "makes the next batch in" in judged(daemon.url, "host").headline
