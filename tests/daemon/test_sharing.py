"""Jobs that read the same feed of a daemon share what is made for them: each reads its own stream, at its own pace."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import penstock
from penstock._transport.local_transport import CREDIT
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve, kill, wait_until
from tests.coordinator.test_ranks_rounds import filled_up

FEEDS = """
    import numpy as np
    from penstock_server import Feed, Shuffle

    def samples(split, rng):
        for number in range(40):
            yield {"id": np.int64(1000 * split + number), "x": rng.random((32, 32))}

    class Table:
        def __len__(self):
            return 600

        def __getitem__(self, number):
            return {"id": np.int64(number), "x": np.random.random((32, 32))}

    lanes = Feed(samples, splits=range(20), batch_size=8)
    pools = Feed(samples, splits=lambda: list(range(20)), batch_size=8, shuffle=64)  # listed for each epoch
    table = Feed(Table(), batch_size=8)
    def forever(segment, rng):
        while True:
            yield {"id": np.int64(rng.integers(1 << 40)), "x": rng.random((32, 32))}

    endless = Feed(forever, batch_size=8, segment=20)
    fast = Feed(samples, splits=range(20), batch_size=8, order="fast")
    long = Feed(samples, splits=range(200), batch_size=8)
"""
NAMES = ("lanes", "pools", "table")


@pytest.fixture
def daemon(serve: Serve) -> Daemon:
    return serve(FEEDS, *NAMES, "fast", "endless", "long", workers=2)


def read(batches: Iterator[Any], most: int = 1 << 30) -> list[tuple[list[int], float]]:
    """Return what identifies each batch, and overwrite it."""
    seen = []
    for _, batch in zip(range(most), batches, strict=False):
        seen.append((batch["id"].tolist(), float(batch["x"].sum())))
        batch["x"][:] = -1
        batch["id"][:] = -1
    return seen


def alone(url: str, epochs: int = 2) -> list[list[tuple[list[int], float]]]:
    with penstock.connect(url, share=False) as connection:
        return [read(connection.batches()) for _ in range(epochs)]


def made(daemon: Daemon, feed: str) -> int:
    return next(one.made for one in control.status(daemon.urls["lanes"], 30).feeds if one.name == feed)


@pytest.mark.parametrize("name", NAMES)
def test_jobs_that_read_together_have_everything_made_once(daemon: Daemon, name: str) -> None:
    url = daemon.urls[name]
    expected = alone(url)
    before = made(daemon, name)
    jobs = [penstock.connect(url, transport=how) for how in ("local", "tcp", "local")]
    epochs: list[list[list[tuple[list[int], float]]]] = [[], [], []]
    for _ in range(2):
        iterators = [job.batches() for job in jobs]
        seen: list[list[tuple[list[int], float]]] = [[], [], []]
        while True:
            parts = [read(iterator, 5) for iterator in iterators]  # what one writes in place, no other sees
            for got, part in zip(seen, parts, strict=True):
                got += part
            if not any(parts):
                break
        for got, epoch in zip(epochs, seen, strict=True):
            got.append(epoch)
    streams = control.status(daemon.urls["lanes"], 30).streams
    for job in jobs:
        job.close()
    assert epochs == [expected] * 3
    assert {stream.jobs for stream in streams} == {3}
    assert len({stream.stream for stream in streams}) == 1
    assert made(daemon, name) - before < 2.25 * sum(map(len, expected))  # not 3: the next epoch is begun early


class Ranks:
    """Ranks that read two epochs, each in a thread. They stop after their first batch until `go` is set."""

    def __init__(self, url: str, world_size: int, go: threading.Event, **options: Any) -> None:
        self.read: list[list[list[tuple[list[int], float]]]] = [[] for _ in range(world_size)]
        self._first = threading.Barrier(world_size + 1)
        self._threads = [
            threading.Thread(target=self._run, args=(url, rank, world_size, go, options)) for rank in range(world_size)
        ]
        for thread in self._threads:
            thread.start()
        self._first.wait(60)

    def _run(self, url: str, rank: int, world_size: int, go: threading.Event, options: dict[str, Any]) -> None:
        how, group = ("local", "tcp")[rank % 2], f"{world_size} ranks"
        with penstock.connect(url, transport=how, rank=rank, world_size=world_size, group=group, **options) as one:
            batches = one.batches()
            first = read(batches, 1)
            self._first.wait(60)
            go.wait(60)
            self.read[rank] = [first + read(batches), read(one.batches())]

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_share_with_a_single_consumer_and_with_ranks_of_another_world_size(daemon: Daemon, name: str) -> None:
    url = daemon.urls[name]
    expected = alone(url)
    before, go = made(daemon, name), threading.Event()
    with penstock.connect(url) as one:
        two = Ranks(url, 2, go)
        three = Ranks(url, 3, go, last_round="pad")
        streams = control.status(daemon.urls["lanes"], 30).streams
        go.set()
        assert [read(one.batches()) for _ in range(2)] == expected
        for ranks in (two, three):
            ranks.join()
    assert {(stream.stream, stream.jobs) for stream in streams} == {(streams[0].stream, 3)}
    assert two.read == [[epoch[rank : len(epoch) // 2 * 2 : 2] for epoch in expected] for rank in (0, 1)]
    assert three.read == [list(epochs) for epochs in zip(*(filled_up(epoch, 3) for epoch in expected), strict=True)]
    assert made(daemon, name) - before < 2.25 * sum(map(len, expected))  # not 3: the next epoch is begun early


def test_a_job_that_stands_holds_up_no_other_and_then_reads_its_own_stream(daemon: Daemon) -> None:
    url = daemon.urls["lanes"]
    expected = alone(url)
    with penstock.connect(url) as slow, penstock.connect(url) as other:
        batches = slow.batches()
        first = read(batches, 3)
        assert [read(other.batches()) for _ in range(2)] == expected
        assert [first + read(batches), read(slow.batches())] == expected


def test_a_job_that_resumes_behind_another_meets_it(daemon: Daemon) -> None:
    url = daemon.urls["table"]
    expected = alone(url)
    with penstock.connect(url) as first:
        batches = first.batches()
        seen = read(batches, 5)
        with penstock.connect(url, state=first.state_dict()) as second:
            rest = second.batches()
            again: list[tuple[list[int], float]] = []
            while len(again) < 60:
                seen += read(batches, 1)
                again += read(rest, 1)
                if len({stream.stream for stream in control.status(daemon.urls["lanes"], 30).streams}) == 1:
                    break
                time.sleep(0.1)  # the daemon looks for that once a second
            else:
                pytest.fail("they have not met")
            again += read(rest)
            seen += read(batches)
            assert read(second.batches()) == expected[1]
    assert seen == expected[0]
    assert again == expected[0][5:]


def test_jobs_that_share_go_on_after_the_end_of_a_worker_and_of_one_of_them(daemon: Daemon) -> None:
    url = daemon.urls["pools"]
    expected = alone(url, 1)[0]
    results: dict[int, list[tuple[list[int], float]]] = {}
    barrier = threading.Barrier(3)

    def job(number: int) -> None:
        with penstock.connect(url) as connection:
            batches = connection.batches()
            seen = read(batches, 10)
            barrier.wait(60)
            if number:  # the first job goes without a word more
                results[number] = seen + read(batches)

    threads = [threading.Thread(target=job, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    kill([psutil.Process(worker.pid) for worker in daemon.workers()[:1]])
    for thread in threads:
        thread.join(60)
    assert results == {1: expected, 2: expected}


def test_the_status_says_why_jobs_do_not_share(daemon: Daemon) -> None:
    def causes(name: str) -> set[str]:
        return {
            stream.apart_because for stream in control.status(daemon.urls["lanes"], 30).streams if stream.feed == name
        }

    with penstock.connect(daemon.urls["fast"]) as one, penstock.connect(daemon.urls["fast"]) as other:
        next(one.batches()), next(other.batches())
        assert causes("fast") == {'the order is "fast", so each job has its own'}
    with penstock.connect(daemon.urls["lanes"]) as one, penstock.connect(daemon.urls["lanes"], share=False) as other:
        next(one.batches()), next(other.batches())
        assert "it was opened with share=False, or by an older client" in causes("lanes")
        wait_until(lambda: len(causes("lanes")) == 2)


def test_a_late_job_can_begin_with_the_others_next_epoch(daemon: Daemon) -> None:
    url = daemon.urls["long"]
    expected = alone(url, 3)
    with penstock.connect(url, start="next_epoch") as first:
        # The next epoch begins when the first job was sent all of this one.
        assert first.info.most * (1 + CREDIT) < len(expected[0])
        batches = first.batches()
        assert read(batches, 3) == expected[0][:3], "nobody else is there"
        with penstock.connect(url, start="next_epoch") as late:
            seen: list[list[tuple[list[int], float]]] = []
            thread = threading.Thread(target=lambda: seen.append(read(late.batches(), 50)))
            thread.start()
            thread.join(0.3)
            assert not seen, "it began before the others"
            assert read(batches) == expected[0][3:]
            assert read(first.batches()) == expected[1]
            thread.join(60)
            assert seen == [expected[1][:50]]
            state = late.state_dict()
        assert read(first.batches()) == expected[2]
    with penstock.connect(url, state=state) as resumed:
        assert read(resumed.batches()) == expected[1][50:]


def stream(connection: penstock.Connection) -> Iterator[Any]:
    """Iterate over the batches of all epochs."""
    while True:
        yield from connection.batches()


@pytest.mark.parametrize(("name", "transport"), [*((name, "local") for name in (*NAMES, "endless")), ("pools", "tcp")])
def test_a_late_job_can_begin_with_the_others_next_batch(daemon: Daemon, name: str, transport: str) -> None:
    url = daemon.urls[name]
    with penstock.connect(url) as connection:
        expected = read(stream(connection), 300)
    with penstock.connect(url, transport=transport) as first:
        with penstock.connect(url, start="latest") as late:
            assert read(late.batches(), 1) == expected[:1], "nobody has read a batch"
        batches = stream(first)
        seen = read(batches, 21)
        with penstock.connect(url, start="latest", transport=transport) as late:
            begins, rest = late.state_dict(), stream(late)
            again = read(rest, 3)
            at = expected.index(again[0])
            assert at >= 21, "what the first job was sent already is not made again"
            while len(again) < 30:
                seen += read(batches, 2)
                again += read(rest, 2)
            goes_on = late.state_dict()
            assert 2 in [stream.jobs for stream in control.status(url, 30).streams], "they share"
            again += read(rest, 5)
    assert seen == expected[: len(seen)]
    assert again == expected[at : at + len(again)]
    with penstock.connect(url, state=begins) as resumed:
        assert read(stream(resumed), 10) == expected[at : at + 10]
    with penstock.connect(url, state=goes_on) as resumed:
        assert read(stream(resumed), 5) == again[-5:]


def test_a_job_cannot_begin_late_alone(daemon: Daemon) -> None:
    with pytest.raises(ValueError, match="but this job shares with no other"):
        penstock.connect(daemon.urls["lanes"], start="latest", share=False)
    with pytest.raises(ValueError, match="must be one of beginning, latest, next_epoch"):
        penstock.connect(daemon.urls["lanes"], start="now")
    with pytest.raises(ValueError, match="start='next_epoch' never begins"):
        penstock.connect(daemon.urls["endless"], start="next_epoch")
