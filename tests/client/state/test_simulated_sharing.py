"""Jobs that read the same feed share what is made for them, in the simulated world: each still reads exactly the stream
that it would read alone, whatever the others do."""

from __future__ import annotations

import contextlib
import random
import re
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock_proto import IncompleteEpoch, MemoryBound
from penstock_proto.batches.position import Position, pack, unpack
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.memory import Share
from tests.client.state.test_simulated_clients import faults, habits
from tests.coordinator.test_coordinator import (
    PAGE,
    Case,
    any_feeds,
    cases,
    endless_feeds,
    index_feeds,
    lane_feeds,
    pooled_feeds,
    quick,
    ragged_feeds,
    seeds,
    small_pools,  # noqa: F401 (a fixture)
    soak,
    uneven_feeds,
    until_error,
)
from tests.simulation.simulated_client import Client
from tests.simulation.simulation import SimFeed, World

starts = st.sampled_from(("beginning", "beginning", "latest", "next_epoch"))
begun = st.builds(lambda habits, start: {**habits, "start": start}, habits, starts)
jobs = st.lists(st.tuples(begun, st.integers(0, 80)), min_size=2, max_size=6)
"""How each job reads, and after how many steps of the world it starts."""
PLENTY = {"quota": 3, "hoards": True, "credit_bytes": 848, "credit": 3}
roomy = st.sampled_from((0, 2, 8, 100))
"""How many slots windows may take."""


def _read_by_all(
    case: Case, jobs: list[tuple[dict[str, Any], int]], room: int, faults: dict[str, int], memory: int = 0
) -> World:
    """Let each job read its stream, and check it."""
    memory = memory or case.memory * len(jobs) * 2 + room * 2 * PAGE
    world = World(case.feed, workers=case.workers, memory=memory, seed=case.seed, looks=20, **faults)
    clients: list[Client] = []
    for habit, later in jobs:
        for _ in range(later):
            world.step()
        try:
            client = world.open(made=Client, shares=True, **habit, **case.asks)
        except MemoryBound:
            continue
        assert isinstance(client, Client)
        clients.append(client)
    world.run()
    for number, client in enumerate(clients):
        start = client.began or Position(client.stream.feed.info, 0)
        assert list(client.read) == list(range(start.epoch, start.epoch + len(client.read)))
        for epoch, read in client.read.items():
            batches, error = until_error(case.feed, epoch)
            batches = batches[start.batches + start.skip if epoch == start.epoch else 0 :]
            assert read == batches[: len(read)], f"job {number} reads another stream"
            if epoch in client.ended:
                assert (read, error) == (batches, None), f"job {number} misses the end of an epoch"
        assert not client.failures
    return world


def _jobs_let_in(feed: SimFeed, memory: int, shares: bool, ask: dict[str, Any], most: int = 40) -> list[Share]:
    """Open one job after another, and return the shares of those that there is memory for."""
    world = World(feed, memory=memory)
    jobs: list[Share] = []
    with contextlib.suppress(MemoryBound):
        for _ in range(most):
            jobs.append(world.open(shares=shares, **ask).reader.share)
    assert world.coordinator.check() == []
    return jobs


def test_a_job_that_joins_gets_what_it_asks_for_or_half_of_what_is_free_or_the_least() -> None:
    ask = {"credit": 4, "quota": 8}
    jobs = _jobs_let_in(SimFeed(), 64 * PAGE, True, ask)
    assert [(job.credit, job.quota) for job in jobs] == [(4, 8)] * 3 + [(3, 7), (2, 4), (1, 2), (1, 1)]
    assert len(_jobs_let_in(SimFeed(), 64 * PAGE, False, ask)) == 6
    asks = [{"credit": 4, "quota": 8}, {"credit": 2, "quota": 0}, {"credit": 6, "quota": 9}]
    world = World(SimFeed(), memory=1 << 30)
    shares = [world.open(shares=True, **ask).reader.share for ask in asks]
    assert [(one.credit, one.quota) for one in shares] == [(4, 8), (2, 0), (6, 9)]
    assert world.coordinator.streams[1].reserved == ((5 + 12 + 2 + 15) * PAGE, 5 + 12 + 2 + 15)


