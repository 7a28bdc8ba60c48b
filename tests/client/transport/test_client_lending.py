"""A client that borrows slabs from a host on its machine: what it gives back, and what it does if the host fails."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import penstock
from penstock._state.consumer_state import Received
from penstock._state.memory import Pool
from penstock._transport.arriving import Arriving
from penstock._transport.from_hosts import fetching, host_here
from penstock._transport.from_hosts.host_here import MOST_BORROWED
from penstock._transport.slab_views import SlabViews
from penstock_proto import VERSION
from penstock_proto.messages import (
    Begin,
    Chunk,
    Fetch,
    GivenBack,
    Greeting,
    HostAt,
    Lent,
    Map,
    Message,
    NotKept,
    Ping,
    Pong,
    Reaches,
    Resend,
    Slab,
    Unmap,
)
from penstock_proto.security import unix_address
from penstock_proto.transport import seqpacket
from penstock_proto.transport.codec import encode, from_borrower
from tests.client.stream.test_client_delivery import first
from tests.client.transport.test_client_fetching import FakeHost, KeepingDaemon
from tests.fakes.fake_daemon import FakeDaemon, Made, numbers, sealed_memfd

Answer = list[tuple[Message, int | None]] | None


class FakeLender:
    """A scripted host that lends slabs. A context manager.

    Args:
        answer: called with each Fetch; returns the messages to send, or None to stay silent.
        greeting: its first message on each connection.
        name: its address.
    """

    def __init__(
        self, answer: Callable[[FakeLender, Fetch], Answer], greeting: Message | None = None, name: str = ""
    ) -> None:
        self.slabs: dict[int, Made] = {}
        self.fetches: list[Fetch] = []
        self.given_back: list[int] = []
        self.name = name or unix_address.unused()
        self.connections: list[socket.socket] = []
        self._answer = answer
        self._greeting = greeting or Greeting(VERSION)
        self._fds: list[int] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.name)
        self._listener.listen()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-lender")
        self._thread.start()

    def __enter__(self) -> FakeLender:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for fd in self._fds:
            os.close(fd)

    def memfd(self, made: Made) -> int:
        """Return a memfd with the slab's slot."""
        fd = sealed_memfd(len(made.data))
        self._fds.append(fd)
        os.pwrite(fd, bytes(made.data), 0)
        return fd

    def lends(self, fetch: Fetch) -> Answer:
        """Return an answer that lends the slab, in its own memfd."""
        made = self.slabs[fetch.ticket]
        fd = self.memfd(made)
        return [(Map(fetch.seq, os.fstat(fd).st_size), fd), (Lent(fetch.seq, fetch.seq), None)]

    def stop(self) -> None:
        """Close all connections, and accept no new ones."""
        self._stop.set()

    def _run(self) -> None:
        connections = self.connections
        with contextlib.ExitStack() as closing:
            closing.enter_context(self._listener)
            while not self._stop.is_set():
                ready = select.select([self._listener, *connections], [], [], 0.02)[0]
                for connection in ready:
                    if connection is self._listener:
                        connections.append(closing.enter_context(self._listener.accept()[0]))
                        with contextlib.suppress(OSError):  # the client has rejected this address
                            seqpacket.send(connections[-1], encode(self._greeting))
                    elif not self._heard(connection):
                        connections.remove(connection)

    def _heard(self, connection: socket.socket) -> bool:
        try:
            data, _ = seqpacket.receive(connection)
        except ConnectionResetError:  # the client has left this host before it read everything
            data = b""
        if not data:
            return False
        match from_borrower(data):
            case GivenBack(seq):
                self.given_back.append(seq)
            case Fetch() as fetch:
                self.fetches.append(fetch)
                with contextlib.suppress(OSError):  # the client has left this host
                    for said, fd in self._answer(self, fetch) or []:
                        seqpacket.send(connection, encode(said), fd)
        return True


@contextlib.contextmanager
def reading(
    answer: Callable[[FakeLender, Fetch], Answer], count: int = 30
) -> Iterator[tuple[KeepingDaemon, FakeLender, Iterator[Any]]]:
    """Yield a client's batches, with the daemon, and with the host that lends slabs."""
    info, epoch = numbers(count, batches=count)
    with (
        FakeLender(answer) as host,
        KeepingDaemon(info, epoch) as daemon,
        penstock.connect(daemon.url, transport="tcp") as connection,
    ):
        daemon.say(HostAt(7, "tcp://127.0.0.1:1", unix=host.name))
        daemon.wait_for(lambda: Reaches(7, True) in daemon.got)
        daemon.host = host  # type: ignore[assignment]
        yield daemon, host, connection.batches()


def test_slabs_are_handed_over_in_order_whichever_comes_first_and_each_is_given_back_once() -> None:
    waiting: list[tuple[Message, int | None]] = []

    def late(host: FakeLender, fetch: Fetch) -> Answer:
        """Answer two Fetches at a time, the later one first."""
        waiting[:0] = host.lends(fetch) or []
        if len(host.fetches) % 2:
            return []
        said, waiting[:] = list(waiting), []
        return said

    with reading(late) as (daemon, host, batches):
        assert list(map(first, batches)) == list(range(30))
        asked = [fetch.seq for fetch in host.fetches]
        assert asked == [seq for seq in range(30) if seq % 3 < 2]
        assert not daemon.count(Resend)
        daemon.wait_for(lambda: len(host.given_back) == len(asked))
        assert sorted(host.given_back) == asked


