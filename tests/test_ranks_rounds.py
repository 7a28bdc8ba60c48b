"""The last round of an epoch, filled up where ranks ask for that: in the simulation, and with real processes."""

from __future__ import annotations

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from conftest import Serve
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Batch, Consumer, SimFeed, World
from test_coordinator import Case, any_feeds, cases, fast, faults, quick
from test_ranks import FEEDS, Start, alone, flat, free_address, start

import penstock
from penstock_proto import ProtocolError, StateMismatch
from penstock_proto.position import Position, pack, unpack

__all__ = ["start"]


def filled_up(batches: list[Any], world_size: int) -> list[list[Any]]:
    """What each rank is to get of an epoch."""
    whole = len(batches) // world_size * world_size
    rest = batches[whole:]
    return [batches[rank:whole:world_size] + ([rest[rank % len(rest)]] if rest else []) for rank in range(world_size)]


def ranks_of(world: World, case: Case, world_size: int, position: Position | None = None) -> list[Consumer]:
    epochs = range(position.epoch if position else 0, 3)
    options = {**case.asks, "hoards": False, "pad": True, "stays": True, "world_size": world_size}
    reads = [(epoch, None) for epoch in epochs]
    return [world.open(reads=reads, rank=rank, position=position, **options) for rank in range(world_size)]


def finish(world: World, ranks: list[Consumer]) -> None:
    """Let all read to the end, and close only then."""
    world.settle()
    for consumer in ranks:
        consumer.let_go()
    world.run()
    assert not any(consumer.failures for consumer in ranks)


@settings(quick, max_examples=150)
@given(cases(any_feeds), st.integers(1, 5), faults)
def test_no_batch_is_left_out_and_every_rank_gets_as_many(case: Case, world_size: int, faults: dict[str, int]) -> None:
    world = replace(case, slots=case.slots + 8 * world_size).world(**faults)
    ranks = ranks_of(world, case, world_size)
    finish(world, ranks)
    for epoch in range(3):
        expected = filled_up(list(case.feed.expected(epoch)), world_size)
        assert [consumer.read[epoch] for consumer in ranks] == expected