def test_memory_is_left_for_each_job_that_shares_to_go_on_in_a_stream_of_its_own() -> None:
    for gone in range(7):
        world = World(SimFeed(), memory=64 * PAGE)
        jobs = [world.open(shares=True, credit=4, quota=8).reader for _ in range(7)]
        with pytest.raises(MemoryBound):
            world.open(shares=False, credit=4, quota=8)
        world.handle(on.Lost(jobs[gone].number, 0))
        assert world.open(shares=False, credit=4, quota=8).reader.share.credit >= 1


@quick
@given(any_feeds, st.integers(3, 60), st.integers(1, 9), st.integers(0, 9))
def test_sharing_lets_no_fewer_jobs_in(feed: SimFeed, slots: int, credit: int, quota: int) -> None:
    memory = Case(feed, 2, slots, 0, {}).memory
    ask = {"credit": credit, "quota": quota}
    alone, together = (len(_jobs_let_in(feed, memory, shares, ask)) for shares in (False, True))
    assert together >= alone


@settings(quick, max_examples=15)
@given(cases(any_feeds), jobs, roomy, faults)
def test_each_job_reads_the_stream_that_it_would_read_alone(
    case: Case, jobs: list[tuple[dict[str, Any], int]], room: int, faults: dict[str, int]
) -> None:
    _read_by_all(case, jobs, room, faults)


@settings(quick, max_examples=25)
@given(cases(any_feeds), jobs, roomy, faults)
def test_jobs_that_get_less_memory_than_they_ask_for_read_on(
    case: Case, jobs: list[tuple[dict[str, Any], int]], room: int, faults: dict[str, int]
) -> None:
    _read_by_all(case, jobs, 0, faults, case.memory + room * PAGE)


def _resumed_by_all(case: Case, wide: bool, count: int, room: int, faults: dict[str, int], seed: int) -> None:
    """Let jobs go on from random batches of the first three epochs, also within slabs, and check what they read."""
    case = replace(case, feed=replace(case.feed, turn=case.feed.turn + 3 * (wide and case.feed.fixed)))
    stream = [(epoch, batch) for epoch in range(3) for batch in case.feed.expected(epoch)]
    first = case.world().open(reads=[(epoch, None) for epoch in range(3)], **case.asks)
    first._world.run()
    dice = random.Random(seed)
    near = dice.randint(0, len(stream))
    begins = sorted(min(len(stream), max(0, near + dice.randint(-6, 6))) for _ in range(count))
    starts = [(begin, unpack(pack(first.track.position(begin)))) for begin in begins]
    dice.shuffle(starts)
    memory = case.memory * count * 2 + room * 2 * PAGE
    world = World(case.feed, workers=case.workers, memory=memory, seed=case.seed, looks=20, **faults)
    jobs = []
    for begin, position in starts:
        for _ in range(dice.choice((0, 0, 5, 40))):
            world.step()
        reads = [(epoch, None) for epoch in range(position.epoch, 3)]
        with contextlib.suppress(MemoryBound):
            jobs.append((begin, world.open(reads=reads, position=position, shares=True, **case.asks)))
    world.run()
    for begin, job in jobs:
        assert not job.failures
        assert [(epoch, batch) for epoch in sorted(job.read) for batch in job.read[epoch]] == stream[begin:]


resumed = cases(st.one_of(any_feeds, uneven_feeds)), st.booleans(), st.integers(2, 5), roomy, faults, seeds


@settings(quick, max_examples=15)
@example(  # the first job passes over batches of a pool, which another one needs
    Case(SimFeed(splits=(0, 18), lanes=4, batch_size=3, turn=2, shuffle=7), 1, 32, 4907, PLENTY),
    True,
    5,
    8,
    {"cuts": 3, "kills": 0, "restarts": 0, "scales": 0},
    171398,
)
@given(*resumed)
def test_jobs_that_go_on_from_any_batch_read_the_rest_of_the_stream(
    case: Case, wide: bool, count: int, room: int, faults: dict[str, int], seed: int
) -> None:
    _resumed_by_all(case, wide, count, room, faults, seed)


def _read_on(world: World, client: Client, batches: int) -> None:
    """Let this client read some batches. Take all other steps that are possible without time."""
    for left in range(batches, -1, -1):
        while events := [event for actor, event in world._choices() if "_hand" not in actor and actor != "clock"]:
            events[0]()
            world.carry_out()
        if left:
            client._hand()