def test_what_is_held_is_not_given_back_and_what_is_too_much_is_copied() -> None:
    with reading(FakeLender.lends, 90) as (daemon, host, batches):
        held = list(batches)
        asked = [fetch.seq for fetch in host.fetches]
        assert len(asked) == 60
        daemon.wait_for(lambda: len(host.given_back) == 60 - MOST_BORROWED)
        assert host.given_back == asked[MOST_BORROWED:]
        assert list(map(first, held)) == list(range(90))
        del held
        daemon.wait_for(lambda: sorted(host.given_back) == asked)


def test_what_is_lent_briefly_is_copied_and_given_back_at_once() -> None:
    def briefly(host: FakeLender, fetch: Fetch) -> Answer:
        return [*(host.lends(fetch) or [])[:1], (Lent(fetch.seq, fetch.seq, brief=True), None)]

    with reading(briefly) as (daemon, host, batches):
        held = list(batches)
        asked = [fetch.seq for fetch in host.fetches]
        daemon.wait_for(lambda: host.given_back == asked)
        assert list(map(first, held)) == list(range(30))


def test_of_a_part_of_a_slot_that_part_is_copied() -> None:
    info, epoch = numbers(3, turn=3)
    (made,) = epoch(0)
    slab = Slab(0, 0, 0, 1, 1, 4, made.layout.nbytes_of(1), first=1)
    slot, pool = np.frombuffer(made.data, np.uint8).copy(), Pool(keep=1)
    source, target = pool.take(len(slot)), pool.take(len(slot))
    np.asarray(source)[:] = slot
    np.asarray(target)[:] = 0
    arriving = Arriving(Received(slab, made.layout, target))
    arriving.copy_from(source)
    assert arriving.is_whole
    regions = made.layout.regions(1, 1)
    assert len(regions) > 1
    for start, stop in regions:
        assert bytes(np.asarray(target)[start:stop]) == bytes(slot[start:stop])
        slot[start:stop] = 0
        np.asarray(target)[start:stop] = 0
    assert not np.asarray(target).any(), "nothing else may be copied"
    assert first(next(SlabViews(info).batches(slab, made.layout, np.asarray(source)))) == 1


def test_what_was_borrowed_outlives_the_memfd_the_connection_and_the_stream() -> None:
    def unmaps(host: FakeLender, fetch: Fetch) -> Answer:
        return [*(host.lends(fetch) or []), (Unmap(fetch.seq), None)]

    with reading(unmaps) as (_, _, batches):
        held = list(batches)
    assert list(map(first, held)) == list(range(30))


def test_what_a_host_does_not_keep_comes_from_the_daemon() -> None:
    def forgets(host: FakeLender, fetch: Fetch) -> Answer:
        return [(NotKept(fetch.seq), None)] if fetch.seq % 2 else host.lends(fetch)

    with reading(forgets) as (daemon, _, batches):
        assert list(map(first, batches)) == list(range(30))
        resent = [one.seq for one in daemon.got if isinstance(one, Resend)]
        assert resent == [seq for seq in range(30) if seq % 3 < 2 and seq % 2]


@pytest.mark.parametrize("how", ["is silent", "ends"])
def test_what_a_host_that_fails_was_asked_for_comes_from_the_daemon(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "STALLED", 0.3)

    def fails(host: FakeLender, fetch: Fetch) -> Answer:
        if fetch.seq < 6:
            return host.lends(fetch)
        if how == "ends":
            host.stop()
        return None

    with reading(fails) as (daemon, _, batches):
        assert list(map(first, batches)) == list(range(30))
        assert Reaches(7, False) in daemon.got
        assert Resend(6) in daemon.got


def _too_small(host: FakeLender, fetch: Fetch) -> Answer:
    fd = host.memfd(host.slabs[fetch.ticket])
    return [(Map(fetch.seq, 8), fd), (Lent(fetch.seq, fetch.seq), None)]


def _larger_than_it_is(host: FakeLender, fetch: Fetch) -> Answer:
    fd = host.memfd(host.slabs[fetch.ticket])
    return [(Map(fetch.seq, os.fstat(fd).st_size + 1), fd), (Lent(fetch.seq, fetch.seq), None)]


