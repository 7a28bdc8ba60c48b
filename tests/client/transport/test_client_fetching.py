"""A client that fetches slabs from hosts: the order in which it hands them over, and what it does if a host fails."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

import penstock
from penstock._transport.from_hosts import fetching, host_over_tcp
from penstock_proto import GeneratorError, ProtocolError
from penstock_proto.messages import (
    Chunk,
    ErrorReport,
    Failed,
    Fetch,
    HostAt,
    Kept,
    Message,
    NotKept,
    Open,
    Ping,
    Pong,
    Reaches,
    Resend,
    Slab,
)
from penstock_proto.transport.codec import encode, from_fetcher
from tests.client.stream.test_client_delivery import first
from tests.fakes.fake_daemon import FakeDaemon, Made, _Session, numbers

SECRET = b"0123456789abcdef"


class FakeHost:
    """A scripted host. `answer` is called with each Fetch, and returns the messages to send, or None to stay silent. A
    context manager."""

    def __init__(self, answer: Callable[[FakeHost, Fetch], list[tuple[Message, bytes | None]] | None]) -> None:
        self.slabs: dict[int, Made] = {}
        self.fetches: list[Fetch] = []
        self._answer = answer
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="fake-host")
        self._thread.start()

    def __enter__(self) -> FakeHost:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        self._context.destroy()

    def chunks(self, fetch: Fetch) -> list[tuple[Message, bytes | None]]:
        """Return an answer with all bytes of the slab."""
        made = self.slabs[fetch.ticket]
        regions = made.layout.regions(fetch.first, fetch.batches)
        return [(Chunk(fetch.seq, start), made.data[start:stop]) for start, stop in regions]

    def part(self, fetch: Fetch) -> list[tuple[Message, bytes | None]]:
        """Return an answer with a part of the slab's bytes."""
        (chunk, data), *_ = self.chunks(fetch)
        assert data is not None
        return [(chunk, data[: len(data) // 2])]

    def stop(self) -> None:
        """Close all connections, and accept no new ones."""
        self._stop = True

    def _run(self) -> None:
        while not self._stop:
            if not self._router.poll(20):
                continue
            routing_id, data = self._router.recv_multipart()
            message = from_fetcher(data)
            if isinstance(message, Ping):
                continue
            self.fetches.append(message)
            for said, body in self._answer(self, message) or []:
                self._router.send_multipart([routing_id, encode(said), *([] if body is None else [body])])
        self._router.close()


class KeepingDaemon(FakeDaemon):
    """A daemon whose slabs a host keeps, except every third."""

    host: FakeHost | None = None

    def send_slab(self, session: _Session, made: Made) -> None:
        seq = session.sent
        if self.host is None or seq % 3 == 2:
            super().send_slab(session, made)
            return
        assert session.epoch is not None
        session.sent += 1
        index = session.totals[1]
        for i, more in enumerate((1, made.batches, made.rows)):
            session.totals[i] += more
        self.host.slabs[1000 + seq] = made
        nbytes = made.layout.nbytes_of(made.batches)
        kept = Kept(7, 1000 + seq, SECRET)
        self._send(session, Slab(seq, session.epoch, 0, index, made.batches, made.rows, nbytes, kept=kept))

    def heard(self, session: _Session, message: Message) -> None:
        if isinstance(message, Resend):
            assert self.host is not None
            made = self.host.slabs[1000 + message.seq]
            for start, stop in made.layout.regions(made.first, made.batches):
                self._send(session, Chunk(message.seq, start), made.data[start:stop])
        super().heard(session, message)


def keep(daemon: KeepingDaemon, host: FakeHost) -> None:
    """Let the client connect to the host. From then on the host keeps slabs."""
    daemon.say(HostAt(7, f"tcp://127.0.0.1:{host.port}"))
    daemon.wait_for(lambda: Reaches(7, True) in daemon.got)
    daemon.host = host


@contextlib.contextmanager
def reading(answer: Any, count: int = 30, **options: Any) -> Iterator[tuple[KeepingDaemon, FakeHost, Iterator[int]]]:
    """Yield a client's batches, with the daemon, and with the host that keeps slabs."""
    info, epoch = numbers(count, batches=count, **options)
    with (
        FakeHost(answer) as host,
        KeepingDaemon(info, epoch) as daemon,
        penstock.connect(daemon.url, transport="tcp") as connection,
    ):
        keep(daemon, host)
        yield daemon, host, map(first, connection.batches())


@pytest.mark.parametrize("turn", [1, 4])
def test_slabs_are_handed_over_in_order_whichever_comes_first(turn: int) -> None:
    waiting: list[tuple[Message, bytes | None]] = []

    def late(host: FakeHost, fetch: Fetch) -> list[tuple[Message, bytes | None]]:
        """Answer two Fetches at a time, the later one first."""
        waiting[:0] = host.chunks(fetch)
        if len(host.fetches) % 2:
            return []
        said, waiting[:] = list(waiting), []
        return said

    with reading(late, 48, turn=turn) as (daemon, host, batches):
        assert list(batches) == list(range(48))
        assert [fetch.seq for fetch in host.fetches] == [seq for seq in range(48 // turn) if seq % 3 < 2]
        assert {(fetch.secret, fetch.first, fetch.batches) for fetch in host.fetches} == {(SECRET, 0, turn)}
        assert not daemon.count(Resend)
        (opened,) = [one for one in daemon.got if isinstance(one, Open)]
        assert opened.fetches


def test_what_a_host_does_not_keep_comes_from_the_daemon() -> None:
    def forgets(host: FakeHost, fetch: Fetch) -> list[tuple[Message, bytes | None]]:
        return [(NotKept(fetch.seq), None)] if fetch.seq % 2 else host.chunks(fetch)

    with reading(forgets) as (daemon, _, batches):
        assert list(batches) == list(range(30))
        resent = [one.seq for one in daemon.got if isinstance(one, Resend)]
        assert resent == [seq for seq in range(30) if seq % 3 < 2 and seq % 2]


def test_a_host_that_never_has_anything_is_not_asked_again() -> None:
    with reading(lambda host, fetch: [(NotKept(fetch.seq), None)]) as (daemon, _, batches):
        assert list(batches) == list(range(30))
        assert Reaches(7, False) in daemon.got, "another host may have its address"


def test_what_a_silent_host_was_asked_for_comes_from_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "STALLED", 0.3)

    def silent(host: FakeHost, fetch: Fetch) -> list[tuple[Message, bytes | None]] | None:
        if fetch.seq < 6:
            return host.chunks(fetch)
        return host.part(fetch) if fetch.seq == 6 else None

    with reading(silent) as (daemon, _, batches):
        assert list(batches) == list(range(30))
        assert daemon.got.index(Reaches(7, False)) < daemon.got.index(Resend(6)), "so this host keeps no more for it"
        assert all(Resend(seq) in daemon.got for seq in (7, 9, 10))


def test_what_a_host_that_ends_was_asked_for_comes_from_the_daemon() -> None:
    def ends(host: FakeHost, fetch: Fetch) -> list[tuple[Message, bytes | None]] | None:
        if fetch.seq < 6:
            return host.chunks(fetch)
        host.stop()
        return host.part(fetch)

    with reading(ends) as (daemon, _, batches):
        assert list(batches) == list(range(30))
        assert Reaches(7, False) in daemon.got
        assert Resend(6) in daemon.got
        assert Resend(28) in daemon.got, "the slab named a host that it is not connected to"


def test_a_host_that_was_lost_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "STALLED", 0.2)
    monkeypatch.setattr(fetching, "AGAIN", 0.2)

    def pauses(host: FakeHost, fetch: Fetch) -> list[tuple[Message, bytes | None]] | None:
        return None if fetch.seq == 4 else host.chunks(fetch)

    with reading(pauses, 60) as (daemon, _, batches):
        seen = [next(batches) for _ in range(10)]
        daemon.wait_for(lambda: [one.reached for one in daemon.got if isinstance(one, Reaches)] == [True, False, True])
        seen += batches
        assert seen == list(range(60))
        assert max(one.seq for one in daemon.got if isinstance(one, Resend)) < 40, "later slabs were fetched"


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda host, fetch: [(Chunk(500, 0), b"x")],
        lambda host, fetch: [(Chunk(fetch.seq, 64), b"x" * 64)],
        lambda host, fetch: [(Chunk(fetch.seq, 0), b"x" * 5000)],
        lambda host, fetch: [(Chunk(fetch.seq, 0), None)],
        lambda host, fetch: [(NotKept(500), None)],
        lambda host, fetch: [*host.part(fetch), (NotKept(fetch.seq), None)],
        lambda host, fetch: [(Reaches(1, True), None)],
    ],
    ids=["unasked", "elsewhere", "too much", "nothing", "not asked for", "too late", "another message"],
)
def test_a_host_that_breaks_the_rules_is_left_and_the_daemon_sends_everything(nonsense: Any) -> None:
    with reading(nonsense) as (daemon, host, batches):
        assert list(batches) == list(range(30))
        assert Reaches(7, False) in daemon.got
        assert host.fetches


def test_a_host_that_says_nothing_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_over_tcp, "MAX_IDLE", 3)
    with reading(lambda host, fetch: [(Pong(), None)] * 50) as (daemon, host, batches):
        assert list(batches) == list(range(30))
        assert Reaches(7, False) in daemon.got
        assert host.fetches


