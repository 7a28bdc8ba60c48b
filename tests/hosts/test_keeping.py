"""Batches that a host keeps for consumers to fetch, without a network: at the host, and at the head."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_proto import ProtocolError
from penstock_proto import messages as m
from penstock_proto.transport import codec, seqpacket
from penstock_server.consumers.session import Session
from penstock_server.consumers.to_consumers import ToConsumers
from penstock_server.coordinator.model import commands as do
from penstock_server.join.lending import MOST_LENT
from penstock_server.join.listeners import Listeners
from penstock_server.join.slab_server import SlabServer
from penstock_server.logs.rate_limited_log import RateLimitedLog
from penstock_server.shared_memory.kept import KeptBatches
from tests.hosts.test_joined_host import FIRST
from tests.hosts.test_joined_host import World as AtHead
from tests.hosts.test_joined_host import made as reported
from tests.hosts.test_membership import SLOT, made, played, settle
from tests.hosts.test_membership import World as AtHost

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
            assert slots.fetch(m.Fetch(3, 7, secret, 0, 1, 2)) is not None
            assert slots.fetch(m.Fetch(3, 7, secret, 0, 2, 2)) is None
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
            world.membership.take(m.SendKept(7))  # a second one changes nothing
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

    def test_so_it_does_if_that_is_made_while_it_waits(self) -> None:
        """Trainers may need the waiting batch first. Then they do not fetch the kept one."""

        async def play(world: AtHost) -> None:
            await world.start()
            for ticket in (7, 8, 9):
                await world.fill(ticket=ticket, keep=True)
            assert len(world.told(0, m.Fill)) == 2
            world.says(0, made(0, 2, last=True))
            assert kinds(world) == ["Said", "Payload", "Payload", "KeptNoLonger"]
            world.link.send_all()
            await settle()
            assert len(world.told(0, m.Fill)) == 3
            world.says(0, made(0, 2, last=True, ticket=8))
            assert kinds(world)[4:] == ["Said"]  # nothing waits, so this is kept

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
            world.workers.workers[0].shown.clear()
            world.membership.on_worker_ended(0, "was killed", None)
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
                server.router.send = lambda peer, message: bool(heard.append(("said", message)))  # type: ignore[method-assign]
                server.router.send_bytes = (  # type: ignore[method-assign]
                    lambda peer, seq, start, data, done=None: bool(heard.append((f"{seq} from {start}", bytes(data))))
                )
                server.router.drop = lambda peer: heard.append(("dropped", peer))  # type: ignore[method-assign]
                server.router.address = lambda peer: "10.0.0.1:5"  # type: ignore[method-assign]
                fetch = m.Fetch(3, 7, OTHER, 0, 1)
                server.on_message(b"p", codec.encode(fetch))  # before it has joined
                server.on_message(b"p", codec.encode(m.Ping()))
                server.on_message(b"p", b"nonsense")
                server.on_message(b"p", codec.encode(m.Begin(0)))
                assert heard == [("said", m.NotKept(3)), ("said", m.Pong()), ("dropped", b"p"), ("dropped", b"p")]
                await world.start()
                await world.fill(keep=True)
                (fill,) = world.told(0, m.Fill)
                os.pwrite(world.workers.fds[fill.memfd], bytes(at % 251 for at in range(SLOT)), 0)
                world.says(0, made(0, 2, last=True))
                server.slots = world.membership.slots
                heard.clear()
                server.on_message(b"p", codec.encode(m.Fetch(3, 7, secrets_of(world)[0], 1, 1)))
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


class Borrower:
    """A consumer on the host's machine."""

    def __init__(self, host: Listeners) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect("\0" + host.unix)
        self.socket.setblocking(False)
        self.fds: dict[int, int] = {}

    async def says(self, *messages: m.Message) -> list[m.Message]:
        """Send messages, and return the answers."""
        for message in messages:
            self.socket.send(codec.encode(message))
        await settle()
        heard: list[m.Message] = []
        with contextlib.suppress(BlockingIOError):
            while (came := seqpacket.receive(self.socket))[0]:
                heard.append(codec.from_lender(came[0]))
                if isinstance(heard[-1], m.Map):
                    assert came[1] is not None
                    self.fds[heard[-1].memfd] = came[1]
                elif came[1] is not None:
                    os.close(came[1])
                if isinstance(heard[-1], m.Unmap):
                    os.close(self.fds.pop(heard[-1].memfd))
        return heard

    async def borrows(self, world: AtHost, seq: int = 3, ticket: int = 7, first: int = 0) -> int:
        """Borrow a batch, and return the memfd."""
        (lent,) = (
            one
            for one in await self.says(m.Fetch(seq, ticket, secret_of(world, ticket), first, 1))
            if isinstance(one, m.Lent)
        )
        assert lent.seq == seq
        return lent.memfd

    async def ends(self) -> None:
        self.close()
        await settle()

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


