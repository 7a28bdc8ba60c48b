"""A host's side of its connection to the head, without a network and without worker processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock_proto import PenstockError, ProtocolError
from penstock_proto import messages as m
from penstock_proto.transport import codec
from penstock_server.join import membership
from penstock_server.join.membership import Membership
from penstock_server.shared_memory.arena import Memfd
from penstock_server.workers.local_workers import LocalWorkers
from penstock_server.workers.supervisor import Supervisor
from tests.hosts.test_joined_host import PLAN, SPEC

FIRST = 1_000_000
SLOT = 4096


class Link:
    """Stands in for the connection: records sent messages, and sends bodies only when told."""

    PIECE = 100
    unsent_bytes = 0

    def __init__(self) -> None:
        self.sent: list[m.FromHost] = []
        self.bodies: list[bytes] = []
        self.unsent: list[Callable[[], None]] = []

    def send(self, message: bytes, body: memoryview | None = None, *, done: Callable[[], None] | None = None) -> bool:
        self.sent.append(codec.from_host(message))
        if body is not None:
            assert done is not None
            self.bodies.append(bytes(body))
            self.unsent.append(done)
        return True

    def send_all(self) -> None:
        """Let the network take everything that waits."""
        unsent, self.unsent = self.unsent, []
        for done in unsent:
            done()

    def tick(self) -> None: ...

    def drop(self) -> None: ...

    def close(self) -> None: ...


class Workers:
    """Stands in for the supervisor: records messages to workers, and holds the memory that they are shown."""

    def __init__(self, count: int) -> None:
        self.workers = {number: SimpleNamespace(shown=set()) for number in range(count)}
        self.told: dict[int, list[m.ToWorker]] = {number: [] for number in range(count)}
        self.fds: dict[int, int] = {}
        self.retired: list[int] = []
        self.full = False

    def send(self, number: int, data: bytes, fd: int | None = None) -> None:
        message = codec.to_worker(data)
        self.told[number].append(message)
        if isinstance(message, m.Map) and fd is not None and message.memfd not in self.fds:
            self.fds[message.memfd] = os.dup(fd)

    def add(self, number: int) -> int:
        if self.full:
            raise OSError(24, "Too many open files")
        self.workers[number] = SimpleNamespace(shown=set())
        self.told[number] = []
        return number

    def retire(self, number: int, farewell: bytes) -> None:
        self.retired.append(number)
        del self.workers[number]

    def pids(self) -> list[int]:
        return []

    def kill(self, number: int) -> None:
        self.told[number].append(m.Shutdown())


class World:
    """A host with 2 workers that has joined. It allows `slots` slots."""

    def __init__(self, slots: int = 8) -> None:
        self.link, self.workers = Link(), Workers(2)
        self.failed: list[PenstockError] = []
        self.scaled: list[int] = []
        self.gone: list[Memfd] = []
        self.unlend: Callable[[Memfd], None] = lambda memfd: None
        supervisor = cast(Supervisor, self.workers)
        host = SimpleNamespace(
            plans={"feed": msgspec.structs.replace(PLAN, turn=2)},
            fail=self.failed.append,
            scaled=self.scaled.append,
            retired=lambda worker: None,
        )
        self.local = LocalWorkers(supervisor)
        self.membership = Membership(
            self.link,
            m.Joined(FIRST),
            cast(Any, host),
            supervisor,
            self.local,
            memory=slots * SLOT,
            folder="",
            memory_gone=self._gone,
        )

    def _gone(self, memfd: Memfd) -> None:
        self.gone.append(memfd)
        self.unlend(memfd)

    def close(self) -> None:
        self.membership.end()
        for fd in self.workers.fds.values():
            os.close(fd)

    async def say(self, worker: int, message: m.Message, process: int = 0, keep: bool = False) -> None:
        self.membership.take(m.Say(FIRST + worker, process, codec.encode(message), keep))
        await settle()

    def says(self, worker: int, message: m.FromWorker) -> None:
        self.membership.on_said(worker, message, codec.encode(message))

    async def start(self, worker: int = 0, run: int = 5, splits: int = 0) -> None:
        await self.say(worker, m.StartRun(run, "feed", 0, 0, splits, spec=SPEC))

    async def fill(
        self, worker: int = 0, run: int = 5, ticket: int = 7, first: int = 0, process: int = 0, keep: bool = False
    ) -> None:
        await self.say(worker, m.Fill(run, ticket, 0, 2 - first, 0, SLOT, first), process, keep)

    def told(self, worker: int, kind: type) -> list[Any]:
        return [message for message in self.workers.told[worker] if type(message) is kind]

    @property
    def used(self) -> int:
        """The number of slots in use, as the report says."""
        self.membership._supervisor = cast(Supervisor, Workers(0))
        self.membership.report()
        report = self.link.sent.pop()
        self.membership._supervisor = cast(Supervisor, self.workers)
        assert isinstance(report, m.HostReport)
        return report.memory // SLOT


async def settle() -> None:
    """Let everything proceed that can. One thread reserves memory, one request after another."""
    for _ in range(20):
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        await asyncio.sleep(0)


def played(play: Callable[[World], Coroutine[Any, Any, None]], slots: int = 8) -> None:
    """Run `play` with a world."""

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        world = World(slots)
        try:
            await play(world)
        finally:
            world.close()

    asyncio.run(run())


def made(first: int, batches: int, *, last: bool, ticket: int = 7, run: int = 5) -> m.Made:
    return m.Made(run=run, ticket=ticket, first=first, batches=batches, rows=4 * batches, last=last)


def test_what_is_made_goes_to_the_head_before_the_message_and_its_memory_is_used_again_when_all_is_sent() -> None:
    async def play(world: World) -> None:
        await world.start()
        await world.fill()
        (fill,) = world.told(0, m.Fill)
        slot = bytes(at % 251 for at in range(SLOT))
        os.pwrite(world.workers.fds[fill.memfd], slot, 0)
        world.says(0, made(0, 1, last=False))
        kinds = [type(message).__name__ for message in world.link.sent]
        assert kinds == ["Payload", "Payload", "Said"]
        parts = [message for message in world.link.sent if isinstance(message, m.Payload)]
        assert [(part.worker, part.run, part.ticket, part.start, part.nbytes) for part in parts] == [
            (FIRST, 5, 7, 0, 64),  # the header of the first batch
            (FIRST, 5, 7, 128, 32),  # 4 rows of 2 floats
        ]
        assert world.link.bodies == [slot[0:64], slot[128:160]]
        world.says(0, made(1, 1, last=True))
        assert world.used == 1
        world.link.send_all()
        assert world.used == 0
        await world.fill(ticket=8)
        assert world.told(0, m.Fill)[1].memfd == fill.memfd

    played(play)


def test_a_worker_that_owes_an_answer_keeps_its_memory_though_all_is_sent() -> None:
    async def play(world: World) -> None:
        await world.start()
        await world.fill(first=1)  # after a worker's death: the head already has the first batch
        world.says(0, made(0, 1, last=False))
        assert [part.start for part in world.link.sent if isinstance(part, m.Payload)] == [64, 160]
        world.link.send_all()
        assert world.used == 1
        world.says(0, made(1, 0, last=True))
        assert world.used == 0

    played(play)


def test_a_message_for_a_process_that_has_ended_is_dropped() -> None:
    async def play(world: World) -> None:
        await world.start()
        await world.fill()
        world.workers.workers[0].shown.clear()
        world.membership.on_worker_ended(0, "was killed", None)
        assert world.used == 0
        assert world.link.sent[-1] == m.WorkerEnded(FIRST, "was killed", None)
        await world.say(0, m.DropRun(5))
        await world.fill(ticket=8)
        assert not world.told(0, m.DropRun)
        assert len(world.told(0, m.Fill)) == 1
        assert world.used == 0
        await world.say(0, m.StartRun(6, "feed", 0, 0, 0, spec=SPEC), process=1)
        await world.fill(run=6, ticket=8, process=1)
        assert len(world.told(0, m.Fill)) == 2
        assert len(world.told(0, m.Map)) == 2  # the new process was shown the memory again

    played(play)


def test_a_worker_waits_for_memory_with_all_that_follows_and_others_go_on() -> None:
    async def play(world: World) -> None:
        await world.start()
        await world.start(worker=1, run=6)
        await world.fill()
        await world.fill(ticket=8)
        await world.say(0, m.DropRun(5))
        await world.say(1, m.MeasureRows(6, 9, 0, 1))
        assert len(world.told(0, m.Fill)) == 1
        assert not world.told(0, m.DropRun)
        assert len(world.told(1, m.MeasureRows)) == 1
        world.says(0, made(0, 0, last=True))
        await settle()
        assert [type(message).__name__ for message in world.workers.told[0][-2:]] == ["Fill", "DropRun"]
        world.says(0, made(0, 0, last=True, ticket=8))
        assert world.used == 0

    played(play, slots=1)


def test_a_list_is_shown_to_each_worker_and_forgotten_behind_the_messages_that_name_it() -> None:
    async def play(world: World) -> None:
        for start, part in ((0, b"a list of "), (10, b"splits")):
            place = world.membership.place(codec.encode(m.SplitsPart(4, start, len(part), 16)))
            place[:] = part
        await world.start(splits=4)
        assert len(world.told(0, m.ShareSplits)) == 1
        await world.fill()
        await world.fill(ticket=8)  # waits for memory
        world.membership.take(m.Say(FIRST, 0, codec.encode(m.StartRun(6, "feed", 0, 0, 4, spec=SPEC))))
        world.membership.take(m.SplitsGone(4))
        await settle()
        assert not world.told(0, m.ForgetSplits)
        world.says(0, made(0, 0, last=True))
        await settle()
        kinds = [type(message).__name__ for message in world.workers.told[0][-3:]]
        assert kinds == ["Fill", "StartRun", "ForgetSplits"]
        assert not world.failed

    played(play, slots=1)


def test_a_larger_slot_is_found_for_a_batch_that_did_not_fit() -> None:
    async def play(world: World) -> None:
        await world.start()
        await world.fill()
        world.says(0, m.NeedRoom(5, 7, 3 * SLOT))
        assert world.used == 0
        await world.say(0, m.Fill(5, 7, 0, 2, 0, 3 * SLOT))
        assert world.told(0, m.Fill)[1].nbytes == 3 * SLOT
        await world.say(0, m.Fill(5, 8, 0, 2, 0, 9 * SLOT))
        await settle()
        assert "give `penstock join` a larger --memory" in str(world.failed[0])

    played(play)


def test_retired_workers_are_told_nothing_more() -> None:
    async def play(world: World) -> None:
        world.membership.take(m.Retire(FIRST + 1))
        assert world.workers.retired == [1]
        await world.say(1, m.ForgetSplits(3))
        assert not world.told(1, m.ForgetSplits)

    played(play)


def test_workers_that_are_added_have_numbers_of_their_own_and_those_that_were_retired_lend_theirs_to_nobody() -> None:
    async def play(world: World) -> None:
        world.membership.take(m.Retire(FIRST + 1))
        world.membership.take(m.Scale(3, FIRST + 70, 2))
        assert world.scaled == [3]
        assert sorted(world.workers.workers) == [0, 2, 3]
        world.membership.take(m.Say(FIRST + 71, 0, codec.encode(m.StartRun(5, "feed", 0, 0, 0, spec=SPEC))))
        world.membership.take(m.Say(FIRST + 71, 0, codec.encode(m.Fill(5, 7, 0, 2, 0, SLOT, 0))))
        await settle()
        assert len(world.told(3, m.Fill)) == 1
        world.says(3, made(0, 1, last=True))
        payload, said = world.link.sent[0], world.link.sent[-1]
        assert isinstance(payload, m.Payload)
        assert isinstance(said, m.Said)
        assert payload.worker == said.worker == FIRST + 71
        world.membership.on_worker_ended(3, "was killed", None)
        assert world.link.sent[-1] == m.WorkerEnded(FIRST + 71, "was killed", None)
        world.membership.take(m.Retire(FIRST + 71))
        world.membership.take(m.Kill(FIRST + 71))  # it crossed the end of the worker's process on the way
        world.membership.take(m.Scale(3, FIRST + 90, 1))
        assert sorted(world.workers.workers) == [0, 2, 4]
        with pytest.raises(ProtocolError, match="worker 1000072, which is not of this host"):
            world.membership.take(m.Retire(FIRST + 72))

    played(play)


def test_a_worker_for_which_there_are_no_descriptors_is_given_up_and_the_others_go_on() -> None:
    async def play(world: World) -> None:
        world.workers.full = True
        world.membership.take(m.Scale(3, FIRST + 2, 1))
        (given_up,) = world.link.sent
        assert isinstance(given_up, m.GivenUp)
        assert given_up.worker == FIRST + 2
        assert "cannot be started on its host ([Errno 24] Too many open files): raise the limit" in given_up.how
        await world.say(2, m.ForgetSplits(3))
        world.membership.take(m.Retire(FIRST + 2))  # the host leaves meanwhile
        await world.start()
        assert world.told(0, m.StartRun)
        assert not world.failed

    played(play)


def test_a_list_of_splits_that_this_host_cannot_hold_is_refused_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(world: World) -> None:
        monkeypatch.setattr(membership, "available", lambda: 1000)
        for nbytes in (1001, 2**62):
            with pytest.raises(ProtocolError, match=f"a list of splits of {nbytes} bytes, and this host has 1000"):
                world.membership.place(codec.encode(m.SplitsPart(1, 0, 100, nbytes)))
        assert len(world.membership.place(codec.encode(m.SplitsPart(1, 0, 100, 1000)))) == 100
        for wrong in (m.SplitsPart(1, 100, 100, 999), m.SplitsPart(1, 950, 50, 2000)):
            with pytest.raises(ProtocolError, match="that is not due"):
                world.membership.place(codec.encode(wrong))
        world.local.forget_list(1)

    played(play)


def test_a_head_cannot_make_a_host_start_workers_without_end() -> None:
    async def play(world: World) -> None:
        with pytest.raises(ProtocolError, match="4095 more workers, 4096 in all"):
            world.membership.take(m.Scale(4096, FIRST + 2, 4095))
        with pytest.raises(ProtocolError, match="4 more workers, 3 in all"):
            world.membership.take(m.Scale(3, FIRST + 2, 4))
        assert list(world.workers.workers) == [0, 1]
        world.membership.take(m.Scale(4, FIRST + 2, 2))
        assert len(world.workers.workers) == 4

    played(play)


def test_messages_that_wait_for_one_worker_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_WAITING", 3)

    async def play(world: World) -> None:
        say = m.Say(FIRST, 0, codec.encode(m.DropRun(5)))
        for _ in range(3):
            world.membership.take(say)
        with pytest.raises(ProtocolError, match=f"more than 3 messages for worker {FIRST}"):
            world.membership.take(say)
        await settle()
        world.membership.take(say)

    played(play)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (m.StartRun(5, "other", 0, 0, 0, spec=SPEC), "feed 'other', which this host does not serve"),
        (m.StartRun(5, "feed", 0, 0, 0), "without a spec"),
        (m.StartRun(5, "feed", 0, 0, 9, spec=SPEC), "list of splits 9, which the head has not sent"),
    ],
)
def test_a_run_of_what_is_not_there_ends_the_host_with_the_reason(message: m.StartRun, match: str) -> None:
    async def play(world: World) -> None:
        await world.say(0, message)
        (error,) = world.failed
        assert match in error.message

    played(play)
