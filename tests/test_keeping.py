"""What a host keeps for consumers to fetch, without a network: at the host, and at the head."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from test_joined_host import FIRST
from test_joined_host import World as AtHead
from test_joined_host import made as reported
from test_membership import SLOT, made, played, settle
from test_membership import World as AtHost

from penstock_proto import ProtocolError, codec
from penstock_proto import messages as m
from penstock_server.coordinator import commands as do
from penstock_server.joining.kept import KeptBatches
from penstock_server.joining.serving import SlabServer
from penstock_server.rate_limited_log import RateLimitedLog
from penstock_server.session import Session
from penstock_server.to_consumers import ToConsumers

OTHER = bytes(16)
"""Nobody's secret."""


def secrets_of(world: AtHost) -> list[bytes]:
    return [said.secret for said in world.link.sent if isinstance(said, m.Said)]


def kinds(world: AtHost) -> list[str]:
    return [type(message).__name__ for message in world.link.sent]


class TestAtTheHost:
    def test_nothing_is_sent_and_who_knows_the_secret_may_fetch_what_was_reported(self) -> None:
        async def play(world: AtHost) -> None:
            await world.start()
            await world.fill(keep=True)
            world.says(0, made(0, 1, last=False))
            (secret,) = secrets_of(world)
            slots = world.membership.slots
            assert kinds(world) == ["Said"]
            found = slots.fetch(m.Fetch(3, 7, secret, 0, 1))
            assert found is not None
            assert found[1] == [(0, 64), (128, 160)]
            for wrong in (m.Fetch(3, 7, OTHER, 0, 1), m.Fetch(3, 8, secret, 0, 1), m.Fetch(3, 7, secret, 0, 2)):
                assert slots.fetch(wrong) is None
            world.says(0, made(1, 1, last=True))
            assert secrets_of(world) == [secret] * 2
            assert slots.fetch(m.Fetch(3, 7, secret, 0, 2)) is not None
            assert slots.fetch(m.Fetch(3, 7, secret, 1, 2)) is None
            assert world.used == 1
            world.membership.take(m.Release(7))
            assert world.used == 0
            assert kinds(world)[2:] == ["KeptNoLonger"]
            assert slots.fetch(m.Fetch(3, 7, secret, 0, 1)) is None

        played(play)

    def test_the_head_gets_it_when_it_asks_and_then_the_rest_at_once(self) -> None:
        async def play(world: AtHost) -> None:
            await world.start()
            await world.fill(keep=True)
            world.says(0, made(0, 1, last=False))
            world.membership.take(m.SendKept(7))
            world.membership.take(m.SendKept(7))  # has crossed the first one
            assert kinds(world) == ["Said", "Payload", "Payload", "KeptNoLonger"]
            world.membership.take(m.Release(7))
            assert kinds(world)[4:] == []
            world.says(0, made(1, 1, last=True))
            assert kinds(world)[4:] == ["Payload", "Payload", "Said"]
            assert secrets_of(world)[1] == b""
            world.link.send_all()
            assert world.used == 0

        played(play)

    def test_a_worker_that_waits_for_memory_gets_that_of_what_was_kept_longest(self) -> None:
        async def play(world: AtHost) -> None:
            await world.start()
            for ticket in (7, 8):
                await world.fill(ticket=ticket, keep=True)
                world.says(0, made(0, 2, last=True, ticket=ticket))
            await world.fill(ticket=9, keep=True)
            await settle()
            assert [one.ticket for one in world.link.sent if isinstance(one, m.KeptNoLonger)] == [7]
            assert len(world.told(0, m.Fill)) == 2
            world.link.send_all()
            await settle()
            assert len(world.told(0, m.Fill)) == 3
            assert [one.ticket for one in world.link.sent if isinstance(one, m.KeptNoLonger)] == [7]

        played(play, slots=2)

    def test_a_host_that_leaves_sends_everything_and_keeps_nothing_more(self) -> None:
        async def play(world: AtHost) -> None:
            await world.start()
            await world.fill(keep=True)
            world.says(0, made(0, 1, last=False))
            world.membership.leave()
            assert kinds(world) == ["Said", "Payload", "Payload", "KeptNoLonger", "Leaving"]
            await world.fill(ticket=8, keep=True)
            world.says(0, made(0, 1, last=True, ticket=8))
            assert kinds(world)[5:] == ["Payload", "Payload", "Said"]

        played(play)

    def test_what_its_dead_worker_had_reported_stays(self) -> None:
        async def play(world: AtHost) -> None:
            await world.start()
            await world.fill(keep=True)
            await world.fill(ticket=8, keep=True)
            world.says(0, made(0, 1, last=False))
            world.local.new_process(0)
            world.membership.ended(0, "was killed", None)
            assert world.used == 1
            (secret,) = secrets_of(world)
            assert world.membership.slots.fetch(m.Fetch(0, 7, secret, 0, 1)) is not None

        played(play)

    def test_memory_that_waits_in_the_connection_of_a_consumer_that_is_gone_is_not_used_again(self) -> None:
        async def play(world: AtHost) -> None:
            await world.start()
            await world.fill(keep=True)
            world.says(0, made(0, 2, last=True))
            found = world.membership.slots.fetch(m.Fetch(3, 7, secrets_of(world)[0], 0, 2))
            assert found is not None
            found[0].fetched += 1
            world.membership.take(m.Release(7))
            assert world.used == 0
            await world.fill(ticket=8)
            first, second = world.told(0, m.Fill)
            assert second.memfd != first.memfd

        played(play)


