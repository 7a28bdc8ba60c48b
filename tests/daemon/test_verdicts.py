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
from penstock_server.cli.status_lines import status_lines
from penstock_server.to_daemon import control
from tests.conftest import Serve
from tests.fakes.fault_proxy import FaultProxy
from tests.http.test_http import get

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

    def large(split):
        block = np.zeros(250_000)
        while True:
            time.sleep(0.02)
            yield block

    slow_generator = Feed(slow, splits=range(16), batch_size=4, turn=1)
    one_lane = Feed(slow, splits=range(1), batch_size=4, turn=1)
    fast = Feed(quick, splits=range(16), batch_size=1, turn=1)
    large = Feed(large, splits=range(16), batch_size=4, turn=1)
"""


@contextmanager
def reading(url: str, *steps: float, transport: str = "auto") -> Iterator[None]:
    """Read on threads, with training steps that sleep. Several consumers are ranks."""
    ends = threading.Event()
    began = threading.Barrier(len(steps) + 1)

    def read(rank: int, step: float) -> None:
        ranks: dict[str, Any] = {"rank": rank, "world_size": len(steps)} if len(steps) > 1 else {}
        with penstock.connect(url, transport=transport, **ranks) as connection:
            batches = connection.batches()
            next(batches)
            began.wait(60)
            with suppress(penstock.StreamClosed):  # another rank has closed first
                while not ends.wait(step):
                    next(batches)

    threads = [threading.Thread(target=read, args=place) for place in enumerate(steps)]
    for thread in threads:
        thread.start()
    try:
        began.wait(60)
        yield
    finally:
        ends.set()
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
