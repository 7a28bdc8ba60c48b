"""Ranks get small batches of several rounds in one slab, and large ones one by one. Either way they are told of the
others' batches in few messages."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

import penstock
from penstock._transport.from_hosts import fetching, host_here
from penstock_proto import StateMismatch, StreamClosed
from penstock_proto import messages as m
from penstock_proto.batches.layout import TAIL_LANE
from penstock_proto.batches.position import pack, unpack
from penstock_server.coordinator.delivery import rank_job, rounds
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model.turn import Part, Turn
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Join, Serve, wait_until
from tests.coordinator.test_ranks_rounds import says_bye
from tests.hosts.test_join import state_of
from tests.reference.one_stream import digests
from tests.simulation.simulation import Consumer, SimFeed, World

FEEDS = """
    import numpy as np
    from penstock_server import Feed

    def samples(split, rng):
        for i in range(64):
            yield rng.random(50, "f4"), np.int64(1000 * split + i)

    class Items:
        def __len__(self):
            return 900

        def __getitem__(self, i):
            return np.random.random(50), np.int64(i)

    plain = Feed(samples, splits=range(20), batch_size=4, lanes=4)
    turns = Feed(samples, splits=range(20), batch_size=4, lanes=3, turn=8)
    pooled = Feed(samples, splits=range(20), batch_size=4, lanes=4, shuffle=100)
    items = Feed(Items(), batch_size=4, shuffle=1000, turn=16)
"""
NAMES = ["plain", "turns", "pooled", "items"]


def alone(url: str) -> list[list[str]]:
    with penstock.connect(url) as connection:
        return [digests(connection.batches()) for _ in range(2)]


def settled(daemon: Daemon) -> None:
    """Wait until the workers have made as much ahead as they may."""
    before = -1

    def stands() -> bool:
        nonlocal before
        time.sleep(0.2)
        made = sum(feed.made for feed in control.status(next(iter(daemon.urls.values())), 60).feeds)
        before, stood = made, made == before
        return stood

    wait_until(stands)


def read(daemon: Daemon, url: str, ranks: int, **options: Any) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Read the second epoch of each rank, after the workers have made it ahead. Return it, and what the connections
    count."""
    with ExitStack() as stack, ThreadPoolExecutor(ranks) as pool:
        connections = [
            stack.enter_context(penstock.connect(url, rank=rank, world_size=ranks, **options)) for rank in range(ranks)
        ]
        list(pool.map(lambda connection: digests(connection.batches()), connections))
        settled(daemon)
        before = [connection.stats() for connection in connections]
        found = list(pool.map(lambda connection: digests(connection.batches()), connections))
        after = [connection.stats() for connection in connections]
        counts = ("slabs", "batches", "copies")
        return found, [{name: b[name] - a[name] for name in counts} for a, b in zip(before, after, strict=True)]


