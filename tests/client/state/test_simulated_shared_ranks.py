"""Ranks share what is made with other jobs of their feed, in the simulated world: with single consumers, and with ranks
of another world size. Each job still reads exactly its own stream."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock_proto import MemoryBound
from penstock_proto.batches.position import Position, pack, unpack
from tests.client.state.test_simulated_clients import faults
from tests.client.state.test_simulated_sharing import begun, roomy, with_hosts
from tests.coordinator.test_coordinator import (
    PAGE,
    Case,
    any_feeds,
    cases,
    quick,
    seeds,
    small_pools,  # noqa: F401 (a fixture)
    soak,
)
from tests.coordinator.test_ranks_rounds import filled_up
from tests.simulation.simulated_client import Client
from tests.simulation.simulation import Consumer, SimFeed, World

rank_jobs = st.tuples(st.integers(2, 4), st.booleans(), st.lists(st.none() | st.integers(1, 4), min_size=1, max_size=3))
"""How many ranks, whether the last round is filled up, and after how many slabs they leave each epoch, if they do."""
jobs_with_ranks = st.tuples(rank_jobs, st.lists(rank_jobs | begun, min_size=1, max_size=3)).flatmap(
    lambda jobs: st.permutations([jobs[0], *jobs[1]])
)
laters = st.lists(st.integers(0, 80), min_size=4, max_size=4)
"""After how many steps of the world each job starts."""


def _open_ranks(
    world: World, case: Case, number: int, job: tuple[int, bool, list[int | None]], position: Position | None = None
) -> list[Consumer]:
    """Open the ranks of a job. If there is no memory for one of them, the job does not begin."""
    world_size, pad, leaves = job
    first = position.epoch if position else 0
    reads = [(first + more, leave) for more, leave in enumerate(leaves)]
    ask = {**case.asks, "hoards": False, "stays": True, "world_size": world_size, "pad": pad, "group": f"job {number}"}
    ranks: list[Consumer] = []
    try:
        for rank in range(world_size):
            ranks.append(world.open(reads=reads, rank=rank, shares=True, position=position, **ask))
    except MemoryBound:
        for consumer in ranks:
            consumer.let_go()
            consumer.failures.append(MemoryBound("there is no memory for the other ranks"))
        return []
    return ranks


def _run(world: World, jobs: list[list[Consumer]]) -> None:
    """Continue until all jobs are gone.

    The ranks of a job go together, when all of them have read everything. A job that lost its connection may wait
    until another one goes, as there may be no memory for both.
    """
    while jobs and world.step():
        for ranks in [ranks for ranks in jobs if all(consumer.has_read_all for consumer in ranks)]:
            for consumer in ranks:
                consumer.let_go()
            jobs.remove(ranks)
        world.expect_an_end()
    world.run()


def _expected(case: Case, epoch: int, world_size: int, pad: bool) -> list[list[Any]]:
    batches = list(case.feed.expected(epoch))
    if pad:
        return filled_up(batches, world_size)
    return [batches[rank : len(batches) // world_size * world_size : world_size] for rank in range(world_size)]


def _read_by_all(
    case: Case, jobs: list[Any], laters: list[int], room: int, faults: dict[str, Any], memory: int = 0
) -> World:
    """Let each job read its stream, and check it."""
    memory = memory or case.memory * len(jobs) * 6 + room * 2 * PAGE
    world = World(case.feed, workers=case.workers, memory=memory, seed=case.seed, looks=20, **faults)
    alone: list[Client] = []
    together: list[tuple[tuple[int, bool, list[int | None]], list[Consumer]]] = []
    for number, (job, later) in enumerate(zip(jobs, laters, strict=False)):
        for _ in range(later):
            world.step()
        if isinstance(job, dict):
            with contextlib.suppress(MemoryBound):
                client = world.open(made=Client, shares=True, **job, **case.asks)
                assert isinstance(client, Client)
                alone.append(client)
        else:
            together.append((job, _open_ranks(world, case, number, job)))
    _run(world, [ranks for _, ranks in together])
    for client in alone:
        start = client.began or Position(client.stream.feed.info, 0)
        for epoch, read in client.read.items():
            batches = list(case.feed.expected(epoch))[start.batches + start.skip if epoch == start.epoch else 0 :]
            assert read == (batches if epoch in client.ended else batches[: len(read)])
        assert not client.failures
    for (world_size, pad, leaves), ranks in together:
        for epoch, leave in enumerate(leaves if ranks else []):
            expected = _expected(case, epoch, world_size, pad)
            for consumer, batches in zip(ranks, expected, strict=True):
                read = consumer.read[epoch]
                assert read == batches[: len(read)]
                assert len(read) >= len(batches[:leave])
        assert not any(consumer.failures for consumer in ranks)
    return world


shared = cases(any_feeds), jobs_with_ranks, laters, roomy


@settings(quick, max_examples=40)
@example(  # ranks joined again and again where the others left an epoch before there was a round for them
    Case(
        SimFeed(splits=(6, 3), lanes=5, batch_size=None, turn=1, growth=168),
        5,
        26,
        2493,
        {"hoards": False, "credit_bytes": 0, "quota": 1, "credit": 2},
    ),
    [
        (2, True, [3]),
        {"breaks": 1, "leaves": [6, None, -1, 3, None], "impatient": 0.0, "start": "beginning"},
        (4, True, [1, 3, None]),
        (4, False, [1]),
    ],
    [0, 24, 38, 77],
    100,
    {"scales": 1, "restarts": 0, "kills": 1, "cuts": 2},
)
@example(  # a job that lost its connection has to wait until the others have gone
    Case(
        SimFeed(length=29, batch_size=3, turn=3, drop_remainder=False, room=9),
        1,
        3,
        2357800,
        {"credit_bytes": 115, "hoards": True, "quota": 3, "credit": 2},
    ),
    [(4, True, [None, None]), (2, True, [1, 4, None]), (4, False, [None, 2]), (4, False, [None, 2, 4])],
    [60, 42, 70, 64],
    0,
    {"scales": 0, "restarts": 2, "kills": 2, "cuts": 3},
)
@given(*shared, faults)
def test_ranks_and_other_jobs_read_the_streams_that_they_would_read_alone(
    case: Case, jobs: list[Any], laters: list[int], room: int, faults: dict[str, int]
) -> None:
    _read_by_all(case, jobs, laters, room, faults)


@settings(quick, max_examples=15)
@example(  # a job was behind when the stream left out an epoch that it wanted
    Case(
        SimFeed(splits=(7, 7, 13, 3, 7, 13, 0, 13, 7), lanes=5, batch_size=4, growth=69, transforms=False),
        3,
        3,
        159706,
        {"credit": 1, "credit_bytes": 0, "quota": 0, "hoards": False},
    ),
    [
        (4, False, [2]),
        {"leaves": [1, 4, None, None], "impatient": 0.0, "breaks": 0, "start": "latest"},
        {"leaves": [5, None, None, None], "impatient": 0.3, "breaks": 0, "start": "latest"},
        (2, False, [None]),
    ],
    [1, 70, 33, 69],
    0,
    {"idle": False, "hosts": 1, "joins": 1, "leaves": 1, "losses": 1, "cuts": 3},
)
@given(*shared, with_hosts)
def test_so_they_do_with_hosts(
    case: Case, jobs: list[Any], laters: list[int], room: int, faults: dict[str, Any]
) -> None:
    _read_by_all(case, jobs, laters, room, faults)


@settings(quick, max_examples=15)
@given(*shared, faults)
def test_so_they_do_with_little_memory(
    case: Case, jobs: list[Any], laters: list[int], room: int, faults: dict[str, int]
) -> None:
    _read_by_all(case, jobs, laters, 0, faults, case.memory + (8 + room) * PAGE)


def _resumed_by_all(case: Case, jobs: list[tuple[int, bool]], room: int, faults: dict[str, int], seed: int) -> None:
    """Let ranks go on from near the same place, between two of their rounds, and check what they read."""
    dice = random.Random(seed)
    first = case.world().open(reads=[(epoch, None) for epoch in range(3)], **case.asks)
    first._world.run()
    lengths = [len(list(case.feed.expected(epoch))) for epoch in range(3)]
    near = dice.randint(0, sum(lengths))
    memory = case.memory * len(jobs) * 6 + room * 2 * PAGE
    world = World(case.feed, workers=case.workers, memory=memory, seed=case.seed, looks=20, **faults)
    begins = []
    for world_size, pad in jobs:
        at = min(sum(lengths), max(0, near + dice.randint(-6, 6)))
        epoch = 0
        while epoch < 2 and at >= lengths[epoch]:
            at -= lengths[epoch]
            epoch += 1
        begins.append((sum(lengths[:epoch]) + at - at % world_size, epoch, at // world_size, world_size, pad))
    begins.sort()
    positions = [unpack(pack(first.track.position(begin[0]))) for begin in begins]
    opened = []
    for number in dice.sample(range(len(jobs)), len(jobs)):
        _, epoch, rounds, world_size, pad = begins[number]
        position = positions[number] if rounds else Position(positions[number].feed, epoch)
        for _ in range(dice.choice((0, 0, 5, 40))):
            world.step()
        job = (world_size, pad, [None] * (3 - epoch))
        opened.append((job, epoch, rounds, _open_ranks(world, case, number, job, position)))
    _run(world, [ranks for *_, ranks in opened])
    for (world_size, pad, _), begin, rounds, ranks in opened:
        for epoch in range(begin, 3 if ranks else 0):
            expected = _expected(case, epoch, world_size, pad)
            skipped = rounds if epoch == begin else 0
            assert [consumer.read[epoch] for consumer in ranks] == [batches[skipped:] for batches in expected]
        assert not any(consumer.failures for consumer in ranks)


resumed = cases(any_feeds), st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=2, max_size=4), roomy, faults


@settings(quick, max_examples=20)
@example(  # a worker came while ranks waited for each other, and their memory was given away
    Case(
        SimFeed(length=46, batch_size=5, turn=2, drop_remainder=False, room=1),
        2,
        3,
        9910522,
        {"credit": 3, "credit_bytes": 208, "quota": 3, "hoards": False},
    ),
    [(4, False), (4, False), (4, False)],
    0,
    {"cuts": 3, "restarts": 0, "kills": 2, "scales": 1},
    3,
)
@given(*resumed, seeds)
def test_ranks_that_go_on_from_any_round_read_the_rest_of_their_streams(
    case: Case, jobs: list[tuple[int, bool]], room: int, faults: dict[str, int], seed: int
) -> None:
    _resumed_by_all(case, jobs, room, faults, seed)


@pytest.mark.soak
@soak
@given(*shared, faults)
def test_ranks_and_other_jobs_read_their_streams_in_thousands_of_worlds(
    case: Case, jobs: list[Any], laters: list[int], room: int, faults: dict[str, int]
) -> None:
    _read_by_all(case, jobs, laters, room, faults)


@pytest.mark.soak
@soak
@given(*shared, with_hosts)
def test_so_they_do_with_hosts_in_thousands_of_worlds(
    case: Case, jobs: list[Any], laters: list[int], room: int, faults: dict[str, Any]
) -> None:
    _read_by_all(case, jobs, laters, room, faults)


@pytest.mark.soak
@soak
@given(*resumed, seeds)
def test_ranks_go_on_from_any_round_in_thousands_of_worlds(
    case: Case, jobs: list[tuple[int, bool]], room: int, faults: dict[str, int], seed: int
) -> None:
    _resumed_by_all(case, jobs, room, faults, seed)
