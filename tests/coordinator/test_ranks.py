"""Ranks: several trainer processes read one stream together, in step. It is the stream that a single trainer would
read.

Each rank is its own process. Most of them do what the test tells them (rank_process.py); a few train with TensorFlow.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server.to_daemon import control
from tests.conftest import Serve, StartTrainer
from tests.processes import rank_process
from tests.processes.forked import Launcher
from tests.processes.free_ports import free_address, free_port
from tests.processes.rank_process import Epochs, digest

FEEDS = """
    import numpy as np
    from penstock_server import DictSpec, Feed, Leaf

    SIZES = [23, 0, 31, 1, 27, 40, 18, 30]

    def numbered(split, rng):
        for i in range(SIZES[split]):
            yield {"x": rng.normal(size=(3, 5)).astype("float32"), "id": np.int64(100 * split + i)}

    def ready_made(split, rng):
        for i in range(3):
            rows = rng.integers(1, 9)
            yield {"id": np.arange(rows), "x": np.full((rows, rng.integers(1, 9)), 100 * split + i, "float32")}

    class Table:
        def __len__(self):
            return 157
        def __getitem__(self, i):
            return {"id": np.int64(i), "x": np.random.normal(size=3)}

    def few(split):
        yield {"id": np.int64(split)}

    plain = Feed(numbered, splits=range(8), batch_size=4, lanes=3, turn=2)
    counted = Feed(numbered, splits=range(8), batch_size=4, lanes=4, turn=3, samples=170)
    shaped = Feed(numbered, splits=range(8), batch_size=4, lanes=3, shuffle=32, drop_remainder=True)
    shuffled = Feed(numbered, splits=range(8), batch_size=4, shuffle=48, lanes=3, turn=2, seed=5)
    table = Feed(Table(), batch_size=4, shuffle=1, seed=4, turn=3)
    full = Feed(Table(), batch_size=4, turn=5, drop_remainder=True)
    ready = Feed(ready_made, splits=range(8), batch_size=None, lanes=4,
                 spec=DictSpec(("id", "x"), (Leaf("int64", (None,)), Leaf("float32", (None, None)))))
    fast = Feed(numbered, splits=range(8), batch_size=4, lanes=4, order="fast", turn=1)
    two = Feed(few, splits=range(2), batch_size=1, lanes=2)
    two_counted = Feed(few, splits=range(2), batch_size=1, samples=2, epochs=2)
    once = Feed(numbered, splits=range(8), batch_size=4, lanes=3, turn=2, epochs=2)

    def slow(split, rng):
        import time
        for sample in numbered(split, rng):
            time.sleep(0.002)
            yield sample

    slowly = Feed(slow, splits=range(8), batch_size=4, shuffle=32, lanes=3, turn=2)
"""


class Rank:
    """A process that runs rank_process.py."""

    def __init__(self, launcher: Launcher) -> None:
        self.process = launcher.start(Path(rank_process.__file__).read_text(), stdin=True)

    def tell(self, name: str, *values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *values]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[Any, str | None]:
        """Return the rank's result, or its error."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"a rank ended with {self.process.wait()}: {self.process.stderr.read()}"
        result, error = json.loads(line)
        return result, error

    def ask(self, name: str, *values: Any) -> Any:
        self.tell(name, *values)
        result, error = self.answer()
        assert error is None, error
        return result

    def refusal(self, name: str, *values: Any) -> str:
        self.tell(name, *values)
        result, error = self.answer()
        assert error is not None, result
        return error

    def end(self) -> None:
        self.process.close()


class Ranks(list[Rank]):
    """Gives all of them the same instruction at once, because each waits for the others."""

    def ask(self, name: str, *values: Any) -> list[Any]:
        for rank in self:
            rank.tell(name, *values)
        answers = [rank.answer() for rank in self]
        assert not any(error for _, error in answers), answers
        return [result for result, _ in answers]

    def connect(self, url: str, states: list[Any] | None = None, **options: Any) -> list[int | None]:
        for number, rank in enumerate(self):
            state = states[number] if states else None
            rank.tell("connect", url, {**options, "rank": number, "world_size": len(self), "state": state})
        answers = [rank.answer() for rank in self]
        assert not any(error for _, error in answers), answers
        return [result for result, _ in answers]


Start = Callable[[int], Ranks]