class TestTheListener:
    def test_it_answers_nothing_but_what_may_be_fetched(self) -> None:
        async def play(world: AtHost) -> None:
            server = SlabServer("127.0.0.1", 0, None, RateLimitedLog(logging.getLogger("test")))
            try:
                heard: list[tuple[str, object]] = []
                server._router.send = lambda peer, message: bool(heard.append(("said", message)))  # type: ignore[method-assign]
                server._router.send_bytes = (  # type: ignore[method-assign]
                    lambda peer, seq, start, data, done=None: bool(heard.append((f"{seq} from {start}", bytes(data))))
                )
                server._router.drop = lambda peer: heard.append(("dropped", peer))  # type: ignore[method-assign]
                server._router.address = lambda peer: "10.0.0.1:5"  # type: ignore[method-assign]
                fetch = m.Fetch(3, 7, OTHER, 0, 1)
                server._heard(b"p", codec.encode(fetch))  # before it has joined
                server._heard(b"p", codec.encode(m.Ping()))
                server._heard(b"p", b"nonsense")
                server._heard(b"p", codec.encode(m.Begin(0)))
                assert heard == [("said", m.NotKept(3)), ("said", m.Pong()), ("dropped", b"p"), ("dropped", b"p")]
                await world.start()
                await world.fill(keep=True)
                (fill,) = world.told(0, m.Fill)
                os.pwrite(world.workers.fds[fill.memfd], bytes(at % 251 for at in range(SLOT)), 0)
                world.says(0, made(0, 2, last=True))
                server.slots = world.membership.slots
                heard.clear()
                server._heard(b"p", codec.encode(m.Fetch(3, 7, secrets_of(world)[0], 1, 1)))
                whole = bytes(at % 251 for at in range(SLOT))
                assert heard == [("3 from 64", whole[64:128]), ("3 from 160", whole[160:192])]
            finally:
                server.close()
                await asyncio.sleep(0)

        played(play)

    def test_a_port_in_use_is_refused(self) -> None:
        async def play() -> None:
            with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Exception, match="in use"):
                SlabServer("127.0.0.1", taken.getsockname()[1], None, RateLimitedLog(logging.getLogger("test")))

        asyncio.run(play())


@pytest.fixture
def head() -> Iterator[AtHead]:
    world = AtHead()
    world.works()
    world.head.keeping = True
    yield world
    world.close()


def fill_that_may_stay(world: AtHead, ticket: int = 7) -> None:
    world.fill(ticket)
    world.host.fill(do.Fill(FIRST, 5, ticket, 0, 1, 0, may_stay=True), world.slot)


