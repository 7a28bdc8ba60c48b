"""Batches that a lost host kept, at the coordinator's door: they are made again, beside the lane's own run.

Each test is a short history. Long histories are simulated (test_simulated_hosts.py).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from penstock_proto import ConnectionLost, GeneratorError
from penstock_proto import messages as m
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.known_lists import SplitsInfo
from penstock_server.coordinator.model.open_request import OpenRequest
from tests.coordinator.test_coordinator_hosts import A, B, C, D, Daemon, of


def fill_of(daemon: Daemon, index: int = 0) -> do.Fill:
    """Return fill number `index`, for a remote worker."""
    return [command for command in daemon.find(daemon.opened) if isinstance(command, do.Fill)][index]


def lost(daemon: Daemon, worker: int, *tickets: int) -> list[do.Command]:
    """Lose the worker's host, with the batches that it kept for these tickets. Return the commands for the latter."""
    daemon.tell(on.WorkersLost((worker,), "is lost"))
    return daemon.tell(on.BytesLost(tickets))


def kept(**options: Any) -> tuple[Daemon, do.Fill]:
    """Return a daemon and a turn that A has made. A's host keeps its two batches. B has joined since."""
    daemon = Daemon(turn=2, credit=4, **options)
    daemon.begin()
    daemon.join(A)
    fill = fill_of(daemon)
    assert fill.worker == A
    daemon.made(fill, 2, record=b"behind")
    daemon.join(B)
    return daemon, fill


class TestWhatMayStay:
    @pytest.mark.parametrize(
        ("stays", "options"),
        [
            (True, {}),
            (True, {"length": 100}),
            (True, {"order": "fast"}),
            (True, {"ragged": True, "shuffle": 100}),
            (False, {"shuffle": 100, "lanes": 4}),  # its rows are mixed at the head
            (False, {"on_error": "skip"}),  # another attempt might not fail where the first one did
            (False, {"group": "g"}),  # a consumer that comes later may not reach the host
        ],
    )
    def test_is_a_matter_of_the_feed(self, stays: bool, options: dict[str, Any]) -> None:
        daemon = Daemon(**options)
        daemon.tell(on.Begin(1, 0))
        daemon.join(A)
        assert fill_of(daemon).may_stay == stays

    def test_is_nothing_of_an_epoch_with_a_list_of_its_own(self) -> None:
        daemon = Daemon(static_splits=False)
        (listing,) = of(do.ListSplits, daemon.opened)
        listed = daemon.tell(on.SplitsListed(listing.run, SplitsInfo(2, 4, bytes(32))))
        daemon.join(A)
        (fill, *_) = of(do.Fill, daemon.find(listed))
        assert (fill.worker, fill.may_stay) == (A, False)

    def test_is_nothing_that_own_workers_make(self) -> None:
        daemon = Daemon(idle=False)
        assert not fill_of(daemon).may_stay

    def test_is_nothing_of_a_turn_that_has_changed_hands(self) -> None:
        daemon = Daemon(turn=4)
        daemon.join(A, B)
        fill = fill_of(daemon)
        daemon.made(fill, 1, last=False, record=b"r")
        (again,) = of(do.Fill, daemon.tell(on.WorkerDied(fill.worker, "was killed")))
        assert (again.first, again.may_stay) == (1, False)


