"""A group's consumers share one stream: each batch goes to one of them, even if consumers come, stall or die."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest

import penstock
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve
from tests.fakes.inside import handle_of

FEED = """
    import time
    import numpy as np
    from penstock_server import Feed

    def numbers(split, epoch):
        for i in range(100):
            time.sleep(0.001)
            yield np.full((16, 16), i, "float32"), np.int64(1000 * (10 * epoch + split) + i)

    feed = Feed(numbers, splits=range(8), batch_size=8, lanes=4)
    single = Feed(numbers, splits=range(8), batch_size=8, lanes=4, turn=1)
"""

EPOCH = 800

TRANSPORTS = pytest.mark.parametrize("transport", ["local", "tcp"])


def numbers_of(batch: Any) -> list[int]:
    return [int(number) for number in batch[1]]


def samples(epoch: int) -> Counter[int]:
    return Counter(1000 * (10 * epoch + split) + i for split in range(8) for i in range(100))


@TRANSPORTS
def test_each_batch_goes_to_one_consumer_and_each_epoch_ends_for_all(serve: Serve, transport: str) -> None:
    daemon = serve(FEED, "feed")
    read: list[list[list[int]]] = [[], [], []]

    def consume(mine: list[list[int]]) -> None:
        with penstock.connect(daemon.url, group="g", transport=transport) as connection:
            barrier.wait()
            for _ in range(3):
                mine.append([number for batch in connection.batches() for number in numbers_of(batch)])

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=consume, args=(mine,)) for mine in read]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for epoch in range(3):
        assert Counter(number for mine in read for number in mine[epoch]) == samples(epoch)
        assert all(mine[epoch] for mine in read), "every consumer got some"


@TRANSPORTS
def test_what_a_killed_consumer_had_not_handed_over_goes_to_another(serve: Serve, transport: str) -> None:
    daemon = serve(FEED, "single")
    script = (
        "import sys, penstock\n"
        "connection = penstock.connect(sys.argv[1], group='g', transport=sys.argv[2])\n"
        "batches = connection.batches()\n"
        "for _ in range(3):\n"
        "    print(*next(batches)[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with penstock.connect(daemon.url, group="g", transport=transport) as connection:
        other = subprocess.Popen(
            [sys.executable, "-c", script, daemon.url, transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert other.stdout is not None
            theirs = [[int(number) for number in other.stdout.readline().split()] for _ in range(3)]
            batches = connection.batches()
            mine = [numbers_of(next(batches)) for _ in range(3)]
        finally:
            other.kill()
            other.communicate()
        mine += [numbers_of(batch) for batch in batches]
    assert Counter(number for batch in theirs + mine for number in batch) == samples(0)


@TRANSPORTS
@pytest.mark.parametrize("goes", ["closes", "breaks", "dies"])
def test_a_consumer_that_goes_in_the_midst_of_what_a_worker_made_together_takes_only_what_it_was_handed(
    serve: Serve, transport: str, goes: str
) -> None:
    daemon = serve(FEED, "feed")
    script = (
        "import sys, penstock\n"
        "connection = penstock.connect(sys.argv[1], group='g', transport=sys.argv[2])\n"
        "batches = connection.batches()\n"
        "for _ in range(3):\n"
        "    print(*next(batches)[1], flush=True)\n"
        "print(connection.stats()['batches'], flush=True)\n"
        "if sys.argv[3] == 'closes': connection.close()\n"
        "if sys.argv[3] == 'breaks': del batches\n"
        "sys.stdin.read()\n"
    )
    with penstock.connect(daemon.url) as connection:
        assert handle_of(connection).info.most > 3
    with penstock.connect(daemon.url, group="g", transport=transport) as connection:
        other = subprocess.Popen(
            [sys.executable, "-c", script, daemon.url, transport, goes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert other.stdout is not None
            theirs = [int(number) for _ in range(3) for number in other.stdout.readline().split()]
            assert other.stdout.readline() == "3\n", "it was handed 3 batches"
            while goes == "dies" and transport == "tcp" and not told(daemon, 3):
                time.sleep(0.02)
            batches = connection.batches()
            mine = numbers_of(next(batches))
            if goes == "dies":
                other.kill()
            mine += [number for batch in batches for number in numbers_of(batch)]
        finally:
            other.kill()
            other.communicate()
    assert Counter(theirs + mine) == samples(0)


def told(daemon: Daemon, handed: int) -> bool:
    """Return whether the daemon knows that `handed` batches were handed over."""
    return any(one.handed >= handed for one in control.status(daemon.url, 60).streams)


def test_a_stalled_consumer_keeps_what_it_was_sent_and_no_more(serve: Serve) -> None:
    daemon = serve(FEED, "single")
    with (
        penstock.connect(daemon.url, group="g") as stalled,
        penstock.connect(daemon.url, group="g") as connection,
    ):
        waiting = stalled.batches()
        mine = numbers_of(next(waiting))
        batches = connection.batches()
        for _ in range(EPOCH // 8 - 40):  # all batches but those that the stalled consumer may have been sent
            mine += numbers_of(next(batches))
        rest: list[int] = []
        goes_on = threading.Thread(target=lambda: rest.extend(n for batch in waiting for n in numbers_of(batch)))
        goes_on.start()  # an epoch ends only when all of it was handed over, so both read on
        mine += [number for batch in batches for number in numbers_of(batch)]
        goes_on.join(60)
        mine += rest
    assert Counter(mine) == samples(0)


def reads(daemon: Daemon, **options: Any) -> list[int]:
    with penstock.connect(daemon.url, **options) as connection:
        return [number for batch in connection.batches() for number in numbers_of(batch)]


def test_groups_of_other_names_and_consumers_without_one_have_streams_of_their_own(serve: Serve) -> None:
    daemon = serve(FEED, "feed")
    with penstock.connect(daemon.url, group="a") as connection:
        assert connection.cardinality is None
        next(connection.batches())
        assert Counter(reads(daemon, group="b")) == samples(0)
        assert Counter(reads(daemon)) == samples(0)


def test_who_comes_late_begins_where_the_group_is(serve: Serve) -> None:
    daemon = serve(FEED, "feed")
    with penstock.connect(daemon.url, group="g") as connection:
        first = [number for batch in connection.batches() for number in numbers_of(batch)]
        batches = connection.batches()
        second = numbers_of(next(batches))
        with penstock.connect(daemon.url, group="g") as late:
            other: list[int] = []
            thread = threading.Thread(target=lambda: other.extend(n for b in late.batches() for n in numbers_of(b)))
            thread.start()
            second += [number for batch in batches for number in numbers_of(batch)]
            thread.join(60)
    assert Counter(first) == samples(0)
    assert Counter(second + other) == samples(1)


def test_a_group_has_no_state_and_says_so(serve: Serve) -> None:
    daemon = serve(FEED, "feed")
    with penstock.connect(daemon.url) as connection:
        state = connection.state_dict(0)
    with penstock.connect(daemon.url, group="g") as connection:
        with pytest.raises(ValueError, match="a group's stream has no state"):
            connection.state_dict(0)
    with pytest.raises(ValueError, match="a group's stream has no state"):
        penstock.connect(daemon.url, group="g", state=state)


def test_a_group_over_a_private_daemon_is_refused() -> None:
    with pytest.raises(ValueError, match="starts a private daemon"):
        penstock.connect("scenes.py:feed", group="g")
