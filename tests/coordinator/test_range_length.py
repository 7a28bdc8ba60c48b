"""Ranges of an indexable feed are as long as a worker makes in a moment, and share slots."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_proto import ProtocolError
from penstock_proto import messages as m
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.production.range_length import MOST_MS, RangeLength
from tests.coordinator.test_coordinator_tables import Machine

MOST = 8


class TestTheLength:
    def test_is_doubled_from_one_batch_on_while_ranges_take_less_than_a_moment(self) -> None:
        length, seen = RangeLength(20), []
        for _ in range(6):
            seen.append(length.batches)
            length.on_made(length.batches, 10, last=True)
        assert seen == [1, 2, 4, 8, 16, 20]

    @pytest.mark.parametrize(
        ("batches", "ms", "then"),
        [
            (16, 99, 32),
            (16, 100, 16),
            (16, 200, 16),
            (16, 400, 4),
            (16, 60_000, 1),
            (3, 60_000, 1),
        ],
    )
    def test_follows_the_time_of_a_range(self, batches: int, ms: int, then: int) -> None:
        length = self._of_16()
        length.on_made(batches, ms, last=True)
        assert length.batches == then

    def test_is_shorter_as_soon_as_a_part_of_a_range_has_taken_long(self) -> None:
        length = self._of_16()
        length.on_made(2, 150, last=False)
        assert length.batches == 16
        length.on_made(3, 300, last=False)
        assert length.batches == 1

    def test_is_not_longer_because_a_shorter_range_was_quick_or_a_longer_one_has_only_begun(self) -> None:
        length = self._of_16()
        length.on_made(15, 0, last=True)
        length.on_made(16, 0, last=False)
        assert length.batches == 16

    @staticmethod
    def _of_16() -> RangeLength:
        length = RangeLength(64)
        for batches in (1, 2, 4, 8):
            length.on_made(batches, 0, last=True)
        assert length.batches == 16
        return length


class Ranges(Machine):
    """A coordinator with an indexable feed whose ranges have at most MOST batches. Its consumer takes everything."""

    def __init__(self, workers: int = 2, **options: Any) -> None:
        options = {"turn": None, "length": 4 * 64 * MOST, "static_splits": False, **options}
        super().__init__(workers, credit=1000, **options)
        assert self.coordinator.feeds["train"].turn == (options["turn"] or MOST)
        self.fills: list[do.Fill] = []
        self._sent = 0
        self.begin()
        self.find(self.opened)

    def find(self, commands: list[do.Command]) -> None:
        """Find the slots that are asked for, and note what workers are told to make. Take all slabs, and release
        them."""
        for command in commands:
            if isinstance(command, do.Fill):
                self.fills.append(command)
            elif isinstance(command, do.FindSlot):
                self.find(self.tell(on.SlotFound(command.ticket)))
            elif isinstance(command, do.SendSlab):
                self._sent += 1
                self.find(self.tell(on.Acknowledge(1, self._sent, (command.seq,), 0)))

    def makes(self, fill: do.Fill, work_ms: int) -> None:
        self.fills.remove(fill)
        self.find(self.made(fill, fill.batches, work_ms=work_ms))

    @property
    def slots(self) -> int:
        return len(self.coordinator.streams[1].slots)


def test_at_first_each_worker_has_two_ranges_of_one_batch_and_all_share_a_slot() -> None:
    machine = Ranges(workers=3)
    fills = sorted(machine.fills, key=lambda fill: fill.index)
    assert [(fill.worker, fill.index, fill.batches, fill.first) for fill in fills] == [
        (number % 3, number, 1, number) for number in range(6)
    ]
    assert len({fill.slot for fill in machine.fills}) == machine.slots == 1


def test_ranges_of_quick_samples_soon_fill_a_slot_each() -> None:
    machine = Ranges()
    for _ in range(40):
        machine.makes(machine.fills[0], work_ms=1)
    assert [(fill.batches, fill.first) for fill in machine.fills] == [(MOST, 0)] * 4
    assert len({fill.slot for fill in machine.fills}) == 4


def test_ranges_of_slow_samples_stay_short_and_need_no_more_slots() -> None:
    machine = Ranges()
    for _ in range(40):
        machine.makes(machine.fills[0], work_ms=5000)
        assert machine.slots <= 2
    assert [fill.batches for fill in machine.fills] == [1] * 4


def test_a_worker_that_is_slow_gets_a_range_only_when_it_has_made_one() -> None:
    machine = Ranges(workers=3)
    slow = [fill for fill in machine.fills if fill.worker == 0]
    for _ in range(20):
        machine.makes(next(fill for fill in machine.fills if fill.worker), work_ms=5000)
    assert [fill for fill in machine.fills if fill.worker == 0] == slow
    assert max(fill.index for fill in machine.fills) == 25, "the others work ahead, in slots that are full"
    assert machine.slots == 26 // MOST + 1
    machine.makes(slow[0], work_ms=5000)
    assert [fill.index for fill in machine.fills if fill.worker == 0] == [3, 26]


def test_after_a_death_the_ranges_of_the_worker_are_shared_by_the_others() -> None:
    machine = Ranges(workers=3)
    again = [command for command in machine.tell(on.WorkerDied(0, "was killed", None)) if isinstance(command, do.Fill)]
    assert sorted(fill.index for fill in again) == [0, 3]
    assert {fill.worker for fill in again} == {1, 2}


def test_a_turn_that_the_user_gave_stays_the_length_of_a_range() -> None:
    machine = Ranges(turn=5)
    for _ in range(10):
        machine.makes(machine.fills[0], work_ms=5000)
    assert {(fill.batches, fill.most_ms) for fill in machine.fills} == {(5, 0)}
    assert {fill.first for fill in machine.fills} == {0}


def test_the_time_of_a_range_that_another_worker_had_begun_is_that_of_its_rest() -> None:
    machine = Ranges()
    for _ in range(40):
        machine.makes(machine.fills[0], work_ms=1)
    begun = next(fill for fill in machine.fills if fill.worker == 0)
    machine.made(begun, MOST - 1, last=False, work_ms=1)
    machine.fills = [fill for fill in machine.fills if fill.worker]
    machine.find(machine.tell(on.WorkerDied(0, "was killed", None)))
    (rest,) = [fill for fill in machine.fills if fill.ticket == begun.ticket]
    assert (rest.batches, rest.index, rest.first) == (1, begun.index + MOST - 1, MOST - 1)
    machine.makes(rest, work_ms=300)
    for _ in range(2):  # the others of that worker, until it needs another
        machine.makes(machine.fills[0], work_ms=150)
    assert machine.fills[-1].batches == 1


def test_while_a_worker_stands_the_others_get_ranges_without_end() -> None:
    machine = Ranges()
    machine.coordinator.workers.on_stands(0)
    for _ in range(20):
        machine.makes(next(fill for fill in machine.fills if fill.worker), work_ms=5000)
    assert max(fill.index for fill in machine.fills) == 23


def test_ranges_of_the_next_epoch_do_not_go_to_a_slot_that_was_freed() -> None:
    machine = Machine(workers=2, turn=None, length=4 * 64 * MOST, static_splits=False)
    machine.begin()
    (first,) = machine.tickets
    commands = machine.tell(on.Leave(1, 0, 0))
    assert do.Free(first) in commands
    (second,) = [command.ticket for command in commands if isinstance(command, do.FindSlot)]
    filled = [command for command in machine.tell(on.SlotFound(second)) if isinstance(command, do.Fill)]
    assert [fill.slot for fill in filled] == [second] * 4


def test_the_rest_of_a_range_that_takes_long_is_made_by_all_workers_in_its_place() -> None:
    machine = Ranges()
    for _ in range(40):
        machine.makes(machine.fills[0], work_ms=1)
    long = min(machine.fills, key=lambda fill: fill.index)
    assert long.most_ms == MOST_MS
    machine.fills.clear()
    machine.find(machine.made(long, 2, work_ms=400))  # it has stopped
    places = [(fill.index - long.index, fill.first, fill.batches, fill.slot) for fill in machine.fills]
    assert sorted(places) == [(number, number, 1, long.slot) for number in range(2, MOST)]
    assert [sum(fill.worker == worker for fill in machine.fills) for worker in (0, 1)] == [3, 3]


def test_a_range_of_no_batch_is_an_error() -> None:
    machine = Ranges()
    fill = next(fill for fill in machine.fills if not fill.index)
    (failed,) = [command.message for command in machine.made(fill, 0) if isinstance(command, do.Tell)]
    assert isinstance(failed, m.Failed)
    assert isinstance(failed.error.error(), ProtocolError)