class TestWhatIsLost:
    def test_is_made_again_in_the_same_slot_from_the_record_before_it(self) -> None:
        daemon, fill = kept()
        start, again = lost(daemon, A, fill.ticket)[-2:]
        assert isinstance(start, do.StartRun)
        assert (start.worker, start.lane, start.record) == (B, 0, b"")
        assert again == do.Fill(B, start.run, fill.ticket, index=0, batches=2, first=0)
        assert daemon.made(again, 1, last=False, record=b"x") == []
        assert daemon.made(again, 1, first=1, record=b"y") == [do.DropRun(B, start.run), do.Remade(fill.ticket)]
        assert daemon.epoch.lane(0).record == b"behind", "the lane must go on from its own record"

    def test_was_delivered_already_and_its_slot_is_freed_only_when_both_have_let_go(self) -> None:
        daemon, fill = kept()
        (again,) = [one for one in of(do.Fill, lost(daemon, A, fill.ticket)) if one.ticket == fill.ticket]
        assert do.Free(fill.ticket) not in daemon.tell(on.Acknowledge(1, 1, (0,), 0)), "a worker still writes there"
        assert do.Free(fill.ticket) in daemon.made(again, 0, record=b"")

    def test_takes_its_room_from_production_when_only_its_worker_holds_it(self) -> None:
        daemon = Daemon(turn=1, credit=4, lanes=1)
        daemon.begin()
        fill, *_ = of(do.Fill, daemon.find([*daemon.opened, *daemon.join(A)]))
        daemon.find(daemon.made(fill, record=b"r"))
        daemon.join(B)
        commands = [*daemon.tell(on.WorkersLost((A,), "is lost")), *daemon.tell(on.BytesLost((fill.ticket,)))]
        commands += daemon.find(commands)
        (again,) = [one for one in of(do.Fill, commands) if one.ticket == fill.ticket]
        todo = deque(one for one in of(do.Fill, commands) if one.ticket != fill.ticket)
        daemon.tell(on.Acknowledge(1, 1, (0,), 0))
        while todo:  # until production has all slots that it may have
            commands = daemon.made(todo.popleft(), record=b"s")
            todo += of(do.Fill, [*commands, *daemon.find(commands)])
        assert of(do.FindSlot, daemon.made(again, record=b"r")), "production must get the room back"

    def test_is_made_again_from_the_record_of_the_turn_before(self) -> None:
        daemon = Daemon(turn=1, credit=4, lanes=1)
        daemon.begin()
        joined = daemon.join(A)
        fills = of(do.Fill, daemon.find([*daemon.opened, *joined]))
        fills += of(do.Fill, daemon.find(daemon.made(fills[0], record=b"one")))
        daemon.made(fills[1], record=b"two")
        daemon.join(B)
        again = lost(daemon, A, fills[1].ticket)
        (run,) = [one.run for one in of(do.Fill, again) if one.ticket == fills[1].ticket]
        (start,) = [one for one in of(do.StartRun, again) if one.run == run]
        assert (start.worker, start.record) == (B, b"one")

    def test_waits_until_the_rest_of_its_turn_is_made(self) -> None:
        daemon = Daemon(turn=2)
        daemon.join(A)
        fill = fill_of(daemon)
        daemon.made(fill, 1, last=False, record=b"r")
        daemon.join(B)
        (rest,) = of(do.Fill, daemon.tell(on.WorkersLost((A,), "is lost")))
        assert (rest.first, rest.batches) == (1, 1)
        assert of(do.Fill, daemon.tell(on.BytesLost((fill.ticket,)))) == []
        (again,) = [one for one in of(do.Fill, daemon.made(rest, 1, record=b"s")) if one.ticket == fill.ticket]
        assert (again.first, again.batches, again.index) == (0, 1, 0)

    def test_and_nobody_needs_is_not_made_again(self) -> None:
        daemon, fill = kept()
        daemon.tell(on.Acknowledge(1, 1, (0,), 0))
        assert of(do.Fill, lost(daemon, A, fill.ticket)) == []

    def test_when_no_worker_is_left_waits_for_one(self) -> None:
        daemon = Daemon(turn=2, credit=4)
        daemon.begin()
        daemon.join(A)
        fill = fill_of(daemon)
        daemon.made(fill, 2, record=b"behind")
        assert of(do.Fill, lost(daemon, A, fill.ticket)) == []
        assert (fill.ticket, 0) in [(one.ticket, one.first) for one in of(do.Fill, daemon.join(C))]

    def test_is_forgotten_when_the_stream_ends(self) -> None:
        daemon, fill = kept()
        (again,) = [one for one in of(do.Fill, lost(daemon, A, fill.ticket)) if one.ticket == fill.ticket]
        assert do.DropRun(B, again.run) in daemon.tell(on.Close(1, 0))
        daemon.tell(on.Lost(1, 0))
        assert daemon.coordinator.streams
        daemon.tell(on.WorkersLost((B,), "is lost"))
        assert not daemon.coordinator.streams
        assert daemon.coordinator.budget.nbytes_reserved == 0

    def test_and_is_not_made_again_keeps_nobody_waiting(self) -> None:
        """A copy may wait for it, and the stream cannot end before that copy is answered for."""
        daemon = Daemon(turn=2)
        daemon.join(A)
        fill = fill_of(daemon)
        daemon.made(fill, 1, last=False, record=b"r")
        daemon.join(B)
        lost(daemon, A, fill.ticket)
        assert do.Remade(fill.ticket, whole=False) in daemon.tell(on.Close(1, 0))