def test_hosts_without_end_start_no_threads_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_HOSTS", 2)
    tried: list[int] = []
    go_on = threading.Event()

    def connect(self: object, where: HostAt, again: bool) -> None:
        tried.append(where.host)
        go_on.wait(60)

    monkeypatch.setattr(fetching.Fetches, "_connect", connect)
    fetches = fetching.Fetches(None, None, lambda message: None, lambda: None)
    for number in range(10):
        fetches.host_at(HostAt(number, "tcp://127.0.0.1:1"))
    go_on.set()
    while fetches._connecting:
        time.sleep(0.001)
    assert sorted(tried) == [0, 1]
    fetches.host_at(HostAt(10, "tcp://127.0.0.1:1"))
    while fetches._connecting:
        time.sleep(0.001)
    assert sorted(tried) == [0, 1, 10]


def test_a_host_that_cannot_be_reached_is_not_named_and_nothing_waits_for_it() -> None:
    info, epoch = numbers(20, batches=20)
    with KeepingDaemon(info, epoch) as daemon, penstock.connect(daemon.url, transport="tcp") as connection:
        daemon.say(HostAt(7, "tcp://127.0.0.1:1"))
        daemon.say(HostAt(8, "tcp://no.such.host.invalid:5"))
        daemon.say(HostAt(9, "nonsense"))
        daemon.say(HostAt(10, "tcp://[::1:5"))
        assert [first(batch) for batch in connection.batches()] == list(range(20))
        assert not daemon.count(Reaches)