def _that_could_shrink(host: FakeLender, fetch: Fetch) -> Answer:
    fd = os.memfd_create("penstock-test")
    host._fds.append(fd)
    os.pwrite(fd, bytes(host.slabs[fetch.ticket].data), 0)
    return [(Map(fetch.seq, os.fstat(fd).st_size), fd), (Lent(fetch.seq, fetch.seq), None)]


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda host, fetch: [(Lent(fetch.seq, 5), None)],
        lambda host, fetch: [*(host.lends(fetch) or [])[:1], (Lent(500, fetch.seq), None)],
        lambda host, fetch: [*(host.lends(fetch) or []), (Lent(fetch.seq, fetch.seq), None)],
        lambda host, fetch: [(Map(5, 64), None)],
        lambda host, fetch: [(host.lends(fetch) or [])[0]] * 2,
        lambda host, fetch: [(NotKept(500), None)],
        lambda host, fetch: [*(host.lends(fetch) or []), (NotKept(fetch.seq), None)],
        lambda host, fetch: [(Chunk(fetch.seq, 0), None)],
        lambda host, fetch: [(Begin(0), None)],
        _too_small,
        _larger_than_it_is,
        _that_could_shrink,
    ],
    ids=[
        "unknown memory",
        "unasked",
        "twice",
        "no fd",
        "mapped twice",
        "not asked for",
        "too late",
        "bytes",
        "another message",
        "too small",
        "larger than it is",
        "that could shrink",
    ],
)
def test_a_host_that_breaks_the_rules_is_left_and_the_daemon_sends_everything(nonsense: Any) -> None:
    with reading(nonsense) as (daemon, host, batches):
        assert list(map(first, batches)) == list(range(30))
        assert Reaches(7, False) in daemon.got
        assert host.fetches


def test_a_host_that_says_nothing_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_here, "MAX_IDLE", 3)
    with reading(lambda host, fetch: [(Pong(), None)] * 50) as (daemon, host, batches):
        assert list(map(first, batches)) == list(range(30))
        assert Reaches(7, False) in daemon.got
        assert host.fetches


def test_a_host_that_fails_here_before_it_has_lent_anything_is_tried_over_the_network() -> None:
    with (
        FakeHost(lambda host, fetch: host.chunks(fetch)) as there,
        FakeLender(lambda host, fetch: [(Lent(fetch.seq, 5), None)]) as here,
    ):
        info, epoch = numbers(60, batches=60)
        with KeepingDaemon(info, epoch) as daemon, penstock.connect(daemon.url, transport="tcp") as connection:
            there.slabs = here.slabs
            daemon.say(HostAt(7, f"tcp://127.0.0.1:{there.port}", unix=here.name))
            daemon.wait_for(lambda: Reaches(7, True) in daemon.got)
            daemon.host = here  # type: ignore[assignment]
            batches = connection.batches()
            seen = [first(next(batches)) for _ in range(5)]
            daemon.wait_for(
                lambda: [one.reached for one in daemon.got if isinstance(one, Reaches)] == [True, False, True]
            )
            seen += map(first, batches)
            assert seen == list(range(60))
            assert there.fetches


def test_when_a_host_has_joined_again_the_connection_from_before_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "STALLED", 600)
    with reading(lambda host, fetch: None) as (daemon, host, batches):
        seen: list[int] = []
        reader = threading.Thread(target=lambda: seen.extend(map(first, batches)))
        reader.start()
        daemon.wait_for(lambda: host.fetches)
        daemon.say(HostAt(8, "tcp://127.0.0.1:1", unix=host.name))
        reader.join()
        assert seen == list(range(30))
        assert Reaches(8, True) in daemon.got
        daemon.wait_for(lambda: len(host.connections) == 1)


def test_an_address_at_which_another_user_listens_is_not_used() -> None:
    name = unix_address.unused().replace(f"-{os.geteuid()}-", f"-{os.geteuid() + 1}-")
    info, epoch = numbers(20, batches=20)
    with (
        FakeLender(lambda host, fetch: None, name=name),
        KeepingDaemon(info, epoch) as daemon,
        penstock.connect(daemon.url, transport="tcp") as connection,
    ):
        daemon.say(HostAt(7, "tcp://127.0.0.1:1", unix=name))
        assert [first(batch) for batch in connection.batches()] == list(range(20))
        assert not daemon.count(Reaches)


def test_no_memory_is_shared_with_another_user_who_listens_at_the_daemons_address() -> None:
    info, epoch = numbers(20, batches=20)
    name = unix_address.unused().replace(f"-{os.geteuid()}-", f"-{os.geteuid() + 1}-")
    with FakeLender(lambda host, fetch: None, name=name), FakeDaemon(info, epoch) as daemon:
        daemon.unix = name
        with penstock.connect(daemon.url) as connection:
            assert connection.stats()["transport"] == "tcp"
            assert [first(batch) for batch in connection.batches()] == list(range(20))
        with pytest.raises(penstock.PenstockError, match=f"user {os.geteuid()} listens at {name}"):
            penstock.connect(daemon.url, transport="local")


@pytest.mark.parametrize("greeting", [Greeting(VERSION + 1), Ping()])
def test_another_program_at_the_address_is_not_used(greeting: Message) -> None:
    info, epoch = numbers(20, batches=20)
    with (
        FakeLender(lambda host, fetch: None, greeting) as host,
        KeepingDaemon(info, epoch) as daemon,
        penstock.connect(daemon.url, transport="tcp") as connection,
    ):
        daemon.say(HostAt(7, "tcp://127.0.0.1:1", unix=host.name))
        assert [first(batch) for batch in connection.batches()] == list(range(20))
        assert not daemon.count(Reaches)
        assert not host.fetches