@pytest.fixture
def start(consumer_launcher: Launcher) -> Iterator[Start]:
    """`start(3)` starts three processes, which wait for instructions."""
    started: list[Rank] = []

    def more(count: int) -> Ranks:
        ranks = Ranks(Rank(consumer_launcher) for _ in range(count))
        started.extend(ranks)
        return ranks

    yield more
    for rank in started:
        rank.end()


def alone(url: str, epochs: int = 2, transport: str = "local") -> Epochs:
    """Return the epochs that a single trainer reads."""
    with penstock.connect(url, transport=transport) as connection:
        return [[digest(batch) for batch in connection.batches()] for _ in range(epochs)]


def dealt(stream: Epochs, ranks: int) -> list[Epochs]:
    """Return the batches of a stream that each rank must get."""
    return [[epoch[: len(epoch) // ranks * ranks][rank::ranks] for epoch in stream] for rank in range(ranks)]


def flat(epochs: Epochs) -> list[str]:
    return list(itertools.chain(*epochs))


# --- one stream ---

STREAMS = "plain counted shuffled table full ready two two_counted once".split()


@pytest.mark.parametrize("transports", [["local"] * 3, ["tcp"] * 3, ["tcp", "local", "tcp"]], ids="-".join)
def test_three_ranks_together_see_the_very_stream_of_a_single_trainer(
    serve: Serve, start: Start, transports: list[str]
) -> None:
    daemon = serve(FEEDS, *STREAMS, workers=2)
    ranks = start(3)
    for name in STREAMS:
        url = daemon.urls[name]
        with penstock.connect(url) as connection:
            cardinality = connection.cardinality
        stream = alone(url)
        for number, rank in enumerate(ranks):
            options = {"rank": number, "world_size": 3, "transport": transports[number]}
            rank.tell("whole", url, 2, options)
        found = [rank.answer() for rank in ranks]
        assert not any(error for _, error in found), (name, found)
        assert [epochs for (_, epochs), _ in found] == dealt(stream, 3), name
        assert {known for (known, _), _ in found} == {None if cardinality is None else cardinality // 3}, name
        if cardinality is not None:
            assert {len(epoch) for (_, epochs), _ in found for epoch in epochs} == {cardinality // 3}, name


def test_ranks_of_a_feed_in_fast_order_get_each_sample_at_most_once_and_equally_many_batches(
    serve: Serve, start: Start
) -> None:
    daemon = serve(FEEDS, "fast", workers=2)
    stream = alone(daemon.url, 1)
    ranks = start(2)
    ranks.connect(daemon.url)
    ((one,), (other,)) = ranks.ask("epochs", 1)
    assert len(one) == len(other) == len(stream[0]) // 2
    assert len({*one, *other}) == len(one) + len(other)


def test_two_groups_read_a_feed_at_the_same_time_and_a_single_trainer_too(serve: Serve, start: Start) -> None:
    daemon = serve(FEEDS, "shuffled", workers=2)
    stream = alone(daemon.url)
    ranks, others = start(2), start(2)
    ranks.connect(daemon.url, group="a")
    others.connect(daemon.url, group="b")
    seen = ranks.ask("read", 5), others.ask("read", 3)
    assert alone(daemon.url) == stream
    for read, those in zip(seen, (ranks, others), strict=True):
        rest = those.ask("epochs", 2)
        assert [one + flat(more) for one, more in zip(read, rest, strict=True)] == [
            flat(epochs) for epochs in dealt(stream, 2)
        ]


def test_a_rank_that_stands_still_is_waited_for(serve: Serve, start: Start) -> None:
    daemon = serve(FEEDS, "table", workers=2)
    expected = dealt(alone(daemon.url, 1), 2)
    one, other = ranks = start(2)
    ranks.connect(daemon.url)
    one.tell("rest")  # it gets as far as the other one lets it
    assert other.ask("read", 2) == expected[1][0][:2]
    assert other.ask("rest") == expected[1][0][2:]
    assert one.answer() == (expected[0][0], None)


def test_ranks_may_leave_an_epoch_early_and_read_the_next_together(serve: Serve, start: Start) -> None:
    daemon = serve(FEEDS, "plain", workers=2)
    expected = dealt(alone(daemon.url), 2)
    one, other = ranks = start(2)
    ranks.connect(daemon.url)
    assert ranks.ask("read", 3) == [expected[0][0][:3], expected[1][0][:3]]
    for rank in ranks:
        rank.tell("leave")
    assert [rank.answer() for rank in ranks] == [(None, None)] * 2
    one.tell("rest")
    assert other.ask("rest") == expected[1][1]
    assert one.answer() == (expected[0][1], None)


def test_a_rank_that_leaves_an_epoch_while_it_waits_for_the_others_reads_the_next(serve: Serve) -> None:
    daemon = serve(FEEDS, "plain", workers=2)
    expected = dealt(alone(daemon.url), 2)
    with penstock.connect(daemon.url, rank=0, world_size=2) as one:
        closed: list[str] = []
        found: list[str] = []

        def first() -> None:
            with pytest.raises(penstock.StreamClosed, match="newer one on the same connection"):
                next(one.batches())
            closed.append("first")

        threads = [
            threading.Thread(target=first),
            threading.Thread(target=lambda: found.extend(map(digest, one.batches()))),
        ]
        for epoch, thread in enumerate(threads):
            thread.start()
            while one.stats()["epoch"] < epoch:
                time.sleep(0.01)
        with penstock.connect(daemon.url, rank=1, world_size=2) as other:
            assert [[digest(batch) for batch in other.batches()] for _ in range(2)] == expected[1]
        for thread in threads:
            thread.join()
    assert (closed, found) == (["first"], expected[0][1])


# --- resume ---


@pytest.mark.parametrize("name", ["plain", "shuffled", "table", "ready"])
def test_ranks_go_on_from_states_of_the_same_step_with_another_number_of_workers(
    serve: Serve, start: Start, name: str
) -> None:
    first = serve(FEEDS, name, workers=3)
    expected = [flat(epochs) for epochs in dealt(alone(first.url), 3)]
    epoch = len(alone(first.url, 1)[0]) // 3
    taken: dict[int, list[Any]] = {}
    ranks = start(3)
    ranks.connect(first.url)
    seen: list[list[str]] = [[], [], []]
    for steps in (1, 4, epoch, epoch + 2):
        more = ranks.ask("read", min(steps + 2, len(expected[0])) - len(seen[0]))  # two are prefetched
        seen = [one + other for one, other in zip(seen, more, strict=True)]
        taken[steps] = ranks.ask("state", steps)
    assert seen == [stream[: len(seen[0])] for stream in expected]
    for rank in ranks:
        rank.end()
    assert first.stop() == 0
    second = serve(FEEDS, name, workers=1)
    ranks = start(3)
    for steps, states in taken.items():
        assert {state["consumed"] for state in states} == {steps}
        assert max(len(json.dumps(state)) for state in states) < 8192
        ranks.connect(second.url, states, transport="tcp")
        rest = ranks.ask("read", len(expected[0]) - steps)
        assert rest == [stream[steps:] for stream in expected], steps
        again = ranks.ask("state", len(expected[0]))
        assert {state["consumed"] for state in again} == {len(expected[0])}
        ranks.ask("close")


def test_ranks_with_states_of_different_steps_are_refused_and_both_are_named(serve: Serve, start: Start) -> None:
    daemon = serve(FEEDS, "shuffled")
    ranks = start(2)
    ranks.connect(daemon.url)
    ranks.ask("read", 6)
    states = [ranks[0].ask("state", 3), ranks[1].ask("state", 4)]
    ranks.ask("close")
    ranks[0].ask("connect", daemon.url, {"rank": 0, "world_size": 2, "state": states[0]})
    refused = ranks[1].refusal("connect", daemon.url, {"rank": 1, "world_size": 2, "state": states[1]})
    assert refused.startswith("StateMismatch")
    assert "rank 1 begins after batch 8 of epoch 0, but rank 0 after batch 6 of epoch 0" in refused
    told = ranks[0].refusal("read", 1)
    assert "rank 1 begins after batch 8 of epoch 0, but rank 0 after batch 6 of epoch 0" in told
    ranks[0].ask("close")
    ranks[0].ask("connect", daemon.url, {"rank": 0, "world_size": 2, "state": states[0]})
    ranks[1].ask("connect", daemon.url, {"rank": 1, "world_size": 2})  # it may still load a state
    refused = ranks[1].refusal("read", 1)
    assert "rank 1 begins at the start, but rank 0 after batch 6 of epoch 0" in refused
    assert ranks[0].refusal("read", 1).endswith(refused.partition(": ")[2])


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize(
    "order",
    [
        "connect 0, load 0, connect 1, load 1",
        "connect 0, connect 1, load 0, load 1",
        "connect 0, connect 1, load 0, load 0, load 1",
    ],
)
def test_each_rank_may_load_a_state_when_it_likes(serve: Serve, start: Start, order: str, transport: str) -> None:
    daemon = serve(FEEDS, "shuffled")
    expected = [flat(epochs) for epochs in dealt(alone(daemon.url), 2)]
    ranks = start(2)
    ranks.connect(daemon.url)
    ranks.ask("read", 7)
    states = ranks.ask("state", 5)
    ranks.ask("close")
    for step in order.split(", "):
        does, rank = step.split()
        if does == "connect":
            options = {"rank": int(rank), "world_size": 2, "transport": transport, "timeout": 5.0}
            ranks[int(rank)].ask("connect", daemon.url, options)
        else:
            ranks[int(rank)].ask("load", states[int(rank)])
    assert ranks.ask("read", 4) == [stream[5:9] for stream in expected]
    assert [stats["reconnects"] for stats in ranks.ask("stats")] == [0, 0]


def test_a_state_within_a_round_is_refused(serve: Serve, start: Start) -> None:
    daemon = serve(FEEDS, "plain")
    with penstock.connect(daemon.url) as connection:
        states = [connection.state_dict() for _ in itertools.islice(connection.batches(), 4)]
    ranks = start(2)
    options = [{"rank": rank, "world_size": 2} for rank in range(2)]
    ranks[0].ask("connect", daemon.url, {**options[0], "state": states[2]})
    refused = ranks[1].refusal("connect", daemon.url, {**options[1], "state": states[2]})
    assert refused.startswith("StateMismatch")
    assert "after batch 3 of epoch 0" in refused
    assert "2 ranks" in refused
    assert ranks[0].refusal("read", 1).endswith(refused.partition(": ")[2])
    ranks[0].ask("close")
    ranks.connect(daemon.url, states=[states[3]] * 2)  # after 4 batches, a border between rounds of two ranks


# --- something breaks ---


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_when_a_rank_dies_and_does_not_come_back_the_others_are_told_so(
    serve: Serve, start: Start, transport: str
) -> None:
    url = serve(FEEDS, "slowly").urls["slowly"]
    ranks = start(3)
    ranks.connect(url, transport=transport, reconnect=1.0)
    ranks.ask("read", 3)
    ranks[1].end()
    for rank in (ranks[0], ranks[2]):
        rank.tell("epochs", 20)  # it reads first what was sent
    for rank in (ranks[0], ranks[2]):
        _, error = rank.answer()
        assert error is not None
        assert error.startswith("ConnectionLost: rank 1 of 3 is gone: all ranks go on when it is back"), error
    begun_anew = start(3)  # with the same group: the old one is not in their way
    ranks[0].ask("close")
    ranks[2].ask("close")
    begun_anew.connect(url, transport=transport)
    assert begun_anew.ask("read", 2) == [epochs[0][:2] for epochs in dealt(alone(url, 1), 3)]


def test_a_rank_that_begins_anew_beside_others_that_were_cut_off_is_refused_and_told_what_to_do(
    serve: Serve, start: Start
) -> None:
    daemon = serve(FEEDS, "slowly")
    ranks = start(2)
    ranks.connect(daemon.url)
    ranks.ask("read", 3)
    ranks[1].end()
    while ranks[0].ask("stats")["reconnects"] == 0:
        time.sleep(0.05)
    (anew,) = start(1)
    anew.ask("connect", daemon.url, {"rank": 1, "world_size": 2})  # it may still load a state
    refused = anew.refusal("read", 1)
    assert "rank 1 begins at the start, but rank 0 again after batch 6 of epoch 0" in refused
    assert "all ranks must begin at the start, or load the state of the same step" in refused


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_ranks_go_on_when_the_daemon_is_killed_and_started_again(serve: Serve, start: Start, transport: str) -> None:
    address = free_address()
    daemon = serve(FEEDS, "slowly", bind=address, workers=3)
    expected = [flat(epochs) for epochs in dealt(alone(daemon.url), 3)]
    ranks = start(3)
    ranks.connect(daemon.url, transport=transport)
    seen = ranks.ask("read", 5)
    for workers in (1, 2):
        daemon.process.kill()
        daemon.stop()
        daemon = serve(FEEDS, "slowly", bind=address, workers=workers)
        more = ranks.ask("read", 8)
        seen = [one + other for one, other in zip(seen, more, strict=True)]
    rest = ranks.ask("read", len(expected[0]) - len(seen[0]))
    assert [one + other for one, other in zip(seen, rest, strict=True)] == expected
    assert [stats["reconnects"] for stats in ranks.ask("stats")] == [2] * 3


class Proxy:
    """A TCP port that forwards to another until it is cut. The next connection is forwarded again."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            other = socket.create_connection(("127.0.0.1", self._target))
            self._pairs += [one, other]
            for ends in ((one, other), (other, one)):
                self._threads.append(threading.Thread(target=self._pump, args=ends))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for end in list(self._pairs):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._pairs:
            end.close()


@pytest.fixture
def proxy() -> Iterator[Callable[[int], Proxy]]:
    made: list[Proxy] = []

    def make(port: int) -> Proxy:
        made.append(Proxy(port))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_rank_whose_connection_is_cut_comes_back_and_all_see_the_same_stream(
    serve: Serve, start: Start, proxy: Callable[[int], Proxy]
) -> None:
    daemon = serve(FEEDS, "slowly", workers=2)
    expected = [flat(epochs) for epochs in dealt(alone(daemon.url), 3)]
    port = int(daemon.url.rpartition("/")[0].rpartition(":")[2])
    through = proxy(port)
    ranks = start(3)
    urls = [daemon.url, daemon.url.replace(str(port), str(through.port)), daemon.url]
    for number, (rank, transport) in enumerate(zip(ranks, ("local", "tcp", "tcp"), strict=True)):
        rank.tell("connect", urls[number], {"rank": number, "world_size": 3, "transport": transport})
    assert not any(rank.answer()[1] for rank in ranks)
    seen = ranks.ask("read", 6)

    def go_on(count: int) -> None:
        nonlocal seen
        more = ranks.ask("read", count)
        seen = [one + other for one, other in zip(seen, more, strict=True)]

    for steps in (5, 9):  # in the middle of epoch 0, and in epoch 1
        through.cut()
        go_on(steps)
        ranks[0].ask("cut")
        go_on(3)
    ranks[0].ask("cut")  # two at once
    through.cut()
    go_on(len(expected[0]) - len(seen[0]))
    assert seen == expected
    assert all(stats["reconnects"] >= 3 for stats in ranks.ask("stats"))


def test_ranks_at_different_batches_when_one_is_cut_off_each_go_on_behind_their_own(serve: Serve, start: Start) -> None:
    daemon = serve(FEEDS, "shuffled", workers=2)
    expected = [flat(epochs) for epochs in dealt(alone(daemon.url), 3)]
    ranks = start(3)
    ranks.connect(daemon.url)
    seen = ranks.ask("read", 2)
    for rank, cut in ((0, 2), (1, 0), (2, 1)):
        seen[rank] += ranks[rank].ask("read", 1)
        ranks[cut].ask("cut")
    for rank, found in zip(ranks, seen, strict=True):
        rank.tell("read", len(expected[0]) - len(found))
    for rank, found in zip(ranks, seen, strict=True):
        found += rank.answer()[0]
    assert seen == expected


# --- wrong use ---


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 1}, "rank=1, world_size=None: give both"),
        ({"world_size": 2}, "rank=None, world_size=2: give both"),
        ({"rank": 2, "world_size": 2}, "rank=2: must be 0 to 1 with world_size=2"),
        ({"rank": -1, "world_size": 2}, "rank=-1: must be 0 to 1 with world_size=2"),
        ({"rank": 0, "world_size": 0}, "world_size=0: must be 1 to 1024"),
        ({"rank": "0", "world_size": 2}, "rank='0', world_size=2: both must be integers"),
        ({"rank": 0, "world_size": 2, "group": "a" * 129}, "must be a string of at most 128 characters"),
        ({"group": "a\0b"}, "must be a string of at most 128 characters, without control characters"),
        ({"rank": 0, "world_size": 2, "group": 7}, "group=7: must be a string"),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_daemon_is_asked(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(says)):
        penstock.connect("tcp://127.0.0.1:9/feed", **options)


def test_a_private_daemon_has_no_ranks() -> None:
    with pytest.raises(ValueError, match="starts a private daemon, so each consumer would have its own"):
        penstock.connect("feeds.py:feed", rank=0, world_size=2)


def test_a_rank_that_is_taken_is_refused_and_one_that_has_left_too(serve: Serve) -> None:
    daemon = serve(FEEDS, "plain")
    with penstock.connect(daemon.url, rank=np.int64(0), world_size=2, group="a") as one, ThreadPoolExecutor() as pool:
        with pytest.raises(penstock.RankTaken, match="rank 0 of 2 of group 'a' reads this feed already: give each"):
            penstock.connect(daemon.url, rank=0, world_size=2, group="a", timeout=1)
        first = pool.submit(next, one.batches())
        with penstock.connect(daemon.url, rank=1, world_size=2, group="a") as other:
            next(other.batches())
            first.result()
            with pytest.raises(penstock.RankTaken, match="rank 1 of 2 of group 'a' reads this feed already"):
                penstock.connect(daemon.url, rank=1, world_size=2, group="a", timeout=1)
        while daemon.stderr().count("is gone") < 1:
            time.sleep(0.02)
        with pytest.raises(penstock.RankTaken, match="rank 1 of 2 of group 'a' has left this stream, which the"):
            penstock.connect(daemon.url, rank=1, world_size=2, group="a", timeout=1)
    assert "(rank 1 of 2 of group 'a') reads it" in daemon.stderr()


def test_status_tells_ranks_apart_while_they_wait_for_each_other(serve: Serve) -> None:
    daemon = serve(FEEDS, "plain")
    with penstock.connect(daemon.url, rank=1, world_size=2), penstock.connect(daemon.url, rank=1, world_size=3):
        streams = control.status(daemon.url, 60).streams
        assert sorted(stream.client.partition(" ")[2] for stream in streams) == ["(rank 1 of 2)", "(rank 1 of 3)"]


# --- TensorFlow ---

TRAINING = """
import json, sys
import tensorflow as tf
import penstock

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weights = tf.Variable(tf.zeros([15, 1], tf.float64))


@tf.function
def train(batch):
    def step(batch):
        x = tf.cast(tf.reshape(batch["x"], [-1, 15]), tf.float64)
        y = tf.cast(batch["id"], tf.float64)[:, None] / 100
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights - y) ** 2)
        both = tf.distribute.get_replica_context().all_reduce("MEAN", [loss, tape.gradient(loss, weights)])
        weights.assign_sub(0.02 * both[1])
        return both[0]

    return strategy.reduce("MEAN", strategy.run(step, args=(batch,)), axis=None)


for url in sys.argv[1:]:
    def dataset(context):
        return penstock.dataset(url, rank=context.input_pipeline_id, world_size=context.num_input_pipelines)

    weights.assign(tf.zeros([15, 1], tf.float64))
    data = strategy.distribute_datasets_from_function(dataset)
    print(json.dumps([[float(train(batch)) for batch in data] for _ in range(3)]))
"""


def reference_of_training(url: str, replicas: int, epochs: int) -> list[list[float]]:
    """Return the losses of the same training in one process, on each round of batches."""
    weights = np.zeros((15, 1))
    found = []
    with penstock.connect(url) as connection:
        for _ in range(epochs):
            batches = [(batch["x"].reshape(-1, 15).astype("f8"), batch["id"] / 100) for batch in connection.batches()]
            losses = []
            for first in range(0, len(batches) // replicas * replicas, replicas):
                loss, gradient = 0.0, np.zeros_like(weights)
                for x, y in batches[first : first + replicas]:
                    error = x @ weights - y[:, None]
                    loss += float(np.mean(error**2)) / replicas
                    gradient += 2 * x.T @ error / len(x) / replicas
                weights -= 0.02 * gradient
                losses.append(loss)
            found.append(losses)
    return found


def test_trainers_under_multi_worker_mirrored_strategy_train_in_step_as_one_would(
    serve: Serve, start_trainer: StartTrainer
) -> None:
    daemon = serve(FEEDS, "plain", "counted", "shaped", workers=2)  # length unknown, length known, shape fixed
    urls = [daemon.urls[name] for name in ("plain", "counted", "shaped")]
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    tasks = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in range(2)]
    trainers = [start_trainer(TRAINING, *urls, env={"TF_CONFIG": json.dumps(task)}) for task in tasks]
    outs = [trainer.communicate(timeout=100) for trainer in trainers]
    assert [trainer.returncode for trainer in trainers] == [0, 0], [err[-3000:] for _, err in outs]
    assert outs[0][0] == outs[1][0]
    for url, line in zip(urls, outs[0][0].splitlines(), strict=True):
        found, expected = json.loads(line), reference_of_training(url, 2, 3)
        assert [len(losses) for losses in found] == [len(losses) for losses in expected]
        np.testing.assert_allclose([*itertools.chain(*found)], [*itertools.chain(*expected)], rtol=1e-9)
