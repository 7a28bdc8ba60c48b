"""The machines on which the batches of ranks are made, at the coordinator's door."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import pytest

from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.open_request import OpenRequest
from penstock_server.coordinator.model.workers import REMOTE
from penstock_server.coordinator.order.epoch import Epoch
from tests.coordinator.test_coordinator_hosts import Daemon


class Job(Daemon):
    """A daemon, joined hosts, and a job of ranks that reads an epoch.

    Args:
        ranks: the machine of each rank, one letter each; "." is the daemon's machine.
        hosts: the machine of each remote worker, one letter each.
        own: the number of the daemon's own workers that make batches.
        ends: the number of batches of some lanes. The other lanes have no end.
    """

    def __init__(
        self, ranks: str, hosts: str, own: int = 0, ends: Mapping[int, int] | None = None, **options: Any
    ) -> None:
        super().__init__(max(1, own), idle=not own, turn=options.pop("turn", 1), credit=4, **options)
        self.tell(on.Close(1, 0))
        self.tell(on.Lost(1, 0))
        self.machine_of = dict.fromkeys(range(own), ".")
        self.todo: deque[do.Command] = deque()
        self.ends = ends or {}
        self.lanes: dict[int, int] = {}
        """The lane of each run."""
        self.fills: dict[int, do.Fill] = {}
        self.sent: list[tuple[int, do.Fill]] = []
        """The rank that each batch was sent to, and the command to make it."""
        self.add(hosts)
        self.ranks = len(ranks)
        for rank, machine in enumerate(ranks):
            ask = OpenRequest(4, 1 << 40, 0, rank=rank, world_size=len(ranks), machine=machine.strip("."))
            self.do(self.tell(on.Open(2 + rank, "train", ask)))
        for rank in range(self.ranks):
            self.do(self.tell(on.Begin(2 + rank, 0)))

    def add(self, hosts: str) -> None:
        """Let remote workers on these machines join."""
        for machine in hosts:
            worker = REMOTE + len(self.machine_of)
            self.machine_of[worker] = machine
            self.do(self.tell(on.WorkerAdded(worker, machine)))
            self.do(self.tell(on.Imported(worker, (self.plan,))))

    def lose(self, machine: str) -> None:
        """Lose the host on this machine."""
        lost = tuple(worker for worker, at in self.machine_of.items() if at == machine)
        self.do(self.tell(on.WorkersLost(lost, "is lost")))

    def do(self, commands: list[do.Command]) -> None:
        self.todo.extend(commands)

    def read(self, batches: int) -> list[tuple[int, do.Fill]]:
        """Make `batches` more batches, one by one, and hand each over at once. Return them with their ranks."""
        before = len(self.sent)
        while len(self.sent) < before + batches:
            command = self.todo.popleft()
            if isinstance(command, do.FindSlot):
                self.do(self.tell(on.SlotFound(command.ticket)))
            elif isinstance(command, do.StartRun):
                self.lanes[command.run] = command.lane
            elif isinstance(command, do.Fill):
                self.fills[command.ticket] = command
                if command.index >= self.ends.get(self.lanes[command.run], command.index + 1):
                    self.do(self.made(command, batches=0, ended=True))
                    continue
                for place in range(command.batches):
                    last = place == command.batches - 1
                    border = command.index % 4 == 3
                    self.do(self.made(command, first=place, last=last, record=b"r", border=border))
            elif isinstance(command, do.SendSlab):
                self.sent.append((command.consumer - 2, self.fills[command.ticket]))
                self.do(self.tell(on.Acknowledge(command.consumer, command.seq + 1, (), 0)))
        return self.sent[before : before + batches]

    def near(self, ranks: str, batches: int = 24) -> list[bool]:
        """Return whether each of the next batches is made on the machine of the rank that gets it."""
        return [self.machine_of[fill.worker] == ranks[rank] for rank, fill in self.read(batches)]


@pytest.mark.parametrize("kind", [{"length": 10_000}, {"lanes": 8}])
@pytest.mark.parametrize(
    ("ranks", "hosts", "own"),
    [
        ("ab", "aabb", 0),
        ("ab", "bbaa", 0),
        ("aabb", "abab", 0),
        (".a", "aa", 2),
        ("abcd", "aaabbbcccddd", 0),
        ("ab", "aaaaabbbb", 0),  # four for one and five for the other: nearly its share
        pytest.param("a.b.", "ab", 2, id="ranks of one machine lie apart"),
    ],
)
def test_each_rank_gets_what_its_own_machine_has_made(ranks: str, hosts: str, own: int, kind: dict[str, Any]) -> None:
    job = Job(ranks, hosts, own, **kind)
    assert all(job.near(ranks))
    assert all(2 + rank == fill.reader for rank, fill in job.sent)
    assert job.coordinator.streams[2].view.made_near
    assert not job.coordinator.streams[2].view.why_made_anywhere
    used = {fill.worker for _, fill in job.read(48)}
    assert len(used) == min(len(hosts) + own, kind.get("lanes", 100))  # each has work


@pytest.mark.parametrize("kind", [{"length": 10_000}, {"lanes": 8}])
@pytest.mark.parametrize(
    ("ranks", "hosts", "own"),
    [
        pytest.param("ab", "aaab", 0, id="one machine has too few"),
        pytest.param("ab", "aabbc", 0, id="a machine without ranks has some"),
        pytest.param("ab", "aabb", 2, id="the daemon has some"),
        pytest.param("ab", "aaaa", 0, id="one machine has none"),
        pytest.param("aa", "aabb", 0, id="all ranks are on one machine"),
        pytest.param("aab", "abb", 0, id="two ranks have one worker"),
    ],
)
def test_all_workers_make_batches_for_all_ranks_if(ranks: str, hosts: str, own: int, kind: dict[str, Any]) -> None:
    job, elsewhere = Job(ranks, hosts, own, **kind), Job("xyz"[: len(ranks)], hosts, own, **kind)
    assert job.read(48) == elsewhere.read(48)
    assert not all(job.near(ranks))
    assert not job.coordinator.streams[2].view.made_near
    assert all(2 + rank == fill.reader for rank, fill in job.sent)


@pytest.mark.parametrize(
    ("ranks", "hosts", "options", "why"),
    [
        ("ab", "aaab", {}, "b has 1 of 4 workers and 1 of 2 ranks, and needs 2 workers"),
        ("aab", "abb", {"lanes": 12}, "a has 1 of 3 workers and 2 of 3 ranks, and needs 2 workers"),
        ("ab", "aabbc", {}, "c has workers, and no rank"),
        ("ab", "aabb", {"own": 2}, "the head's machine has workers, and no rank"),
        (".b", "bb", {}, "the head's machine has a rank, and no worker"),
        ("ab", "aaa", {}, "b has a rank, and no worker"),
        ("ab", "aabb", {"lanes": 5}, "5 lanes are not a multiple of 2 ranks"),
        (
            ".a",
            "a" * 9,
            {"own": 7},
            "a worker of the head's machine would have 2 lanes, and only 1 if all workers share them",
        ),
        ("ab", "aabb", {"turn": 4}, "a turn has 4 batches: set Feed(turn=1)"),
        ("ab", "aabb", {"order": "fast"}, 'the order is "fast", and not "exact"'),
        ("ab", "cc", {}, ""),  # nobody would expect it
        ("ab", "", {"own": 2}, ""),
        ("aa", "aabb", {}, ""),
        ("a", "aabb", {}, ""),
    ],
)
def test_it_is_said_why_batches_are_made_anywhere(ranks: str, hosts: str, options: dict[str, Any], why: str) -> None:
    job = Job(ranks, hosts, **{"lanes": 16, **options})
    job.read(16)
    assert not job.coordinator.streams[2].view.made_near
    assert job.coordinator.streams[2].view.why_made_anywhere == why


def test_it_is_said_that_lanes_shuffle() -> None:
    job = Job("ab", "aabb", lanes=8, shuffle=64)
    assert job.coordinator.streams[2].view.why_made_anywhere == "lanes shuffle their samples"


def test_of_a_group_nothing_is_said() -> None:
    daemon = Daemon(1, idle=True, turn=1, credit=4, lanes=16)
    daemon.tell(on.Close(1, 0))
    daemon.tell(on.Lost(1, 0))
    for worker, machine in ((REMOTE, "a"), (REMOTE + 1, "b")):
        daemon.tell(on.WorkerAdded(worker, machine))
        daemon.tell(on.Imported(worker, (daemon.plan,)))
    for consumer, machine in ((2, "a"), (3, "b")):
        daemon.tell(on.Open(consumer, "train", OpenRequest(4, 1 << 40, 0, group="team", machine=machine)))
        daemon.tell(on.Begin(consumer, 0))
    (stream,) = {id(one): one for one in daemon.coordinator.streams.values()}.values()
    assert len(stream.consumers) == 2
    assert not stream.view.why_made_anywhere


def test_no_worker_gets_more_lanes_because_workers_are_divided() -> None:
    job = Job(".a", "a" * 9, own=7, lanes=16)
    assert len({fill.worker for _, fill in job.read(64)}) == 16
    assert not all(job.near(".a"))


@pytest.mark.parametrize("ranks", ["ab", "abcd"])
def test_readers_are_known_again_when_lanes_have_ended(ranks: str) -> None:
    job = Job(ranks, ranks, lanes=8, ends={0: 2, 3: 5, 4: 5})
    job.read(64)
    assert all(2 + rank == fill.reader for rank, fill in job.read(64))


def test_the_loads_of_each_machine_are_its_own() -> None:
    epoch = Epoch(0, live=5)
    epoch.loads.update({1: 2, 2: 1})
    few, all_workers = [3], [1, 2, 3]
    assert epoch.loads_of(few, 3) == epoch.loads_of(few, 3)
    assert (epoch.loads_of(few, 3).most, epoch.loads_of(few, 3).lacking) == (0, 1)
    assert (epoch.loads_of(all_workers, 3).most, epoch.loads_of(all_workers, 3).free) == (2, 2)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"lanes": 8, "turn": 4}, id="turns of several batches"),
        pytest.param({"lanes": 8, "order": "fast"}, id="fast order"),
    ],
)
def test_nobody_is_named_if_it_is_not_known_who_gets_a_batch(options: dict[str, Any]) -> None:
    job = Job("ab", "aabb", **options)
    assert all(fill.reader is None for _, fill in job.read(24))


def test_nobody_is_named_if_lanes_mix_their_rows() -> None:
    job = Job("ab", "aabb", lanes=8, shuffle=64)
    found = job.find([*job.todo])
    fills = [command for command in found if isinstance(command, do.Fill)]
    assert fills
    assert all(fill.reader is None for fill in fills)


def test_lanes_that_several_ranks_read_in_turn_are_made_anywhere() -> None:
    job, elsewhere = Job("ab", "aabb", lanes=5), Job("yz", "aabb", lanes=5)
    assert job.read(40) == elsewhere.read(40)
    assert all(2 + rank == fill.reader for rank, fill in job.sent)


@pytest.mark.parametrize("kind", [{"length": 10_000}, {"lanes": 8}])
def test_lanes_go_home_when_a_host_joins(kind: dict[str, Any]) -> None:
    job = Job("ab", "aa", **kind)
    job.read(16)
    job.add("bb")
    job.read(32)
    assert all(job.near("ab"))


@pytest.mark.parametrize("kind", [{"length": 10_000}, {"lanes": 20}])
def test_when_a_worker_dies_others_on_its_machine_take_over(kind: dict[str, Any]) -> None:
    job = Job("ab", "aaaaabbbbb", **kind)
    for _ in range(20):  # whichever it is
        died = job.read(7)[-1][1].worker
        job.do(job.tell(on.WorkerDied(died, "was killed")))
        assert all(job.near("ab"))
        job.do(job.tell(on.Imported(died, (job.plan,))))
        assert all(job.near("ab"))


@pytest.mark.parametrize("kind", [{"length": 10_000}, {"lanes": 8}])
def test_when_a_host_is_lost_the_other_makes_all_and_shares_again_when_it_is_back(kind: dict[str, Any]) -> None:
    job = Job("ab", "aabb", **kind)
    assert all(job.near("ab"))
    job.lose("b")
    job.read(32)
    assert not all(job.near("ab"))
    job.add("bb")
    job.read(32)
    assert all(job.near("ab"))
    assert len({fill.worker for _, fill in job.read(24)}) == 4
