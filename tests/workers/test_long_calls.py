"""A call of user code that takes long, and may even end its worker, holds up the stream of its own feed only."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock_server.coordinator.model import events as on
from penstock_server.workers import long_calls
from penstock_server.workers.long_calls import LongCalls
from tests.conftest import Serve
from tests.daemon.test_shutdown import comes

FEEDS = """
    import os, signal, time

    import numpy as np
    from penstock_server import Feed, Leaf

    HERE = os.path.dirname(os.path.abspath(__file__))

    def stands(split):
        times = sum(name.startswith("stands") for name in os.listdir(HERE))
        open(f"{HERE}/stands{times}", "w").close()
        while not os.path.exists(f"{HERE}/goes_on{times}"):
            time.sleep(0.01)
        if times < DEATHS:
            os.kill(os.getpid(), signal.SIGKILL)
        yield np.int64(split)

    def swift(split):
        for number in range(8):
            yield np.full(1 << 16, 8 * split + number)

    class Items:
        def __len__(self):
            return 320

        def __getitem__(self, index):
            return np.full(1 << 16, index)

    feed = Feed(stands, splits=range(2), batch_size=1, lanes=1, on_error="skip", spec=Leaf("int64", ()))
    lanes = Feed(swift, splits=range(40), batch_size=2, lanes=4, turn=2)
    pools = Feed(swift, splits=range(40), batch_size=2, lanes=4, turn=2, shuffle=16)
    items = Feed(Items(), batch_size=2, turn=2)
    listed = Feed(swift, splits=lambda: range(40), batch_size=2, lanes=4, turn=2)
"""


@pytest.mark.parametrize("deaths", [0, 3])
@pytest.mark.parametrize("other", ["lanes", "pools", "items", "listed"])
def test_a_long_call_of_one_feed_does_not_hold_up_another_even_if_it_ends_its_worker(
    serve: Serve, other: str, deaths: int
) -> None:
    daemon = serve(FEEDS.replace("DEATHS", str(deaths)), "feed", other, memory="96M")
    read: list[int] = []

    def consume() -> None:
        with penstock.connect(daemon.urls["feed"]) as connection:
            read.extend(int(batch[0]) for batch in connection.batches())

    consumer = threading.Thread(target=consume)
    with penstock.connect(daemon.urls[other]) as connection:
        whole = [int(label) for batch in connection.batches() for label in batch[:, 0]]
        assert sorted(whole) == list(range(320))
        for times in range(max(1, deaths)):
            batches = connection.batches()
            epoch = [int(label) for batch in islice(batches, 8) for label in batch[:, 0]]
            if not times:
                consumer.start()
            assert comes((daemon.folder / f"stands{times}").exists)
            epoch += [int(label) for batch in batches for label in batch[:, 0]]  # it would wait for ever
            assert sorted(epoch) == list(range(320))
            assert other == "pools" or epoch == whole
            (daemon.folder / f"goes_on{times}").touch()
        for times in range(max(1, deaths), 8):
            (daemon.folder / f"goes_on{times}").touch()
        consumer.join(60)
    assert read == ([1] if deaths else [0, 1])


@dataclass
class Worker:
    """A worker as LongCalls sees it."""

    number: int = 0
    ready: bool = True
    unsent: bool = False
    calls: list[tuple[int, float]] = field(default_factory=lambda: [(-1, 0.0)])
    drained: int = 0

    @property
    def peer(self) -> Worker:
        return self

    def drain(self) -> None:
        self.drained += 1

    def call(self) -> tuple[int, float]:
        return self.calls.pop(0) if len(self.calls) > 1 else self.calls[0]


class Looking:
    """Looks at one worker again and again."""

    def __init__(self, streams: int = 2) -> None:
        self.worker: Any = Worker()
        self.told: list[on.WorkerStands | on.WorkerGoesOn] = []
        checks: Any = SimpleNamespace(stands=lambda worker: None)
        self._standing = LongCalls({0: self.worker}, range(streams), checks, self.told.append)

    def look(self, *calls: tuple[int, float], now: float = 0.0) -> list[on.WorkerStands | on.WorkerGoesOn]:
        """Return what the coordinator is told if the worker is found in these calls, one after another."""
        self.told.clear()
        self.worker.calls = list(calls)
        self._standing.look(now)
        return list(self.told)


def test_a_worker_stands_if_all_was_sent_to_it_and_it_is_still_in_a_step_of_the_same_run() -> None:
    looking = Looking()
    assert looking.look((7, long_calls.STANDS - 0.01)) == []
    assert looking.look((-1, 9.0)) == []
    assert looking.look((7, 1.0), (8, 0.0)) == []
    assert looking.look((7, 1.0), (-1, 0.0)) == []
    looking.worker.unsent = True
    assert looking.look((7, 1.0)) == []
    looking.worker.unsent, looking.worker.ready = False, False
    assert looking.look((7, 1.0)) == []
    looking.worker.ready, looking.worker.drained = True, 0
    assert looking.look((7, 1.0)) == [on.WorkerStands(0, 7, 1.0)]
    assert looking.worker.drained
    assert Looking(streams=1).look((7, 1.0)) == []


def test_the_coordinator_is_told_again_when_the_call_has_lasted_longer_and_of_the_next_call() -> None:
    looking = Looking()
    assert looking.look((7, 1.0))
    assert not looking.look((7, 1.05))
    assert looking.look((7, 1.2))
    assert looking.look((7, 0.5))


def test_a_worker_goes_on_when_it_has_not_stood_for_a_while() -> None:
    looking = Looking()
    assert looking.look((7, 1.0), now=10.0)
    assert looking.look((7, 0.1), now=11.0) == []
    assert looking.look((7, 0.6), now=14.0)
    assert looking.look((-1, 0.0), now=14.0 + long_calls.GOES_ON) == []
    assert looking.look((-1, 0.0), now=14.1 + long_calls.GOES_ON) == [on.WorkerGoesOn(0)]
    assert looking.look((-1, 0.0), now=30.0) == []