def dealt(epoch: list[str], ranks: int) -> list[list[str]]:
    return [epoch[rank : len(epoch) // ranks * ranks : ranks] for rank in range(ranks)]


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_small_batches_of_several_rounds_come_together(serve: Serve, transport: str) -> None:
    daemon = serve(FEEDS, *NAMES, workers=2)
    for name in NAMES:
        url = daemon.urls[name]
        _, expected = alone(url)
        for ranks in (2, 3):
            found, counts = read(daemon, url, ranks, transport=transport)
            assert found == dealt(expected, ranks), (name, ranks)
            for counted in counts:
                assert counted["batches"] == len(expected) // ranks
                assert counted["slabs"] < 0.8 * counted["batches"], (name, ranks)
                assert 0 < counted["copies"] <= counted["slabs"], (name, ranks)


@pytest.mark.parametrize("borrowed", [True, False])
def test_they_are_fetched_together_from_the_host_that_made_them(
    serve: Serve, join: Join, borrowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not borrowed:

        class Refused(host_here.HostHere):
            def __init__(self, *_: object) -> None:
                raise ConnectionRefusedError

        monkeypatch.setattr(fetching, "HostHere", Refused)
    head = serve(FEEDS, "turns", workers=0)
    join(head, "turns")
    url = head.urls["turns"]
    _, expected = alone(url)
    found, counts = read(head, url, 2, transport="tcp")
    assert found == dealt(expected, 2)
    for counted in counts:
        assert counted["slabs"] < 0.8 * counted["batches"]
    (host,) = state_of(head).hosts
    assert host.lent_bytes if borrowed else host.fetched_bytes


# --- in the simulation ---


def ranks_of(world: World, count: int) -> list[Consumer]:
    """Open ranks that read two epochs."""
    reads = [(0, None), (1, None)]
    return [world.open(reads=reads, rank=rank, world_size=count, stays=True, credit=4) for rank in range(count)]


def sent(world: World, ranks: list[Consumer]) -> Iterator[do.SendSlab | do.Tell]:
    """Let the ranks read everything. Yield what they are sent."""
    carry_out = world.carry_out
    seen: list[do.SendSlab | do.Tell] = []

    def look() -> None:
        seen.extend(command for command in world._commands if isinstance(command, do.SendSlab | do.Tell))
        carry_out()

    world.carry_out = look  # type: ignore[method-assign]
    world.settle()
    for number, consumer in enumerate(ranks):
        for epoch in range(2):
            expected = list(world.feeds["train"].expected(epoch))
            whole = len(expected) // len(ranks) * len(ranks)
            assert consumer.read[epoch] == expected[number : whole : len(ranks)]
    yield from seen


@pytest.mark.parametrize(
    "feed",
    [
        SimFeed(length=61, batch_size=4, room=8),
        SimFeed(length=61, batch_size=4, turn=5),
        SimFeed(splits=(30, 7, 22, 41), lanes=3, batch_size=4, room=24),
        SimFeed(splits=(30, 7, 22, 41), lanes=3, batch_size=4, turn=6),
        SimFeed(splits=(60, 37, 42, 61), lanes=4, batch_size=4, turn=8, shuffle=60),
    ],
    ids=["ranges in a slot", "ranges", "stripes", "turns", "pools"],
)
def test_ends_of_lanes_and_smaller_batches_lie_between_them(feed: SimFeed) -> None:
    several = 0
    for seed in range(40):
        world = World(feed, workers=1 + seed % 3, seed=seed)
        slabs = [one for one in sent(world, ranks_of(world, 2)) if isinstance(one, do.SendSlab)]
        several += sum(slab.batches > 1 for slab in slabs)
    assert several


def test_a_rank_that_is_further_on_than_another_does_not_get_its_batches_again() -> None:
    met = 0
    for seed in range(20):
        feed = SimFeed(splits=(40,) * 4, lanes=4, batch_size=1, room=20)
        expected = list(feed.expected(0))
        ranks = ranks_of(World(feed, seed=seed), 2)
        list(sent(ranks[0]._world, ranks))
        steps = random.Random(seed).sample(range(1, 60), 2)
        places = [unpack(pack(consumer.track.position(step))) for consumer, step in zip(ranks, steps, strict=True)]
        world = World(feed, seed=seed + 1)
        again = [
            world.open(reads=[(0, None)], rank=rank, world_size=2, stays=True, credit=4, position=place, again=True)
            for rank, place in enumerate(places)
        ]
        slabs = [one for one in sent(world, []) if isinstance(one, do.SendSlab)]
        assert [consumer.read[0] for consumer in again] == [expected[rank::2][step:] for rank, step in enumerate(steps)]
        met += any(slab.batches > 1 for slab in slabs)
    assert met


def test_if_a_rank_has_closed_the_others_are_told_so_and_get_no_further_rounds() -> None:
    for seed in range(10):
        feed = SimFeed(splits=(200,) * 4, lanes=4, batch_size=1, room=16)
        world = World(feed, seed=seed)
        stays, goes = [world.open(rank=rank, world_size=2, credit=2, stays=True) for rank in range(2)]
        while goes.reader.begun is None:
            assert world.step()
        says_bye(world, goes, 3)
        world.settle()
        (failure,) = stays.failures
        assert isinstance(failure, StreamClosed)
        assert "rank 1 of 2 has closed its connection within epoch 0" in failure.message
        assert stays.read[0] == list(feed.expected(0))[0::2][: len(stays.read[0])]
        assert len(stays.read[0]) < 20


def test_ranks_that_do_not_begin_between_two_rounds_are_refused_where_the_epoch_turns_out_to_go_on() -> None:
    feed = SimFeed(splits=(40,) * 4, lanes=4, batch_size=1, room=16)
    first = World(feed)
    alone = first.open(reads=[(0, 9)], stays=True)
    first.settle()
    place = unpack(pack(alone.track.position(9)))
    world = World(feed)
    ranks = [
        world.open(reads=[(0, None)], rank=rank, world_size=2, pad=True, stays=True, position=place)
        for rank in range(2)
    ]
    world.settle()
    for consumer in ranks:
        assert not consumer.read[0]
        (failure,) = consumer.failures
        assert isinstance(failure, StateMismatch)
        assert "not a border between rounds of 2 ranks" in failure.message


@pytest.mark.parametrize("largest", [256 << 10, 0])
def test_only_small_batches_come_together(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_job, "_SMALL", largest)
    for seed in range(20):
        world = World(SimFeed(splits=(40,) * 4, lanes=4, batch_size=1, room=22), seed=seed)
        slabs = [one for one in sent(world, ranks_of(world, 2)) if isinstance(one, do.SendSlab)]
        assert all(slab.batches == 1 or slab.stride == 2 for slab in slabs)
        assert any(slab.batches > 1 for slab in slabs) == bool(largest)
        assert any((slab.batches, slab.stride) == (1, 2) for slab in slabs)


def test_a_rank_is_told_of_the_rest_of_a_round_in_one_message() -> None:
    for seed in range(10):
        world = World(SimFeed(splits=(12,) * 8, lanes=8, batch_size=1), seed=seed)
        seen = list(sent(world, ranks_of(world, 8)))
        slabs = [one for one in seen if isinstance(one, do.SendSlab)]
        told = [one.message for one in seen if isinstance(one, do.Tell) and isinstance(one.message, m.SentElsewhere)]
        assert len(slabs) == 2 * 96
        assert sum(message.batches for message in told) == 7 * len(slabs)
        assert len(told) <= 1.2 * len(slabs)  # more only where lanes end within a round


def test_restart_records_that_do_not_fit_in_a_message_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_MOST_RECORDS", 20)
    world = World(SimFeed(splits=(12,) * 8, lanes=8, batch_size=1), seed=1)
    seen = list(sent(world, ranks_of(world, 8)))
    told = [one.message for one in seen if isinstance(one, do.Tell) and isinstance(one.message, m.SentElsewhere)]
    assert max(sum(len(place.record) for place in message.places) for message in told) <= 20
    assert len(told) > 2 * 96


def test_merged_batches_are_told_one_by_one() -> None:
    """A rank counts them by their numbers, and its own may lie between two others."""
    batches = [rounds.Batch(number, Turn(TAIL_LANE, number, 1), Part(0, 1, 4, ()), False) for number in range(3)]
    found = rounds.Round(0, 0, 1, 3, items=[*batches], batches=batches)
    told = [what.told(0, 0, 1) for _, what in rounds.in_few(found) if isinstance(what, rounds.Several)]
    assert [(one.index, one.batches) for one in told if one is not None] == [(0, 1), (2, 1)]