class TestAWorkerThatMakesItAgain:
    def test_may_be_lost_any_number_of_times(self) -> None:
        daemon, fill = kept()
        lost(daemon, A, fill.ticket)
        for worker in (C, D, C + 10, D + 10):
            daemon.join(worker)
            before = daemon.coordinator.workers.makers[0]
            again = of(do.Fill, daemon.tell(on.WorkersLost((before,), "is lost")))
            assert (worker, fill.ticket) in [(one.worker, one.ticket) for one in again]
        assert daemon.coordinator.streams[1].error is None

    def test_may_end_in_user_code_or_fail_there_twice_and_then_the_consumers_come_again(self) -> None:
        daemon, fill = kept()
        daemon.join(C)
        again = lost(daemon, A, fill.ticket)
        for end in ("dies", "fails", "dies"):
            assert daemon.coordinator.streams[1].error is None
            (one,) = [one for one in of(do.Fill, again) if one.ticket == fill.ticket]
            if end == "dies":
                again = daemon.tell(on.WorkerDied(one.worker, "was killed", (one.run, 0, "0")))
                again += daemon.tell(on.Imported(one.worker, (daemon.plan,)))
            else:
                again = daemon.tell(on.RunFailed(one.run, GeneratorError("no such file")))
        error = daemon.coordinator.streams[1].error
        assert isinstance(error, ConnectionLost), "so that clients reconnect, with their positions"
        assert "batches were lost with their host, and could not be made again (a worker was killed)" in error.message

    def test_must_make_as_many_batches_of_the_same_size(self) -> None:
        daemon, fill = kept()
        (again,) = [one for one in of(do.Fill, lost(daemon, A, fill.ticket)) if one.ticket == fill.ticket]
        daemon.made(again, 1, record=b"", ended=True)
        error = daemon.coordinator.streams[1].error
        assert isinstance(error, ConnectionLost)
        assert "a worker made 1 batches instead of 2" in error.message

    def test_and_finds_another_size_tries_again_elsewhere(self) -> None:
        daemon, fill = kept()
        (again,) = [one for one in of(do.Fill, lost(daemon, A, fill.ticket)) if one.ticket == fill.ticket]
        drop, *after = daemon.tell(m.NeedRoom(again.run, again.ticket, 100_000))
        assert drop == do.DropRun(B, again.run)
        assert fill.ticket in [one.ticket for one in of(do.Fill, after)]

    def test_is_not_ended_before_it_has_answered(self) -> None:
        daemon, fill = kept()
        (again,) = [one for one in of(do.Fill, lost(daemon, A, fill.ticket)) if one.ticket == fill.ticket]
        daemon.join(C)
        daemon.tell(on.RetireWorkers((B,)))
        assert daemon.coordinator.streams[1].uses(B)
        daemon.made(again, 2, record=b"")
        assert not daemon.coordinator.streams[1].remaking.uses(B)


def test_bytes_of_a_stream_that_has_ended_are_nobodys() -> None:
    daemon, fill = kept()
    daemon.tell(on.Close(1, 0))
    daemon.tell(on.Lost(1, 0))
    assert lost(daemon, A, fill.ticket) == []


def test_each_rank_gets_what_it_was_promised() -> None:
    daemon = Daemon(turn=1, credit=4)
    daemon.tell(on.Close(1, 0))
    daemon.tell(on.Lost(1, 0))
    for rank in range(2):
        daemon.tell(on.Open(2 + rank, "train", OpenRequest(4, 1 << 40, 2, rank=rank, world_size=2)))
    for rank in range(2):
        begun = daemon.tell(on.Begin(2 + rank, 0))
    daemon.opened = begun
    daemon.join(A)
    fills = of(do.Fill, daemon.find(begun))
    assert fills[0].may_stay
    for fill in fills[:2]:
        daemon.made(fill, record=b"r")
    daemon.join(B)
    tickets = {fill.ticket for fill in fills[:2]}
    again = lost(daemon, A, *tickets)
    assert {one.ticket for one in of(do.Fill, again)} >= tickets
    assert daemon.coordinator.streams[2].error is None