@pytest.mark.parametrize(
    "feed",
    [
        SimFeed(length=90, batch_size=1),
        SimFeed(splits=(45, 45), lanes=2, batch_size=1),
        SimFeed(splits=(45, 45), lanes=2, batch_size=1, dynamic=True, shuffle=7),
    ],
)
def test_streams_that_are_level_become_one_though_each_is_ahead_at_times(feed: SimFeed) -> None:
    world = World(feed, workers=2, memory=400 * PAGE)
    jobs: list[Client] = []
    for _ in range(2):
        client = world.open(made=Client, leaves=[None], shares=True)
        assert isinstance(client, Client)
        jobs.append(client)
        _read_on(world, client, 5)
    behind, ahead = jobs
    assert ahead.stream is not behind.stream
    for look in range(4):
        _read_on(world, ahead, 6 if look else 5)
        _read_on(world, behind, 4)
        if ahead.stream is behind.stream:
            break
        why = [world.coordinator.apart_because(job.reader) for job in (ahead, behind)]
        assert [re.sub(r"\d+ batch(es)?", "n", text) for text in why] == [
            "it is n ahead of the nearest other job, and soon shares with it",
            "it is n behind the nearest other job, and soon shares with it",
        ]
        world.wait(1.0)
        ahead, behind = behind, ahead
    else:
        pytest.fail("they have not met")
    world.looks = 20
    world.run()
    assert [job.read[0] for job in jobs] == [list(feed.expected(0))] * 2


def test_a_job_that_is_too_far_behind_is_told_so() -> None:
    world = World(SimFeed(length=90, batch_size=1), workers=2, memory=40 * PAGE)
    jobs: list[Client] = []
    for batches in (80, 1):
        client = world.open(made=Client, leaves=[None], shares=True)
        assert isinstance(client, Client)
        jobs.append(client)
        _read_on(world, client, batches)
    assert [world.coordinator.apart_because(job.reader) for job in jobs] == [
        "it is 79 batches ahead of the nearest other job, more than the memory for shared batches holds",
        "it is 79 batches behind the nearest other job, more than the memory for shared batches holds",
    ]
    _read_on(world, jobs[1], 79)
    assert [world.coordinator.apart_because(job.reader) for job in jobs] == [
        "it is level with the nearest other job, and soon shares with it"
    ] * 2


late_feeds = st.one_of(uneven_feeds, endless_feeds, pooled_feeds, index_feeds, ragged_feeds)
lates = st.lists(st.tuples(st.integers(0, 150), st.sampled_from((3, 8, 40))), min_size=1, max_size=4)
"""After how many further steps each job begins, and how many slabs it reads of an epoch without end."""


def _begun_late(case: Case, lates: list[tuple[int, int]], room: int, faults: dict[str, int]) -> list[Client]:
    """Let jobs begin with the next batch of a job that reads already, and check what they read."""
    memory = case.memory * 10 + room * 2 * PAGE
    world = World(case.feed, workers=case.workers, memory=memory, seed=case.seed, looks=20, **faults)
    endless = case.feed.endless
    jobs = []
    for later, slabs in [(0, 100), *lates]:
        for _ in range(later):
            world.step()
        leaves = [slabs] if endless else [None, None]
        with contextlib.suppress(MemoryBound):
            client = world.open(made=Client, shares=True, start="latest", leaves=leaves, breaks=1, **case.asks)
            assert isinstance(client, Client)
            jobs.append(client)
    world.run()
    for client in jobs:
        start = client.began or Position(client.stream.feed.info, 0)
        for epoch, read in client.read.items():
            first = start.batches + start.skip if epoch == start.epoch else 0
            batches = islice(case.feed.expected(epoch), first, first + len(read) if endless else None)
            assert read == list(batches)
        assert endless or list(client.read) == [start.epoch, start.epoch + 1]
        assert not client.failures
    return jobs


@settings(quick, max_examples=15)
@example(  # the others have come back, and their stream has not passed over the batch that they have
    Case(
        SimFeed(splits=(18, 18, 7, 3, 12, 7, 12, 7), lanes=6, batch_size=3, turn=1, dynamic=True, shuffle=7),
        5,
        29,
        2083285,
        {"credit": 3, "credit_bytes": 614, "quota": 1, "hoards": True},
    ),
    [(129, 40), (100, 40), (39, 3), (18, 40)],
    100,
    {"restarts": 0, "cuts": 3, "scales": 1, "kills": 2},
)
@given(cases(late_feeds), lates, roomy, faults)
def test_jobs_that_begin_with_the_next_batch_read_the_rest_of_the_stream(
    case: Case, lates: list[tuple[int, int]], room: int, faults: dict[str, int]
) -> None:
    _begun_late(case, lates, room, faults)