@settings(quick, max_examples=50)
@given(cases(any_feeds.map(fast)), st.integers(1, 5))
def test_in_fast_order_too(case: Case, world_size: int) -> None:
    world = replace(case, slots=case.slots + 8 * world_size).world()
    ranks = ranks_of(world, case, world_size)
    finish(world, ranks)
    for epoch in range(3):
        rounds = list(zip(*(consumer.read[epoch] for consumer in ranks), strict=True))
        count = len(list(case.feed.expected(epoch)))
        assert len(rounds) == -(-count // world_size)
        batches = [batch for one in rounds for batch in one]
        rest = batches[:count][-(count % world_size) or count :]
        assert batches[count:] == [rest[rank % len(rest)] for rank in range(len(rest), world_size) if rest]
        del batches[count:]
        assert len(set(batches)) == len(batches)
        samples = [sample for batch in batches for sample in batch]
        assert len(set(samples)) == len(samples)


@settings(quick, max_examples=50)
@given(cases(any_feeds), st.integers(1, 4), st.integers(0, 2**32))
def test_the_ranks_go_on_from_a_state_at_any_step(case: Case, world_size: int, seed: int) -> None:
    dice = random.Random(seed)
    case = replace(case, slots=case.slots + 8 * world_size)
    rest: list[list[Batch]] = [[] for _ in range(world_size)]
    for epoch in range(3):
        for stream, more in zip(rest, filled_up(list(case.feed.expected(epoch)), world_size), strict=True):
            stream += more
    position = None
    for _ in range(4):
        world = replace(case, workers=dice.randint(1, 5), seed=dice.randrange(2**32)).world()
        ranks = ranks_of(world, case, world_size, position)
        finish(world, ranks)
        assert [[batch for epoch in consumer.read.values() for batch in epoch] for consumer in ranks] == rest
        consumed = dice.randint(0, len(rest[0]))
        positions = [consumer.track.position(consumed) for consumer in ranks]
        assert len(set(positions)) == 1
        position = unpack(pack(positions[0]))
        rest = [stream[consumed:] for stream in rest]


@pytest.mark.parametrize(
    ("feed", "refused_at_once"), [(SimFeed(splits=(9, 9, 9), lanes=3), False), (SimFeed(length=30), True)]
)
def test_a_state_within_a_round_is_refused_where_the_epoch_goes_on_behind_it(
    feed: SimFeed, refused_at_once: bool
) -> None:
    world = World(feed)
    alone = world.open()
    world.run()
    position = alone.track.position(3)
    says = "behind batch 3 of epoch 0, which is no border between rounds of 2 ranks"
    if refused_at_once:
        with pytest.raises(StateMismatch, match=says):
            world.open(rank=0, world_size=2, pad=True, position=position)
        return
    ranks = [world.open(rank=rank, world_size=2, pad=True, position=position) for rank in range(2)]
    world.run()
    for consumer in ranks:
        (error,) = consumer.failures
        assert isinstance(error, StateMismatch)
        assert says in error.message


def test_all_ranks_must_ask_for_the_same() -> None:
    world = World(SimFeed())
    world.open(rank=1, world_size=2, pad=True)
    says = 'rank 0 asks for last_round="drop", but rank 1 for last_round="pad": all ranks must ask for the same'
    with pytest.raises(ProtocolError, match=says):
        world.open(rank=0, world_size=2)


# --- with real processes ---

PADDED = ["plain", "ready", "two_counted", "table"]


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_three_processes_get_the_last_round_filled_up(serve: Serve, start: Start, transport: str) -> None:
    daemon = serve(FEEDS, *PADDED, workers=2)
    ranks = start(3)
    for name in PADDED:
        stream = alone(daemon.urls[name])
        expected = [list(streams) for streams in zip(*(filled_up(epoch, 3) for epoch in stream), strict=True)]
        cardinality = -(-len(stream[0]) // 3) if name in ("two_counted", "table") else None
        for number, rank in enumerate(ranks):
            options = {"rank": number, "world_size": 3, "transport": transport, "last_round": "pad"}
            rank.tell("whole", daemon.urls[name], 2, options)
        assert [rank.answer() for rank in ranks] == [([cardinality, epochs], None) for epochs in expected], name


def test_a_batch_that_is_repeated_is_a_copy_of_its_own(serve: Serve) -> None:
    daemon = serve(FEEDS, "two", workers=1)
    with contextlib.ExitStack() as open_:
        ranks = [
            open_.enter_context(
                penstock.connect(daemon.url, rank=rank, world_size=3, last_round="pad", transport="local")
            )
            for rank in range(3)
        ]
        pool = open_.enter_context(ThreadPoolExecutor(3))
        one, other, repeat = pool.map(lambda rank: next(rank.batches())["id"], ranks)
        assert (one.tolist(), repeat.tolist()) == ([0], [0])
        one[:] = 7  # as TensorFlow may
        assert repeat.tolist() == [0]
        repeat[:] = 8
        assert (one.tolist(), other.tolist()) == ([7], [1])


def test_ranks_go_on_in_the_midst_of_a_last_round_when_the_daemon_is_started_again(serve: Serve, start: Start) -> None:
    address = free_address()
    daemon = serve(FEEDS, "plain", bind=address)
    stream = alone(daemon.url)
    assert len(stream[0]) % 3
    expected = [flat(list(streams)) for streams in zip(*(filled_up(epoch, 3) for epoch in stream), strict=True)]
    ranks = start(3)
    ranks.connect(daemon.url, last_round="pad", transport="tcp")
    rounds = -(-len(stream[0]) // 3)
    seen = ranks.ask("read", rounds - 1)
    seen[0] += ranks[0].ask("read", 1)
    seen[2] += ranks[2].ask("read", 1)  # two of three have had theirs of the last round, one of these a repeat
    daemon.process.kill()
    daemon.stop()
    serve(FEEDS, "plain", bind=address, workers=1)
    for rank, found in zip(ranks, seen, strict=True):
        rank.tell("read", 2 * rounds - len(found))
    for rank, found in zip(ranks, seen, strict=True):
        found += rank.answer()[0]
    assert seen == expected
    states = ranks.ask("state", rounds)
    assert [state["position"] for state in states] == [states[0]["position"]] * 3
    ranks.ask("close")
    ranks.connect(daemon.url, [states[1], states[2], states[0]], last_round="pad")
    assert ranks.ask("epochs", 1) == [[epoch[rounds:]] for epoch in expected]


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="last_round='repeat': it can be drop, pad"):
        penstock.connect("tcp://127.0.0.1:9/feed", rank=0, world_size=2, last_round="repeat")
    with pytest.raises(ValueError, match="last_round='pad' is for ranks: give rank= and world_size= too"):
        penstock.connect("tcp://127.0.0.1:9/feed", last_round="pad")