def test_bytes_that_the_daemon_was_not_asked_for_fail_the_stream() -> None:
    info, epoch = numbers(20, batches=20)
    with (
        FakeHost(lambda host, fetch: None) as host,
        KeepingDaemon(info, epoch) as daemon,
        penstock.connect(daemon.url, transport="tcp", reconnect=0) as connection,
    ):
        keep(daemon, host)

        def say() -> None:
            daemon.wait_for(lambda: host.fetches)
            daemon.say(Chunk(0, 0))

        saying = threading.Thread(target=say)
        saying.start()
        with pytest.raises(ProtocolError, match="and no bytes of this slab were due"):
            next(connection.batches())
        saying.join()


def test_a_failure_does_not_wait_for_bytes_that_do_not_come() -> None:
    with reading(lambda host, fetch: None if fetch.seq == 4 else host.chunks(fetch)) as (daemon, host, batches):

        def say() -> None:
            daemon.wait_for(lambda: any(fetch.seq == 4 for fetch in host.fetches))
            daemon.say(Failed(ErrorReport.of(GeneratorError("no such file"))))

        saying = threading.Thread(target=say)
        saying.start()
        seen = []
        with pytest.raises(GeneratorError, match="no such file"):
            seen.extend(batch for batch in batches)
        saying.join()
        assert seen == list(range(len(seen)))
        assert len(seen) <= 4


def test_closing_while_a_connection_is_being_made_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def slow(host: str, port: int, timeout: float, watch: Callable[[], None]) -> None:
        began.set()
        while True:
            watch()
            time.sleep(0.01)

    monkeypatch.setattr(host_over_tcp, "connected", slow)
    info, epoch = numbers(20, batches=20)
    with KeepingDaemon(info, epoch) as daemon, penstock.connect(daemon.url, transport="tcp") as connection:
        daemon.say(HostAt(7, "tcp://127.0.0.1:1"))
        assert began.wait(60)
        assert first(next(connection.batches())) == 0