@pytest.mark.soak
@soak
@given(cases(late_feeds), lates, roomy, faults)
def test_jobs_begin_with_the_next_batch_in_thousands_of_worlds(
    case: Case, lates: list[tuple[int, int]], room: int, faults: dict[str, int]
) -> None:
    _begun_late(case, lates, room, faults)


skipping = cases(st.one_of(lane_feeds, pooled_feeds, uneven_feeds, ragged_feeds)), jobs, roomy, faults, seeds


def _read_in_spite_of_errors(
    case: Case, jobs: list[tuple[dict[str, Any], int]], room: int, faults: dict[str, int], seed: int
) -> None:
    """Let samples raise once or twice, and splits end there (on_error="skip"), so that streams of the same feed differ.
    Check that each job reads one stream from its beginning to its end."""
    dice = random.Random(seed)
    samples = [sample for epoch in range(3) for sample in case.feed.samples_of(epoch)]
    raising = tuple((dice.choice(samples), frozenset(range(dice.randint(1, 2)))) for _ in range(dice.randint(1, 3)))
    feed = replace(case.feed, transient=raising, on_error="skip")
    memory = case.memory * len(jobs) * 2 + room * 2 * PAGE
    world = World(feed, workers=case.workers, memory=memory, seed=case.seed, looks=20, **faults)
    clients: list[Client] = []
    for habit, later in jobs:
        for _ in range(later):
            world.step()
        with contextlib.suppress(MemoryBound):
            client = world.open(made=Client, shares=True, **habit, **case.asks)
            assert isinstance(client, Client)
            clients.append(client)
    world.run()
    for number, client in enumerate(clients):
        start = client.began or Position(client.stream.feed.info, 0)
        for epoch, read in client.read.items():
            first = start.batches + start.skip if epoch == start.epoch else 0
            streams = [list(feed.expected(epoch, cuts))[first:] for cuts in feed.possible_cuts(epoch)]
            ended = epoch in client.ended
            assert any(read == (stream if ended else stream[: len(read)]) for stream in streams), f"job {number}"
        assert all(isinstance(error, IncompleteEpoch) for error in client.failures)


@settings(quick, max_examples=8)
@example(  # a split is left out in the first batch of a report, and a job comes back after that batch
    Case(
        SimFeed(splits=(2, 4), lanes=1, batch_size=1, turn=1, room=5),
        1,
        3,
        139,
        {"credit_bytes": 0, "hoards": False, "quota": 0, "credit": 1},
    ),
    [
        ({"leaves": [None], "impatient": 0.0, "breaks": 0}, 0),
        ({"leaves": [None], "impatient": 0.0, "breaks": 1}, 0),
        ({"leaves": [None], "impatient": 0.0, "breaks": 0}, 0),
    ],
    0,
    {"restarts": 0, "kills": 0, "cuts": 0, "scales": 0},
    69,
)
@example(  # a job comes back in the middle of an epoch, in which only the others' stream has left out a split
    Case(
        SimFeed(splits=(18, 24, 24, 24, 2, 24, 2, 13, 3), lanes=9, batch_size=5, turn=2, room=3),
        5,
        34,
        17149,
        {"credit_bytes": 255, "hoards": False, "quota": 4, "credit": 3},
    ),
    [
        ({"leaves": [None] * 5, "impatient": 0.0, "breaks": 0}, 0),
        ({"leaves": [None], "impatient": 0.3, "breaks": 2}, 0),
        ({"leaves": [None], "impatient": 0.0, "breaks": 1}, 0),
        ({"leaves": [None], "impatient": 0.0, "breaks": 0}, 3),
    ],
    0,
    {"restarts": 0, "kills": 0, "cuts": 3, "scales": 0},
    2,
)
@given(*skipping)
def test_each_job_reads_one_stream_though_splits_are_left_out_in_some_of_them(
    case: Case, jobs: list[tuple[dict[str, Any], int]], room: int, faults: dict[str, int], seed: int
) -> None:
    _read_in_spite_of_errors(case, jobs, room, faults, seed)