class TestAtTheHead:
    def test_a_host_keeps_only_what_it_was_told_to_keep(self, head: AtHead) -> None:
        head.fill()
        with pytest.raises(ProtocolError, match="it keeps what belongs to ticket 7, and was not to"):
            head.says(m.Said(FIRST, codec.encode(reported()), b"secret"))
        fill_that_may_stay(head)
        says = [said for said in head.network.sent if isinstance(said, m.Say)]
        assert says[-1].keep
        head.says(m.Said(FIRST, codec.encode(reported()), b"secret"))
        kept = head.head.kept.of(7)
        assert kept is not None
        assert (kept.host, kept.secret) == (head.host, b"secret")
        assert head.head.heard[-1] == (FIRST, reported())

    def test_it_may_be_sent_after_the_worker_has_answered_until_it_is_kept_no_longer(self, head: AtHead) -> None:
        fill_that_may_stay(head)
        head.says(m.Said(FIRST, codec.encode(reported()), b"secret"))
        waited: list[str] = []
        head.head.kept.bring(7, lambda whole: waited.append("first"))
        head.head.kept.bring(7, lambda whole: waited.append("second"))
        assert [one for one in head.network.sent if isinstance(one, m.SendKept)] == [m.SendKept(7)]
        head.place(start=8)[:] = b"12345678"
        assert os.pread(head.slot.fd, 8, 8) == b"12345678"
        assert not waited
        head.says(m.KeptNoLonger(7))
        assert waited == ["first", "second"]
        assert head.head.kept.of(7) is None
        for refused in (lambda: head.place(), lambda: head.says(m.KeptNoLonger(7))):
            with pytest.raises(ProtocolError):
                refused()

    def test_what_crosses_the_release_of_its_slot_is_received_and_goes_nowhere(self, head: AtHead) -> None:
        fill_that_may_stay(head)
        head.says(m.Said(FIRST, codec.encode(reported()), b"secret"))
        head.head.kept.freed(7)
        assert head.network.sent[-1] == m.Release(7)
        head.place(start=8)[:] = b"12345678"
        assert os.pread(head.slot.fd, 8, 8) == bytes(8)
        head.says(m.KeptNoLonger(7))
        with pytest.raises(ProtocolError):
            head.place()


class Keeper:
    number = 1
    fetched = 0

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def send_kept(self, ticket: int) -> None:
        self.told.append(("send", ticket))

    def release(self, ticket: int) -> None:
        self.told.append(("release", ticket))


def test_who_waits_for_what_a_lost_host_kept_gets_it_when_it_is_made_again() -> None:
    kept, host, other = KeptBatches(), Keeper(), Keeper()
    for ticket in (7, 8):
        kept.begin(ticket, host, b"secret")
    kept.begin(9, other, b"secret")
    waited: list[tuple[int, bool]] = []
    kept.bring(7, lambda whole: waited.append((7, whole)))
    assert kept.lost(host) == (7, 8)
    kept.bring(8, lambda whole: waited.append((8, whole)))
    kept.bring(6, lambda whole: waited.append((6, whole)))  # is in its slot
    assert host.told == [("send", 7)]
    kept.there(8)
    kept.there(7, whole=False)
    assert waited == [(6, True), (8, True), (7, False)]
    kept.freed(8)
    kept.freed(9)
    assert (host.told, other.told) == ([("send", 7)], [("release", 9)])


@pytest.mark.parametrize(
    ("consumer", "endpoint", "told"),
    [
        ("10.0.0.9:5", "tcp://10.0.0.5:7000", True),
        ("10.0.0.9:5", "tcp://127.0.0.1:7000", False),
        ("fe80::9:5", "tcp://[::1]:7000", False),
        ("127.0.0.1:5", "tcp://127.0.0.1:7000", True),
        ("::1:5", "tcp://[::1]:7000", True),
        ("", "tcp://127.0.0.1:7000", False),
    ],
)
def test_no_consumer_is_sent_to_its_own_machine_for_another(consumer: str, endpoint: str, told: bool) -> None:
    sent: list[m.Message] = []
    router = SimpleNamespace(address=lambda peer: consumer, send=lambda peer, message: sent.append(message) or True)
    out = ToConsumers(None, lambda event: None, router, KeptBatches())  # type: ignore[arg-type]
    out.host_at(Session(bytes(16), "feed", "client", b"id", 0.0), m.HostAt(3, endpoint))
    assert sent == [m.HostAt(3, endpoint)] * told


def test_all_slabs_that_wait_for_their_bytes_are_brought_at_once_and_sent_in_order() -> None:
    kept, host = KeptBatches(), Keeper()
    sent: list[int] = []
    session = Session(bytes(16), "feed", "client", b"id", 0.0)
    session.consumer = 4
    layout = SimpleNamespace(regions=lambda first, batches: [])
    coordinator = SimpleNamespace(feeds={"feed": SimpleNamespace(layout=lambda shapes: layout)})
    router = SimpleNamespace(send=lambda peer, message: sent.append(message.seq) or True)
    out = ToConsumers(coordinator, lambda event: None, router, kept)  # type: ignore[arg-type]
    for seq, ticket in enumerate((7, 8, 9)):
        if ticket != 8:  # which the daemon's own workers have made
            kept.begin(ticket, host, b"secret")
        slab = do.SendSlab(4, ticket, 0, 4096, seq, 0, 0, seq, 1, 4, (), b"")
        out.slab(session, slab, None)  # type: ignore[arg-type]
    assert host.told == [("send", 7), ("send", 9)]
    kept.there(9)
    assert sent == []
    kept.there(7)
    assert sent == [0, 1, 2]
