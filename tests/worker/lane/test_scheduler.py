"""Which job a worker does next: streams share its time, and within a stream the oldest ticket comes first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

from penstock_server.worker.tasks.scheduler import SLICE_SECONDS, Job, Scheduler

STEP = SLICE_SECONDS / 3.9
"""Seconds of a step: four steps make a slice."""


@dataclass(eq=False)
class Run:
    stream: int
    waits: bool = False


class World:
    """Jobs whose steps take the time that a test gives."""

    def __init__(self) -> None:
        self.scheduler = Scheduler[Run](lambda run: run.stream, lambda run: run.waits)
        self.now = 0.0
        self.done: list[int] = []

    def add(
        self, run: Run, ticket: int, steps: int = 1, *, first: bool = False, stripe: int = 0, place: int = 0
    ) -> None:
        job = Job(run, ticket, fills=True, stripe=stripe, place=place)
        job.steps = repeat(None, steps)
        self.scheduler.add(job, first=first)

    def step(self, seconds: float = STEP) -> int:
        """Take a step, and return the ticket of its job."""
        job = self.scheduler.next()
        assert job is not None
        began, self.now = self.now, self.now + seconds
        job.place += 3 * bool(job.stripe)
        if next(job.steps, self) is self:
            self.scheduler.done(job)
            self.done.append(job.ticket)
        self.scheduler.on_step(job, began, self.now)
        return job.ticket


def test_a_streams_jobs_are_done_one_after_another() -> None:
    world, run, other = World(), Run(1), Run(1)
    for ticket in range(4):
        world.add(run if ticket % 2 else other, ticket, steps=10)
    while world.scheduler.next() is not None:
        world.step()
    assert world.done == [0, 1, 2, 3]


def test_an_older_ticket_that_another_worker_had_before_comes_first() -> None:
    world, run, other = World(), Run(1), Run(1)
    world.add(run, 4, steps=10)
    world.add(run, 6)
    world.step()
    for ticket in (3, 5):
        world.add(other, ticket, steps=10)
    world.add(Run(1), 9, first=True)
    while world.scheduler.next() is not None:
        world.step()
    assert world.done == [9, 3, 4, 5, 6]


def test_after_a_slice_the_job_of_a_stripe_comes_whose_next_batch_is_first() -> None:
    world = World()
    for place in range(3):
        world.add(Run(1), 10 + place, steps=9, stripe=9, place=place)
    world.add(Run(1), 20)
    assert [world.step() for _ in range(12)] == [10] * 4 + [11] * 4 + [12] * 4, "quick batches of a lane stay together"
    slow = World()
    for place in range(3):
        slow.add(Run(1), 10 + place, steps=9, stripe=9, place=place)
    assert [slow.step(1.1 * SLICE_SECONDS) for _ in range(6)] == [10, 11, 12, 10, 11, 12]


def test_streams_take_turns_of_a_slice() -> None:
    world = World()
    world.add(Run(1), 1, steps=1000)
    world.add(Run(2), 2, steps=1000)
    world.add(Run(3), 3, steps=1000)
    assert [world.step() for _ in range(24)] == [1] * 4 + [2] * 4 + [3] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    slow = [world.step(SLICE_SECONDS * 9) for _ in range(6)]  # however long one step takes
    assert slow == [1, 2, 3, 1, 2, 3]


def test_one_that_has_much_to_do_does_not_hold_up_who_has_little_again_and_again() -> None:
    world = World()
    world.add(Run(1), 1, steps=10**6)
    waited = 0
    for ticket in range(10, 60):
        world.add(Run(2), ticket)
        while ticket not in world.done:
            waited += world.step() == 1
    assert waited <= 4 * 50


def test_a_run_that_waits_lets_others_of_its_stream_by_and_keeps_its_order() -> None:
    world, run, other = World(), Run(1, waits=True), Run(1)
    for ticket in (1, 2):
        world.add(run, ticket)
    world.add(other, 3)
    assert world.step() == 3
    world.step()
    assert world.scheduler.next() is None
    world.add(run, 0, first=True)
    run.waits = False
    while world.scheduler.next() is not None:
        world.step()
    assert world.done == [3, 0, 1, 2]


def test_the_jobs_of_a_run_that_is_dropped_are_returned_in_order() -> None:
    world, run, other = World(), Run(1), Run(1)
    for ticket in range(4):
        world.add(run if ticket % 2 else other, ticket, steps=9)
    world.step()
    assert [job.ticket for job in world.scheduler.drop(run)] == [1, 3]
    assert [job.ticket for job in world.scheduler.drop(other)] == [0, 2]
    assert world.scheduler.next() is None
    assert world.scheduler.drop(run) == []


def test_a_run_makes_its_batches_in_order_though_it_may_stop_waiting_at_any_moment() -> None:
    looks = iter([True, True, False, False])
    scheduler = Scheduler[Run](lambda run: run.stream, lambda run: run.waits and next(looks))
    waiting, other = Run(1, waits=True), Run(1)
    jobs = [Job(run, ticket, fills=True) for ticket, run in enumerate((waiting, waiting, other))]
    for job in jobs:
        scheduler.add(job)
    assert scheduler.next() is jobs[2]
    assert scheduler.next() is jobs[0]


def test_urgent_runs_come_first_in_their_stream_if_they_have_a_job_that_can_be_done() -> None:
    scheduler = Scheduler[Run](lambda run: run.stream, lambda run: run.waits)
    runs = [Run(1), Run(1), Run(1, waits=True), Run(1), Run(2)]
    jobs = [Job(run, ticket, fills=True) for ticket, run in enumerate([*runs[:4], runs[1], runs[4]])]
    for job in jobs:
        scheduler.add(job)
    assert scheduler.next(lambda run: run is runs[1]) is jobs[1]
    assert scheduler.next(lambda run: run is runs[0]) is jobs[0]
    assert scheduler.next(lambda run: run is runs[2]) is jobs[0], "it waits"
    assert scheduler.next(lambda run: run is runs[4]) is jobs[0], "it is of another stream"
    assert scheduler.next(lambda run: run not in runs) is jobs[0]