@pytest.mark.soak
@soak
@given(*skipping)
def test_each_job_reads_one_stream_in_thousands_of_worlds_with_errors(
    case: Case, jobs: list[tuple[dict[str, Any], int]], room: int, faults: dict[str, int], seed: int
) -> None:
    _read_in_spite_of_errors(case, jobs, room, faults, seed)


with_hosts = st.fixed_dictionaries(
    {
        "idle": st.booleans(),
        "hosts": st.integers(1, 3),
        "joins": st.integers(0, 1),
        "leaves": st.integers(0, 1),
        "losses": st.integers(0, 2),
        "cuts": st.integers(0, 3),
    }
)


@settings(quick, max_examples=15)
@example(  # jobs leave epochs that others read on: one of them moved again and again, and never came further
    Case(
        SimFeed(length=57, batch_size=2, turn=1, room=9),
        3,
        6,
        283,
        {"credit_bytes": 588, "hoards": True, "credit": 2, "quota": 1},
    ),
    [
        ({"leaves": [None, 4, None, None, None], "breaks": 5, "impatient": 0.3}, 47),
        ({"leaves": [None, 5, None, None], "breaks": 4, "impatient": 0.0}, 44),
        ({"leaves": [2, 2, None], "breaks": 1, "impatient": 0.0}, 65),
        ({"leaves": [None], "breaks": 3, "impatient": 0.3}, 11),
        ({"leaves": [0, None, None], "breaks": 6, "impatient": 0.3}, 68),
        ({"leaves": [1, 5, None], "breaks": 2, "impatient": 0.0}, 56),
    ],
    100,
    {"idle": True, "hosts": 3, "joins": 0, "leaves": 0, "losses": 1, "cuts": 3, "kills": 2, "scales": 1},
)
@given(cases(any_feeds), jobs, roomy, with_hosts)
def test_jobs_share_what_hosts_make_and_keep(
    case: Case, jobs: list[tuple[dict[str, Any], int]], room: int, faults: dict[str, int]
) -> None:
    _read_by_all(case, jobs, room, faults)


@pytest.mark.soak
@soak
@given(cases(any_feeds), jobs, roomy, with_hosts)
def test_jobs_share_what_hosts_make_and_keep_in_thousands_of_worlds(
    case: Case, jobs: list[tuple[dict[str, Any], int]], room: int, faults: dict[str, int]
) -> None:
    _read_by_all(case, jobs, room, faults)


@pytest.mark.soak
@soak
@given(*resumed)
def test_jobs_go_on_from_any_batch_in_thousands_of_worlds(
    case: Case, wide: bool, count: int, room: int, faults: dict[str, int], seed: int
) -> None:
    _resumed_by_all(case, wide, count, room, faults, seed)


@pytest.mark.soak
@soak
@given(cases(any_feeds), jobs, roomy, faults)
def test_each_job_reads_its_stream_in_thousands_of_worlds(
    case: Case, jobs: list[tuple[dict[str, Any], int]], room: int, faults: dict[str, int]
) -> None:
    _read_by_all(case, jobs, room, faults)


@pytest.mark.parametrize("seed", [231, 1019, *range(20)])
def test_a_job_that_wants_an_epoch_which_the_others_have_left_out_reads_it_elsewhere(seed: int) -> None:
    """A job that begins an epoch without a connection, and leaves it again, comes back for the one after it. Then the
    stream goes on there, and a job that is behind may still begin the epoch in between."""
    world = World(
        SimFeed(splits=(7, 9, 5, 8), lanes=2, batch_size=2), workers=2, seed=seed, memory=400 * PAGE, cuts=4, looks=20
    )
    habits = (([1, 2, 1], 4), ([None, None, None], 1), ([1, 1, 1], 4))
    clients = [
        world.open(made=Client, shares=True, leaves=leaves, impatient=0.6, breaks=0, credit=credit)
        for leaves, credit in habits
    ]
    world.run()
    for client in clients:
        assert isinstance(client, Client)
        assert not client.failures
        for epoch, read in client.read.items():
            batches = list(world.feeds["train"].expected(epoch))
            assert read == (batches if epoch in client.ended else batches[: len(read)])