def secret_of(world: AtHost, ticket: int) -> bytes:
    """Return the secret of a ticket for which a worker has reported."""
    said = [one for one in world.link.sent if isinstance(one, m.Said)]
    return next(one.secret for one in said if _ticket(one) == ticket)


def _ticket(said: m.Said) -> int:
    reported = codec.from_worker(said.data)
    assert isinstance(reported, m.Made)
    return reported.ticket


class TestLending:
    """A host lends batches to consumers on its machine."""

    def test_memory_is_used_again_when_it_was_given_back(self) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            await self.keeps(world, 7)
            (fill,) = world.told(0, m.Fill)
            os.pwrite(world.workers.fds[fill.memfd], bytes(at % 251 for at in range(SLOT)), 0)
            memfd = await borrower.borrows(world)
            assert os.pread(borrower.fds[memfd], SLOT, 0) == bytes(at % 251 for at in range(SLOT))
            assert host.lent_bytes == 64 + 32
            world.membership.take(m.Release(7))
            assert world.used == 1
            await self.keeps(world, 8)
            assert world.told(0, m.Fill)[1].memfd != fill.memfd
            assert await borrower.says(m.GivenBack(3), m.GivenBack(3), m.Ping()) == [m.Pong()]
            assert world.used == 1
            await self.keeps(world, 9)
            assert world.told(0, m.Fill)[2].memfd == fill.memfd
            assert await borrower.borrows(world, 4, 9) == memfd, "it knows this memory already"

        self.play(play)

    def test_each_slab_of_a_slot_must_come_back_and_the_head_must_release_it(self) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            other = Borrower(host)
            await self.keeps(world, 7)
            assert await borrower.borrows(world, 3) == await borrower.borrows(world, 4, first=1)
            await other.borrows(world, 3, first=1)
            await borrower.says(m.GivenBack(3), m.GivenBack(4))
            assert await borrower.borrows(world, 5), "the head has not released the slot"
            world.membership.take(m.Release(7))
            await borrower.says(m.GivenBack(5))
            assert world.used == 1
            await other.says(m.GivenBack(3))
            assert world.used == 0
            other.close()

        self.play(play)

    def test_what_a_consumer_that_ends_had_borrowed_is_not_used_again(self) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            for ticket in (7, 8):
                await self.keeps(world, ticket)
            await borrower.borrows(world, 3, 7)
            await borrower.borrows(world, 4, 8)
            world.membership.take(m.Release(7))
            await borrower.ends()
            assert world.used == 1
            world.membership.take(m.Release(8))
            assert world.used == 0
            before = {fill.memfd for fill in world.told(0, m.Fill)}
            await self.keeps(world, 9)
            assert world.told(0, m.Fill)[-1].memfd not in before
            assert {memfd.number for memfd in world.gone} == before

        self.play(play)

    def test_while_consumers_hold_half_of_the_memory_more_is_lent_briefly_and_then_no_longer(self) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            async def lent(ticket: int) -> m.Message:
                """Return the answer to a Fetch of a new slot, which the head then releases."""
                await self.keeps(world, ticket)
                *_, answer = await borrower.says(m.Fetch(ticket, ticket, secret_of(world, ticket), 0, 1))
                world.membership.take(m.Release(ticket))
                return answer

            answers = [await lent(ticket) for ticket in range(7, 13)]  # workers get other memory
            assert [isinstance(one, m.Lent) and one.brief for one in answers] == [False] * 2 + [True] * 3 + [False]
            assert answers[5] == m.NotKept(12)
            await borrower.says(m.GivenBack(7))
            answer = await lent(13)
            assert isinstance(answer, m.Lent)
            assert answer.brief
            await borrower.says(*(m.GivenBack(ticket) for ticket in range(8, 14)))
            answer = await lent(14)
            assert isinstance(answer, m.Lent)
            assert not answer.brief

        self.play(play, slots=4)

    def test_memory_is_not_left_to_a_consumer_for_a_worker_that_was_retired(self) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            for ticket in (7, 8):
                await self.keeps(world, ticket)
            await borrower.borrows(world, 8, 8)
            await world.start(worker=1, run=6)
            await world.fill(worker=1, run=6, ticket=9)  # it waits until the batches of ticket 7 are sent
            world.membership.take(m.Retire(FIRST + 1))
            await settle()
            world.membership.take(m.Release(8))
            assert not world.gone
            world.link.send_all()
            assert world.used == 1

        self.play(play, slots=2)

    def test_memory_is_left_to_a_consumer_while_other_memory_waits_for_the_network(self) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            await self.keeps(world, 7)
            await borrower.borrows(world)
            world.membership.take(m.Release(7))
            await world.fill(ticket=8)
            world.says(0, made(0, 2, last=True, ticket=8))  # on its way to the head
            await world.fill(ticket=9)
            assert len(world.told(0, m.Fill)) == 3

        self.play(play, slots=2)

    @pytest.mark.parametrize("released", ["before", "while it waits"])
    def test_a_worker_that_waits_for_memory_gets_other_memory_than_what_is_lent(self, released: str) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            for ticket in (7, 8):
                await self.keeps(world, ticket)
            lent = [await borrower.borrows(world, ticket, ticket) for ticket in (7, 8)]
            if released == "before":
                world.membership.take(m.Release(8))
            await world.fill(ticket=9, keep=True)
            if released == "while it waits":
                assert [one.ticket for one in world.link.sent if isinstance(one, m.KeptNoLonger)] == [7]
                world.membership.take(m.Release(8))
                await settle()
            fill = world.told(0, m.Fill)[-1]
            assert fill.ticket == 9
            assert fill.memfd not in lent
            assert await borrower.says() == [m.Unmap(lent[1])]
            await borrower.says(m.GivenBack(8))
            world.link.send_all()
            await borrower.says(m.GivenBack(7))
            assert world.used == (2 if released == "before" else 1), "that of ticket 9, and of 7 if it is still kept"

        self.play(play, slots=2)

    def test_what_is_not_kept_is_not_lent(self) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            await self.keeps(world, 7)
            secret = secret_of(world, 7)
            host.serve(None)
            assert (await borrower.says(m.Fetch(3, 7, secret, 0, 1)))[-1] == m.NotKept(3)
            host.serve(world.membership.slots)
            for wrong in (m.Fetch(3, 7, OTHER, 0, 1), m.Fetch(3, 8, secret, 0, 1), m.Fetch(3, 7, secret, 1, 2)):
                assert await borrower.says(wrong) == [m.NotKept(3)]
            for seq in range(MOST_LENT):
                await borrower.borrows(world, seq)
            assert await borrower.says(m.Fetch(MOST_LENT, 7, secret, 0, 1)) == [m.NotKept(MOST_LENT)]
            await borrower.says(m.GivenBack(0))
            assert await borrower.says(m.Fetch(1, 7, secret, 0, 1)) == [m.NotKept(1)], "it borrowed this one already"
            await borrower.borrows(world, MOST_LENT)

        self.play(play)

    def test_what_was_lent_before_the_host_joined_again_may_come_back_at_any_time(self) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            for ticket in (7, 8):
                await self.keeps(world, ticket)
                await borrower.borrows(world, ticket, ticket)
            for memfd in world.membership.slots.in_use:  # the connection to the head has ended
                host.gone(memfd)
            host.serve(None)
            *gone, answer = await borrower.says(m.GivenBack(7), m.Fetch(9, 7, secret_of(world, 7), 0, 1))
            assert {type(one) for one in gone} == {m.Unmap}
            assert len(gone) == 2
            assert answer == m.NotKept(9)
            again = AtHost()
            try:
                await self.keeps(again, 7)
                host.serve(again.membership.slots)
                await borrower.says(m.GivenBack(7))
                await borrower.borrows(again, 7)
                await borrower.borrows(again, 8)
            finally:
                again.close()

        self.play(play)

    @pytest.mark.parametrize("said", [b"nonsense", codec.encode(m.Begin(0)), codec.encode(m.Lent(1, 1))])
    def test_a_consumer_that_breaks_the_rules_is_cut_off_and_keeps_what_it_has(self, said: bytes) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            await self.keeps(world, 7)
            await borrower.borrows(world)
            world.membership.take(m.Release(7))
            borrower.socket.send(said)
            await settle()
            assert world.used == 0
            await self.keeps(world, 8)
            first, second = world.told(0, m.Fill)
            assert first.memfd != second.memfd
            with contextlib.suppress(ConnectionResetError):
                assert borrower.socket.recv(100) == b""

        self.play(play)

    def test_a_connection_that_says_nothing_is_closed(self) -> None:
        async def play(world: AtHost, host: Listeners, borrower: Borrower) -> None:
            silent = Borrower(host)
            try:
                assert (await borrower.says(m.Ping()))[-1] == m.Pong()
                await silent.says()
                host._lender.look_at_the_clock(time.monotonic() + 60)
                assert await borrower.says(m.Ping()) == [m.Pong()]
                assert silent.socket.recv(100) == b""
            finally:
                silent.close()

        self.play(play)

    async def keeps(self, world: AtHost, ticket: int) -> None:
        """Make two batches, and keep them."""
        if not world.told(0, m.StartRun):
            await world.start()
        await world.fill(ticket=ticket, keep=True)
        world.says(0, made(0, 2, last=True, ticket=ticket))

    def play(self, play: Callable[[AtHost, Listeners, Borrower], Coroutine[Any, Any, None]], slots: int = 8) -> None:
        async def run(world: AtHost) -> None:
            host = Listeners(0, None, ())
            world.unlend = host.gone
            host.serve(world.membership.slots)
            borrower = Borrower(host)
            try:
                await play(world, host, borrower)
            finally:
                borrower.close()
                host.close()
                await asyncio.sleep(0)

        played(run, slots)


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
    kept.bring(6, lambda whole: waited.append((6, whole)))  # is in its slot already
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
    out.host_at(Session(bytes(16), "feed", "client", b"id", out.link(b"id"), 0.0), m.HostAt(3, endpoint))
    assert sent == [m.HostAt(3, endpoint)] * told


def test_all_slabs_that_wait_for_their_bytes_are_brought_at_once_and_sent_in_order() -> None:
    kept, host = KeptBatches(), Keeper()
    sent: list[int] = []
    layout = SimpleNamespace(regions=lambda first, batches, stride: [])
    coordinator = SimpleNamespace(feeds={"feed": SimpleNamespace(layout=lambda shapes: layout)})
    router = SimpleNamespace(send=lambda peer, message: sent.append(message.seq) or True)
    out = ToConsumers(coordinator, lambda event: None, router, kept)  # type: ignore[arg-type]
    session = Session(bytes(16), "feed", "client", b"id", out.link(b"id"), 0.0)
    session.consumer = 4
    for seq, ticket in enumerate((7, 8, 9)):
        if ticket != 8:  # the daemon's own workers made ticket 8
            kept.begin(ticket, host, b"secret")
        slab = do.SendSlab(4, ticket, 0, 4096, seq, 0, 0, seq, 1, 4, (), b"")
        out.slab(session, slab, None)  # type: ignore[arg-type]
    assert host.told == [("send", 7), ("send", 9)]
    kept.there(9)
    assert sent == []
    kept.there(7)
    assert sent == [0, 1, 2]
