"""The head's side of a joined host, without a network: which of its messages the head believes, and where it may
write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock_proto import Leaf, ProtocolError, StartError
from penstock_proto import messages as m
from penstock_proto.transport import codec
from penstock_server.coordinator.model import commands as do
from penstock_server.hosts.joined_host import JoinedHost
from penstock_server.shared_memory.arena import Memfd
from penstock_server.shared_memory.kept import KeptBatches
from penstock_server.status.status import of_workers_of

FIRST = 1_000_000
PLAN = m.FeedPlan(
    name="feed",
    spec=None,
    batch_size=4,
    turn=None,
    lanes=4,
    order="exact",
    shuffle=0,
    interleave=1,
    seed=0,
    epochs=None,
    samples=None,
    length=None,
    drop_remainder=False,
    static_splits=True,
)
SPEC = Leaf("float32", (2,))


class Network:
    """Stands in for the connection, and records sent messages."""

    piece = 8

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.bodies: list[bytes] = []

    def send(self, message: m.Message) -> bool:
        self.sent.append(message)
        return True

    def send_piece(self, message: m.Message, body: memoryview) -> bool:
        self.bodies.append(bytes(body))
        return self.send(message)

    def told(self, worker: int) -> list[m.ToWorker]:
        """Return the messages to a worker."""
        return [codec.to_worker(said.data) for said in self.sent if isinstance(said, m.Say) and said.worker == worker]


class Head:
    """Stands in for the head, and records what it hears."""

    def __init__(self) -> None:
        self.plans: tuple[m.FeedPlan, ...] = (PLAN,)
        self.first_samples = {"feed": do.Compare(-1, 0, "feed", 0, 0, b"12345678")}
        self.heard: list[Any] = []
        self.kept = KeptBatches()
        self.keeping = False
        self.list_fd = os.memfd_create("list")
        os.write(self.list_fd, b"a list of splits")

    def list_of(self, splits: int) -> tuple[int, int]:
        return self.list_fd, 16

    def said(self, worker: int, message: m.FromWorker) -> None:
        self.heard.append((worker, message))

    def came(self, worker: int, message: m.Imported) -> None:
        self.heard.append((worker, "came"))

    def died(self, worker: int, how: str, doing: object) -> None:
        self.heard.append((worker, how))

    def given_up(self, worker: int, how: str) -> None:
        self.heard.append((worker, "given up"))

    def keeps(self, host: JoinedHost, ticket: int, reader: int | None) -> bool:
        return self.keeping

    def leaves(self, host: JoinedHost) -> None:
        self.heard.append("leaves")


class World:
    """A working host with 2 workers, and a slot."""

    def __init__(self) -> None:
        self.network, self.head = Network(), Head()
        join = m.Join(m.VERSION, "b", bytes(16), 2, 1 << 20, "1", "3.11", "2", ())
        self.host = JoinedHost(
            join,
            1,
            name="b",
            address="b:1",
            machine="b",
            numbers=range(FIRST, FIRST + 2),
            channel=self.network,
            head=self.head,
        )
        fd = os.memfd_create("slot")
        os.ftruncate(fd, 4096)
        self.slot = Memfd(1, 4096, fd)

    def close(self) -> None:
        os.close(self.head.list_fd)
        self.slot.drop()

    def says(self, message: m.Message) -> None:
        self.host.take(codec.encode(message))

    def worker_says(self, worker: int, message: m.Message) -> None:
        self.says(m.Said(worker, codec.encode(message)))

    def works(self) -> None:
        """Let the host pass its check, with both workers ready."""
        for worker in (FIRST, FIRST + 1):
            self.worker_says(worker, m.Imported((PLAN,), 0.1, tensorflow=False))
        self.worker_says(FIRST, m.Compared(0))
        self.head.heard.clear()

    def fill(self, ticket: int = 7, run: int = 5, worker: int = FIRST) -> None:
        self.host.start_run(do.StartRun(worker, run, "feed", 0, 0, 1), SPEC)
        self.host.fill(do.Fill(worker, run, ticket, 0, 1, 0), self.slot)

    def place(self, worker: int = FIRST, run: int = 5, ticket: int = 7, start: int = 0, nbytes: int = 8) -> memoryview:
        return self.host.place(codec.encode(m.Payload(worker, run, ticket, start, nbytes)))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def made(run: int = 5, ticket: int = 7, *, last: bool = True) -> m.Made:
    return m.Made(run=run, ticket=ticket, first=0, batches=1, rows=4, last=last)


def test_samples_that_its_workers_report_are_passed_on_for_open_runs_only(world: World) -> None:
    world.works()
    check = m.SpotCheck(9, "feed", 0, 0, 0, 1, b"12345678")
    world.worker_says(FIRST, check)
    assert (FIRST, check) not in world.head.heard
    world.host.start_run(do.StartRun(FIRST, 9, "feed", 0, 0, 0), PLAN.spec)
    world.worker_says(FIRST + 1, check)
    assert (FIRST + 1, check) not in world.head.heard
    world.worker_says(FIRST, check)
    assert world.head.heard[-1] == (FIRST, check)


def test_workers_count_when_one_of_them_has_made_the_first_samples_again(world: World) -> None:
    world.worker_says(FIRST + 1, m.Imported((PLAN,), 0.1, tensorflow=False))
    (compare,) = world.network.told(FIRST + 1)
    assert isinstance(compare, m.Compare)
    assert compare.digests == b"12345678"
    world.worker_says(FIRST, m.Imported((PLAN,), 0.1, tensorflow=False))
    assert not world.head.heard
    world.says(m.WorkerEnded(FIRST + 1, "was killed", None))  # the other worker is asked instead
    assert isinstance(world.network.told(FIRST)[0], m.Compare)
    world.worker_says(FIRST + 1, m.Compared(0))  # from the process that has ended
    assert not world.host.working
    world.worker_says(FIRST, m.Compared(0))
    assert world.host.working
    assert world.head.heard[-1] == (FIRST, "came")
    world.worker_says(FIRST + 1, m.Imported((PLAN,), 0.1, tensorflow=False))
    assert world.host.there == {FIRST, FIRST + 1}


def test_other_feeds_and_other_samples_are_refused(world: World) -> None:
    with pytest.raises(StartError, match="its feed feed has seed 3, and the head's has 0"):
        world.worker_says(FIRST, m.Imported((msgspec.structs.replace(PLAN, seed=3),), 0.1, tensorflow=False))
    with pytest.raises(StartError, match="it has only 0 of the head's 1 feeds"):
        world.worker_says(FIRST, m.Imported((), 0.1, tensorflow=False))
    other = msgspec.structs.replace(PLAN, name="other")
    with pytest.raises(StartError, match="it has a feed other, and the head has feed"):
        world.worker_says(FIRST, m.Imported((PLAN, other), 0.1, tensorflow=False))
    world.head.plans = (other, PLAN)
    with pytest.raises(StartError, match="it has only 1 of the head's 2 feeds"):
        world.worker_says(FIRST, m.Imported((PLAN, PLAN), 0.1, tensorflow=False))
    world.head.plans = (PLAN,)
    world.worker_says(FIRST, m.Imported((PLAN,), 0.1, tensorflow=False))
    with pytest.raises(StartError, match="cannot make the samples of the head: no file"):
        world.worker_says(FIRST, m.Compared(0, unfit="no file"))


def test_feeds_of_the_head_may_have_become_ready_in_another_order(world: World) -> None:
    other = msgspec.structs.replace(PLAN, name="other")
    world.head.plans = (other, PLAN)
    world.worker_says(FIRST, m.Imported((PLAN, other), 0.1, tensorflow=False))
    assert isinstance(world.network.told(FIRST)[0], m.Compare)


def test_bytes_go_only_into_the_slot_that_the_worker_is_to_fill_and_only_until_it_has_answered(world: World) -> None:
    world.works()
    world.fill()
    world.place(start=4088)[:] = b"12345678"
    assert os.pread(world.slot.fd, 8, 4088) == b"12345678"
    assert world.host.received == 8
    wrong: list[dict[str, int]] = [{"worker": FIRST + 1}, {"run": 6}, {"ticket": 8}, {"start": 4089}, {"start": 5000}]
    for one in wrong:
        with pytest.raises(ProtocolError):
            world.place(**one)
    with pytest.raises(ProtocolError, match="a Leaving with a second frame"):
        world.host.place(codec.encode(m.Leaving()))
    world.worker_says(FIRST, made(last=False))
    world.place()
    world.worker_says(FIRST, made())
    with pytest.raises(ProtocolError, match="has nothing to say about ticket 7 and run 5"):
        world.place()
    assert [message for _, message in world.head.heard] == [made(last=False), made()]


@pytest.mark.parametrize(
    "answer",
    [
        made(),
        m.NeedRoom(5, 7, 9000),
        m.RunFailed(5, m.ErrorReport("GeneratorError", "no")),
    ],
    ids=["made", "need room", "failed"],
)
def test_after_each_answer_nothing_is_written_any_longer(world: World, answer: m.FromWorker) -> None:
    world.works()
    world.fill()
    world.worker_says(FIRST, answer)
    with pytest.raises(ProtocolError):
        world.place()
    assert world.head.heard[0][0] == FIRST


def test_an_answer_counts_once_and_only_from_the_worker_that_was_asked(world: World) -> None:
    world.works()
    world.fill()
    with pytest.raises(ProtocolError):
        world.worker_says(FIRST + 1, made())
    world.worker_says(FIRST, made())
    with pytest.raises(ProtocolError):
        world.worker_says(FIRST, made())
    with pytest.raises(ProtocolError):
        world.worker_says(FIRST, m.RowsWritten(5, 7))
    failed = m.RunFailed(5, m.ErrorReport("GeneratorError", "no"))
    world.worker_says(FIRST + 1, failed)  # not one of its own runs: nothing happens
    assert len(world.head.heard) == 1
    world.worker_says(FIRST, failed)
    assert world.head.heard[1][1].error.message == "no (on host b)"
    world.worker_says(FIRST, failed)
    assert len(world.head.heard) == 2


def test_what_a_dead_worker_was_to_fill_is_not_written_and_its_next_process_hears_nothing_old(world: World) -> None:
    world.works()
    world.fill()
    world.says(m.WorkerEnded(FIRST, "was killed", None))
    assert world.head.heard == [(FIRST, "was killed")]
    with pytest.raises(ProtocolError):
        world.place()
    world.host.say(FIRST, m.ForgetSplits(3))
    says = [said for said in world.network.sent if isinstance(said, m.Say)]
    assert [said.process for said in says[-3:]] == [0, 0, 1]


def test_several_runs_write_rows_of_one_batch_and_each_answers_for_itself(world: World) -> None:
    world.works()
    for worker, run in ((FIRST, 5), (FIRST + 1, 6)):
        world.host.start_run(do.StartRun(worker, run, "feed", 0, 0, 0), SPEC)
        world.host.write_rows(do.WriteRows(worker, run, 7, 0, 1, 0, 4, 0), world.slot)
    world.worker_says(FIRST, m.RowsWritten(5, 7))
    with pytest.raises(ProtocolError):
        world.place()
    world.place(worker=FIRST + 1, run=6)
    world.host.measure_rows(do.MeasureRows(FIRST, 5, 8, 0, 1))
    with pytest.raises(ProtocolError):  # measuring writes nothing
        world.place(ticket=8)
    world.worker_says(FIRST, m.RowsMeasured(5, 8, ()))


def test_a_dropped_run_is_heard_until_it_has_answered_for_its_turns(world: World) -> None:
    world.works()
    world.fill()
    world.host.say(FIRST, m.DropRun(5))
    failed = m.RunFailed(5, m.ErrorReport("GeneratorError", "no"))
    world.worker_says(FIRST, failed)  # it crossed the DropRun on the way
    assert world.head.heard[-1][1].run == 5
    world.fill(run=6)
    world.worker_says(FIRST, made(run=6))
    world.host.say(FIRST, m.DropRun(6))
    world.worker_says(FIRST, m.RunFailed(6, failed.error))  # nobody waits for it
    assert len(world.head.heard) == 2


NEEDS_ROOM = m.NeedRoom(5, 7, 9000)
NOTHING_MADE = m.Made(run=5, ticket=7, first=0, batches=0, rows=0, last=True)


def test_a_worker_that_needs_more_room_answers_when_its_run_is_dropped(world: World) -> None:
    world.works()
    world.fill()
    world.worker_says(FIRST, NEEDS_ROOM)
    world.host.say(FIRST, m.DropRun(5))  # before a larger slot was found
    world.worker_says(FIRST, NOTHING_MADE)
    assert [message for _, message in world.head.heard] == [NEEDS_ROOM, NOTHING_MADE]
    with pytest.raises(ProtocolError, match="has nothing to say about ticket 7 and run 5"):
        world.worker_says(FIRST, NOTHING_MADE)


def test_a_worker_that_needs_more_room_makes_nothing_until_it_has_a_larger_slot(world: World) -> None:
    world.works()
    world.fill()
    world.worker_says(FIRST, NEEDS_ROOM)
    for wrong in (made(), NEEDS_ROOM):
        with pytest.raises(ProtocolError, match="and has no slot for it"):
            world.worker_says(FIRST, wrong)
    world.host.fill(do.Fill(FIRST, 5, 7, 0, 1, 0), world.slot)
    world.place()
    world.worker_says(FIRST, made())
    assert [message for _, message in world.head.heard] == [NEEDS_ROOM, made()]


def test_a_list_of_splits_is_sent_once_in_pieces_before_it_is_named(world: World) -> None:
    world.works()
    for run in (5, 6):
        world.host.start_run(do.StartRun(FIRST, run, "feed", 0, 0, splits=4), SPEC)
    kinds = [type(said).__name__ for said in world.network.sent[-4:]]
    assert kinds == ["SplitsPart", "SplitsPart", "Say", "Say"]
    assert b"".join(world.network.bodies) == b"a list of splits"
    world.host.forget_list(4)
    world.host.forget_list(4)
    assert [said for said in world.network.sent if isinstance(said, m.SplitsGone)] == [m.SplitsGone(4)]


@pytest.mark.parametrize(
    "says",
    [
        lambda world: world.says(m.Said(FIRST + 2, b"")),
        lambda world: world.says(m.WorkerEnded(3, "was killed", None)),
        lambda world: world.says(m.GivenUp(FIRST - 1, "")),
        lambda world: world.says(m.Payload(FIRST, 5, 7, 0, 8)),
        lambda world: world.says(m.HostReport((m.WorkerReport(3, 1, 0, True, False, False, None, None),), 0, 0, 0, 1)),
        lambda world: world.worker_says(FIRST, m.SplitsListed(5, 3, 16, bytes(32))),
        lambda world: world.worker_says(FIRST, m.EnvironmentWanted({})),
        lambda world: world.host.take(b"\x00"),
    ],
    ids=["said", "ended", "given up", "payload", "report", "splits", "environment", "garbage"],
)
def test_what_no_host_says_changes_nothing(world: World, says: Callable[[World], None]) -> None:
    world.works()
    world.fill()
    sent = len(world.network.sent)
    with pytest.raises(ProtocolError):
        says(world)
    assert not world.head.heard
    assert len(world.network.sent) == sent
    world.place()


def test_a_host_without_workers_that_can_start_is_refused(world: World) -> None:
    world.works()
    world.says(m.GivenUp(FIRST, "died again"))
    assert world.head.heard == [(FIRST, "given up")]
    with pytest.raises(StartError, match="none of its workers can start"):
        world.says(m.GivenUp(FIRST + 1, "died again"))


def test_a_retired_worker_gets_nothing_and_the_others_go_on(world: World) -> None:
    world.works()
    world.says(m.Leaving())
    world.says(m.Leaving())
    assert world.head.heard == ["leaves"]
    world.host.retire(FIRST)
    before = len(world.network.sent)
    world.host.say(FIRST, m.ForgetSplits(1))
    assert len(world.network.sent) == before
    world.fill(worker=FIRST + 1)
    world.place(worker=FIRST + 1)


def test_what_a_worker_does_is_older_than_its_report_says(world: World) -> None:
    world.works()
    doing = m.Doing("'a.h5'", "'a.h5'", 5, 2.0)
    world.says(m.HostReport((m.WorkerReport(FIRST, 7, 0, True, False, False, doing, None),), 0, 0, 0, 1))
    report, at = world.host.said[FIRST]
    world.host.said[FIRST] = report, at - 3
    looks = SimpleNamespace(of_worker={FIRST: 1.5}.get, awaited_at={FIRST: "'b.h5'"}.get)
    (worker,) = of_workers_of(world.host, (), looks)  # type: ignore[arg-type]
    assert (worker.name, worker.pid, worker.memory) == ("b/0", 7, None)
    assert (worker.awaited_seconds, worker.awaited_at) == (1.5, "'b.h5'")
    assert worker.doing is not None
    assert 5.0 <= worker.doing.seconds < 60


def test_workers_that_are_added_work_as_soon_as_they_have_imported_the_same_feeds(world: World) -> None:
    world.works()
    world.host.retire(FIRST)
    world.host.scale(3, range(FIRST + 9, FIRST + 11))
    assert world.network.sent[-1] == m.Scale(3, FIRST + 9, 2)
    assert world.host.workers == {FIRST + 1, FIRST + 9, FIRST + 10}
    assert [world.host.numbers[number] for number in (FIRST, FIRST + 1, FIRST + 9, FIRST + 10)] == [0, 1, 2, 3]
    world.worker_says(FIRST + 10, m.Imported((PLAN,), 0.1, tensorflow=False))
    assert world.head.heard == [(FIRST + 10, "came")]
    assert not world.network.told(FIRST + 10), "the host was compared already"
    world.fill(worker=FIRST + 10)
    world.place(worker=FIRST + 10)
    world.says(m.WorkerEnded(FIRST + 9, "was killed", None))
    world.worker_says(FIRST, m.CacheUsed("feed"))  # it crossed its Retire on the way
    with pytest.raises(ProtocolError):
        world.says(m.WorkerEnded(FIRST + 11, "was killed", None))
    with pytest.raises(StartError, match="its feed feed has seed 3"):
        world.worker_says(FIRST + 9, m.Imported((msgspec.structs.replace(PLAN, seed=3),), 0.1, tensorflow=False))


def test_if_the_worker_is_retired_that_makes_the_first_samples_again_another_one_does(world: World) -> None:
    for worker in (FIRST, FIRST + 1):
        world.worker_says(worker, m.Imported((PLAN,), 0.1, tensorflow=False))
    world.host.retire(FIRST)
    assert isinstance(world.network.told(FIRST + 1)[-1], m.Compare)
    world.worker_says(FIRST, m.Compared(0))
    assert not world.host.working
    world.worker_says(FIRST + 1, m.Compared(0))
    assert world.host.there == {FIRST + 1}


@pytest.mark.parametrize(
    ("address", "port", "endpoint"),
    [("10.0.0.5:41000", 7000, "tcp://10.0.0.5:7000"), ("fe80::5:41000", 7, "tcp://[fe80::5]:7")],
)
def test_consumers_fetch_at_the_address_from_which_a_host_joins(
    world: World, address: str, port: int, endpoint: str
) -> None:
    world.host.address = address
    world.host.join = msgspec.structs.replace(world.host.join, fetch_port=port)
    assert not world.host.fetchable, "it was not checked"
    world.works()
    assert world.host.fetchable
    assert world.host.where == m.HostAt(1, endpoint)
    world.says(m.Leaving())
    assert not world.host.fetchable
