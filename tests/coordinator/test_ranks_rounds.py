"""The last round of an epoch, which may be filled up; and ranks that leave, are missing, or are taken.

The tests run in the simulation and with real processes.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock._state import counters
from penstock._stream import connecting
from penstock_proto import DaemonStopped, EndOfStream, ProtocolError, StateMismatch, StreamClosed, WorkerDied
from penstock_proto import messages as m
from penstock_proto.batches.cursor import Cursor
from penstock_proto.batches.position import Position, pack, unpack
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.consumer import Consumer as Reader
from penstock_server.coordinator.model.open_request import OpenRequest
from tests.conftest import Serve
from tests.coordinator.test_coordinator import Case, any_feeds, cases, fast, faults, quick, soak
from tests.coordinator.test_ranks import FEEDS, Start, alone, dealt, flat, free_address, start
from tests.fakes.inside import handle_of, warn_again
from tests.simulation.simulation import Batch, Consumer, SimFeed, World

__all__ = ["start"]


def filled_up(batches: list[Any], world_size: int) -> list[list[Any]]:
    """Return the batches of an epoch that each rank must get, with the last round filled up."""
    whole = len(batches) // world_size * world_size
    rest = batches[whole:]
    return [batches[rank:whole:world_size] + ([rest[rank % len(rest)]] if rest else []) for rank in range(world_size)]


def ranks_of(world: World, case: Case, world_size: int, position: Position | None = None) -> list[Consumer]:
    epochs = range(position.epoch if position else 0, 3)
    options = {**case.asks, "hoards": False, "pad": True, "stays": True, "world_size": world_size}
    reads = [(epoch, None) for epoch in epochs]
    return [world.open(reads=reads, rank=rank, position=position, **options) for rank in range(world_size)]


def finish(world: World, ranks: list[Consumer]) -> None:
    """Let all ranks read to the end, and close only then."""
    world.settle()
    for consumer in ranks:
        consumer.let_go()
    world.run()
    assert not any(consumer.failures for consumer in ranks)


def check_filled_up(case: Case, world_size: int, faults: dict[str, int]) -> None:
    """Check that the ranks' batches are those of one stream, and that the last round of each epoch is filled up."""
    world = replace(case, slots=case.slots + 8 * world_size).world(**faults)
    ranks = ranks_of(world, case, world_size)
    finish(world, ranks)
    for epoch in range(3):
        expected = filled_up(list(case.feed.expected(epoch)), world_size)
        assert [consumer.read[epoch] for consumer in ranks] == expected


@settings(quick, max_examples=20)
@given(cases(any_feeds), st.integers(1, 5), faults)
def test_no_batch_is_left_out_and_every_rank_gets_as_many(case: Case, world_size: int, faults: dict[str, int]) -> None:
    check_filled_up(case, world_size, faults)


@pytest.mark.soak
@soak
@given(cases(any_feeds), st.integers(1, 5), faults)
def test_every_rank_gets_as_many_in_thousands_of_worlds(case: Case, world_size: int, faults: dict[str, int]) -> None:
    check_filled_up(case, world_size, faults)


@settings(quick, max_examples=35)
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


@settings(quick, max_examples=35)
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


@settings(quick, max_examples=20)
@given(cases(any_feeds), st.integers(2, 4))
def test_the_place_after_a_padded_round_is_that_of_a_single_job(case: Case, world_size: int) -> None:
    """Otherwise a job cannot join ranks there: it would not hear of the ends of lanes that they know."""
    case = replace(case, slots=case.slots + 8 * world_size)
    world = case.world()
    ranks = ranks_of(world, case, world_size)
    finish(world, ranks)
    world = case.world()
    single = world.open(reads=[(epoch, None) for epoch in range(3)], **{**case.asks, "hoards": False})
    finish(world, [single])
    steps = batches = 0
    for epoch in range(3):
        steps += len(ranks[0].read[epoch])
        batches += len(single.read[epoch])
        expected = single.track.position(batches)
        for consumer in ranks:
            place = consumer.track.position(steps)
            assert (place.epoch, place.batches) == (expected.epoch, expected.batches)
            assert [one.lane for one in place.ended] == [one.lane for one in expected.ended]


def test_a_state_soon_after_a_state_within_a_turn_has_no_record_of_a_later_batch() -> None:
    case = Case(SimFeed(splits=(49,), lanes=1, batch_size=1, turn=7, room=8), 1, 40, 2, {"credit": 3, "quota": 0})
    first = case.world()
    whole = ranks_of(first, case, 2)
    finish(first, whole)
    for consumed in range(24):
        world = case.world()
        position = unpack(pack(whole[0].track.position(consumed)))
        again = ranks_of(world, case, 2, position)
        finish(world, again)
        for more in range(len(again[0].read[0])):
            for place in again[0].track.position(more).places:
                assert int.from_bytes(place.record[:8]) <= place.index, f"{more} steps after step {consumed}"


def check_states_that_are_loaded_late(case: Case, world_size: int, seed: int, faults: dict[str, int]) -> None:
    """Check that ranks that connect, and load their states later in any sequence, go on where the states were taken."""
    dice = random.Random(seed)
    case = replace(case, slots=case.slots + 8 * world_size)
    first = case.world()
    ranks = ranks_of(first, case, world_size)
    finish(first, ranks)
    consumed = dice.randint(0, sum(len(batches) for batches in ranks[0].read.values()))
    position = unpack(pack(ranks[0].track.position(consumed)))
    rest = [[batch for epoch in rank.read.values() for batch in epoch][consumed:] for rank in ranks]
    world = case.world(**faults)
    connected: dict[int, Consumer] = {}
    loaded: dict[int, Consumer] = {}
    steps = [*range(world_size)] * 2
    dice.shuffle(steps)
    for rank in steps:
        for _ in range(dice.randrange(20)):
            world.step()
        options = {**case.asks, "hoards": False, "pad": True, "stays": True, "rank": rank, "world_size": world_size}
        if rank not in connected:
            connected[rank] = world.open(reads=[], **options)
        else:
            if not connected[rank].lost:  # it may just have been cut off
                connected[rank].vanish()
            connected[rank].gone = True
            while world.ends:
                world.ends.popleft()()
            reads = [(epoch, None) for epoch in range(position.epoch, 3)]
            loaded[rank] = world.open(reads=reads, position=position, **options)
    ranks = [loaded[rank] for rank in range(world_size)]
    finish(world, ranks)
    assert [[batch for epoch in rank.read.values() for batch in epoch] for rank in ranks] == rest


def test_batches_of_a_rank_without_others_are_made_before_it_reads() -> None:
    world = World(SimFeed())
    alone = world.open(rank=0, world_size=1, reads=[], stays=True)
    world.settle()
    assert world.coordinator.streams[alone.reader.stream].slots


@settings(quick, max_examples=20)
@given(cases(any_feeds), st.integers(2, 4), st.integers(0, 2**32), faults)
def test_ranks_load_a_state_when_they_like(case: Case, world_size: int, seed: int, faults: dict[str, int]) -> None:
    check_states_that_are_loaded_late(case, world_size, seed, faults)


@pytest.mark.soak
@soak
@given(cases(any_feeds), st.integers(2, 4), st.integers(0, 2**32), faults)
def test_ranks_load_a_state_when_they_like_in_thousands_of_worlds(
    case: Case, world_size: int, seed: int, faults: dict[str, int]
) -> None:
    check_states_that_are_loaded_late(case, world_size, seed, faults)


def test_a_rank_that_only_connects_may_come_and_go() -> None:
    world = World(SimFeed())
    ranks = [world.open(rank=rank, world_size=2, reads=[(0, None)][rank:], stays=True) for rank in (0, 1)]
    world.settle()
    assert 0 in ranks[0].read
    assert not ranks[0].read[0], "the other may load a state"
    ranks[1].close()
    world.settle()
    assert not ranks[0].failures
    ranks[1] = world.open(rank=1, world_size=2, stays=True)
    finish(world, ranks)
    expected = list(world.feeds["train"].expected(0))
    rounds = len(expected) // 2
    assert [consumer.read[0] for consumer in ranks] == [expected[rank::2][:rounds] for rank in range(2)]


def knowing_what_ended(position: Position, messages: Iterable[Any]) -> Position:
    """Return the same position, but with the lanes that end right there, according to the first of these messages."""
    cursor = Cursor(position)
    for message in messages:
        if isinstance(message, m.LaneEnded) and cursor.places.get(message.lane, (0, b""))[0] == message.index:
            cursor.end(message)
        elif isinstance(message, m.PoolBegun) and not message.batches:
            cursor.begin_pool(message)
        else:
            break
    return cursor.position(position.feed)


@pytest.mark.parametrize("shuffle", [0, 7], ids=["lanes", "pools"])
def test_ranks_go_on_from_the_same_batch_though_one_knows_already_that_lanes_have_ended_there(shuffle: int) -> None:
    """Whether a rank heard of that before its batch or after it was a matter of timing in earlier versions."""
    feed = SimFeed(splits=(18, 7, 12, 0, 12, 12, 3, 18, 7), lanes=8, batch_size=4, turn=3, shuffle=shuffle)
    seen: dict[int, dict[int, Position]] = {}  # by the number of batches, and by the number of lanes that have ended
    for seed in range(20):
        world = World(feed, seed=seed, workers=1 + seed % 4)
        credit = 1 + seed % 3
        ranks = [world.open(reads=[(0, None)], rank=rank, world_size=2, credit=credit, stays=True) for rank in range(2)]
        while world.step():
            for consumer in ranks:
                position = consumer.track.newest()
                if position.epoch == 0 and position.batches and not position.skip:
                    told = () if consumer._queue else consumer._before
                    for known in (position, knowing_what_ended(position, told)):
                        seen.setdefault(known.batches, {})[len(known.ended)] = known
    differing = [pair for known in seen.values() for pair in itertools.permutations(known.values(), 2)]
    assert differing
    for pair in differing:
        world = World(feed)
        ranks = [
            world.open(reads=[(0, None)], rank=rank, world_size=2, position=unpack(pack(position)), stays=True)
            for rank, position in enumerate(pair)
        ]
        finish(world, ranks)
        expected = list(world.feeds["train"].expected(0))[pair[0].batches :]
        rounds = len(expected) // 2
        assert [consumer.read[0] for consumer in ranks] == [expected[rank::2][:rounds] for rank in range(2)]


def test_a_rank_that_had_its_batch_of_a_padded_round_does_not_get_it_again_though_it_was_cut_off_before_the_end() -> (
    None
):
    met: set[int] = set()
    for seed in range(50):
        world = World(SimFeed(splits=(10,), lanes=1, batch_size=2), seed=seed)
        ranks = [
            world.open(reads=[(0, None)], rank=rank, world_size=2, pad=True, credit=1, stays=True) for rank in range(2)
        ]
        while world.step():
            had = [len(consumer.read.get(0, ())) for consumer in ranks]
            if max(had) == 3 and not any(consumer.ended for consumer in ranks):
                met |= {rank for rank in range(2) if had[rank] == 3 and min(had) < 3}
                ranks[had.index(3)].cut()
                break
        finish(world, ranks)
        assert [consumer.read[0] for consumer in ranks] == filled_up(list(world.feeds["train"].expected(0)), 2), seed
    assert met == {0, 1}  # one of them had the copy


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
    says = "after batch 3 of epoch 0, which is not a border between rounds of 2 ranks"
    ranks = [world.open(rank=0, world_size=2, pad=True, position=position)]
    if refused_at_once:  # as soon as all ranks are there
        with pytest.raises(StateMismatch, match=says):
            world.open(rank=1, world_size=2, pad=True, position=position)
    else:
        ranks.append(world.open(rank=1, world_size=2, pad=True, position=position))
    world.run()
    for consumer in ranks:
        (error,) = consumer.failures
        assert isinstance(error, StateMismatch)
        assert says in error.message


def test_all_ranks_must_ask_for_the_same() -> None:
    world = World(SimFeed())
    waiting = world.open(rank=1, world_size=2, pad=True)
    other = world.open(rank=0, world_size=2)
    world.run()
    says = {
        'rank 0 asks for last_round="drop", but rank 1 for last_round="pad": all ranks must ask for the same',
        'rank 1 asks for last_round="pad", but rank 0 for last_round="drop": all ranks must ask for the same',
    }
    (one,), (two,) = waiting.failures, other.failures
    assert isinstance(one, ProtocolError)
    assert one.message == two.message
    assert one.message in says


def test_ranks_that_begin_elsewhere_are_all_told_so_when_all_are_there() -> None:
    world = World(SimFeed(length=60))
    alone = world.open()
    world.run()
    positions = [alone.track.position(batches) for batches in (3, 6)]
    waiting = [world.open(rank=rank, world_size=3, position=positions[rank]) for rank in (0, 1)]
    world.settle()
    assert not any(consumer.failures for consumer in waiting)
    says = "rank 2 begins after batch 3 of epoch 0, but rank 1 after batch 6 of epoch 0"
    with pytest.raises(StateMismatch, match=says):
        world.open(rank=2, world_size=3, position=positions[0])
    world.run()
    for consumer in waiting:
        (error,) = consumer.failures
        assert isinstance(error, StateMismatch)
        assert says in error.message
    ranks = [world.open(rank=rank, world_size=3, position=positions[0], stays=True) for rank in range(3)]
    finish(world, ranks)
    expected = list(world.feeds["train"].expected(0))[3:]
    assert [consumer.read[0] for consumer in ranks] == [expected[rank::3] for rank in range(3)]


def test_ranks_that_come_again_do_not_wait_for_one_that_begins_elsewhere_and_it_is_told() -> None:
    world = World(SimFeed(length=60))
    alone = world.open()
    world.run()
    position = alone.track.position(2)
    waiting = world.open(rank=0, world_size=2)
    world.settle()
    asks = [
        OpenRequest(4, 1 << 40, 0, position=position, rank=rank, world_size=2, again=True, identity=bytes([rank]))
        for rank in range(2)
    ]
    again = world.ask("train", asks[1])
    world.carry_out()
    world.settle()
    (error,) = waiting.failures
    says = "rank 0 begins at the start, but rank 1 again after batch 2 of epoch 0"
    assert f"{says}: all ranks must begin at the start" in error.message
    anew = world.open(rank=0, world_size=2)
    with pytest.raises(StateMismatch, match=f"{says}: all ranks must begin at the start"):
        world.run()
    assert anew.reader.begun is None, "what is refused changes nothing"
    world.handle(on.Lost(anew.reader.number, 0))
    back = world.ask("train", asks[0])
    assert back.stream == again.stream
    assert world.coordinator.streams[back.stream].consumers == [back, again]


def test_ranks_that_wait_with_a_state_are_told_when_one_that_had_begun_at_the_start_comes_again() -> None:
    world = World(SimFeed(length=60))
    alone = world.open()
    world.run()
    waiting = world.open(rank=0, world_size=3, position=alone.track.position(3))
    again = world.ask("train", OpenRequest(4, 1 << 40, 0, rank=1, world_size=3, again=True, identity=b"1"))
    world.settle()
    assert not waiting.failures, "it may have been cut off before it began, and may load a state"
    world.handle(on.Begin(again.number, 0))
    world.carry_out()
    world.settle()
    (error,) = waiting.failures
    assert "rank 0 begins after batch 3 of epoch 0, but rank 1 again at the start" in error.message


@pytest.mark.parametrize("first", ["again", "begins"])
def test_a_rank_that_begins_joins_one_that_comes_again_where_it_begins(first: str) -> None:
    # One of the ranks had connected, and none had read, when the daemon was restarted.
    world = World(SimFeed())
    ranks: list[Reader] = []
    for again in (True, False) if first == "again" else (False, True):
        ask = OpenRequest(4, 1 << 40, 0, rank=len(ranks), world_size=2, again=again, identity=bytes([len(ranks)]))
        ranks.append(world.ask("train", ask))
        world.handle(on.Begin(ranks[-1].number, 0))
    assert ranks[0].stream == ranks[1].stream
    assert world.coordinator.streams[ranks[0].stream].consumers == ranks


@pytest.mark.parametrize("fault", ["epochs", "workers", "stop"])
def test_ranks_that_wait_hear_what_ends_their_wait(fault: str) -> None:
    world = World(SimFeed(epochs=2), workers=1)
    waiting = [world.open(rank=rank, world_size=3, reads=[], stays=True) for rank in range(2)]
    if fault == "epochs":
        world.handle(on.Begin(waiting[0].reader.number, 2))
    elif fault == "workers":
        world.handle(on.WorkerGone(0, "was killed"))
    else:
        world.handle(on.Stop(DaemonStopped("stops")))
    world.carry_out()
    world.settle()
    kinds = {"epochs": EndOfStream, "workers": WorkerDied, "stop": DaemonStopped}
    assert [[type(error) for error in consumer.failures] for consumer in waiting] == [[kinds[fault]]] * 2


@pytest.mark.parametrize("first", [True, False])
def test_nobody_joins_ranks_one_of_which_does_not_share(first: bool) -> None:
    world = World(SimFeed())
    ranks = [world.open(rank=rank, world_size=2, shares=first ^ bool(rank), stays=True) for rank in range(2)]
    world.settle()
    alone = world.open(shares=True, start="next_epoch")
    assert alone.reader.stream != ranks[0].reader.stream
    finish(world, ranks)


# --- ranks that leave ---


def says_bye(world: World, consumer: Consumer, steps: int, leaves: bool = False) -> None:
    """Close (perhaps after Leave) after `steps` batches of epoch 0. Its messages arrive at once."""
    while len(consumer.read[0]) < steps if 0 in consumer.read else True:
        assert world.step()
    if leaves:
        consumer.leave()
    consumer.close()
    while consumer.says:
        consumer.says.popleft()()
    world.carry_out()


@pytest.mark.parametrize("leaves", [False, True], ids=["reading", "after a break"])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_the_others_get_what_was_dealt_when_a_rank_closes_and_then_an_error_that_names_it(
    steps: int, leaves: bool
) -> None:
    feed = SimFeed(splits=(9,) * 16)
    world = World(feed)
    ranks = [world.open(rank=rank, world_size=3, credit=2, stays=True) for rank in range(3)]
    while any(rank.reader.begun is None for rank in ranks):
        assert world.step()
    says_bye(world, ranks[1], steps, leaves)
    world.settle()
    expected = list(feed.expected(0))
    for rank in (0, 2):
        (error,) = ranks[rank].failures
        assert isinstance(error, StreamClosed)
        assert "rank 1 of 3 has closed its connection within epoch 0" in error.message
        read = ranks[rank].read[0]
        assert steps <= len(read) < 12
        assert read == expected[rank::3][: len(read)]


def test_a_rank_that_closes_behind_its_last_batch_is_missed_in_the_next_epoch_only() -> None:
    feed = SimFeed(splits=(9,) * 8, lanes=3)
    expected = list(feed.expected(0))
    rounds = len(expected) // 3
    for seed in range(20):
        world = World(feed, seed=seed)
        ranks = [world.open(reads=[(0, None), (1, None)], rank=rank, world_size=3, stays=True) for rank in range(3)]
        says_bye(world, ranks[1], rounds)
        world.settle()
        assert [consumer.read[0] for consumer in ranks] == [expected[rank::3][:rounds] for rank in range(3)]
        for consumer in (ranks[0], ranks[2]):
            assert not consumer.read.get(1)
            (error,) = consumer.failures
            assert isinstance(error, StreamClosed)
            assert "rank 1 of 3 has closed its connection before epoch 1" in error.message


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
        one[:] = 7  # as TensorFlow may do
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
    seen[2] += ranks[2].ask("read", 1)  # two of three have their batch of the last round; one is a repeat
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
    with pytest.raises(ValueError, match="last_round='repeat': must be one of drop, pad"):
        penstock.connect("tcp://127.0.0.1:9/feed", rank=0, world_size=2, last_round="repeat")
    with pytest.raises(ValueError, match="last_round='pad' is for ranks: give rank= and world_size= too"):
        penstock.connect("tcp://127.0.0.1:9/feed", last_round="pad")


def test_a_rank_that_ends_by_an_exception_is_named_to_the_others(serve: Serve, start: Start) -> None:
    daemon = serve(FEEDS, "plain")
    expected = dealt(alone(daemon.url, 1), 3)
    ranks = start(3)
    ranks.connect(daemon.url, transport="tcp")
    seen = ranks.ask("read", 2)
    assert ranks[1].process.stdin is not None
    ranks[1].tell("no such thing")  # raises AttributeError
    assert ranks[1].process.wait() == 1
    for rank, found, ((epoch,)) in zip(ranks, seen, expected, strict=True):
        if rank is not ranks[1]:
            error = rank.refusal("rest")
            assert error.startswith("StreamClosed: rank 1 of 3 has closed its connection within epoch 0")
            assert found == epoch[:2]
    for rank in (ranks[0], ranks[2]):
        rank.ask("close")
    again = start(3)
    again.connect(daemon.url)
    assert again.ask("epochs", 1) == expected


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_ranks_wait_for_one_that_does_not_come_back_as_long_as_reconnect_says_and_name_it(
    serve: Serve, start: Start, transport: str
) -> None:
    daemon = serve(FEEDS, "slowly")
    ranks = start(3)
    for number, rank in enumerate(ranks):
        options = {"rank": number, "world_size": 3, "transport": transport, "reconnect": 1.0}
        rank.tell("connect", daemon.url, options)
    assert not any(rank.answer()[1] for rank in ranks)
    ranks.ask("read", 3)
    ranks[1].end()
    for rank in (ranks[0], ranks[2]):
        rank.tell("epochs", 20)  # it reads first what was sent
    errors = [rank.answer()[1] or "" for rank in (ranks[0], ranks[2])]
    cause = "ConnectionLost: rank 1 of 3 is gone: all ranks go on when it is back"
    for error in errors:  # the other one may have given up a moment before
        assert re.match(cause + r"\. After 1 s ranks? .*\b1\b.* of 3 (is|are) still missing\. Stop all", error)


def test_a_waiting_rank_says_which_ranks_are_missing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(counters, "SLOW", 0.2)
    daemon = serve(FEEDS, "plain")
    with penstock.connect(daemon.url, rank=1, world_size=4) as one, ThreadPoolExecutor(2) as pool:
        first = pool.submit(next, one.batches())
        says = "ranks 0, 2, 3 of 4 are not connected or do not read yet, and the stream begins when all read"
        while says not in caplog.text:
            time.sleep(0.01)
            if "is the generator slow" in caplog.text:  # the warning came before the daemon had named the rank
                caplog.clear()
                warn_again(one)
        with contextlib.ExitStack() as others:
            ranks = [others.enter_context(penstock.connect(daemon.url, rank=rank, world_size=4)) for rank in (0, 2, 3)]
            caplog.clear()
            warn_again(one)
            reads = [threading.Thread(target=next, args=(ranks[place].batches(),)) for place in (0, 1)]
            for read in reads:
                read.start()
            says = "rank 3 of 4 is not connected or does not read yet, and the stream begins when all read"
            while says not in caplog.text:
                time.sleep(0.01)
                warn_again(one)
            reads.append(threading.Thread(target=next, args=(ranks[2].batches(),)))
            reads[2].start()
            assert len(first.result()["id"]) == 4
            for read in reads:
                read.join()
            assert not handle_of(one).handoff.missing


def test_connect_waits_for_a_rank_that_is_taken_to_come_free(
    serve: Serve, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "_SAY_AFTER", 0.1)
    daemon = serve(FEEDS, "plain")
    old = start(2)
    old.connect(daemon.url, transport="tcp")
    old.ask("read", 1)
    end = threading.Timer(1, lambda: [rank.process.kill() for rank in old])
    end.start()
    new = [penstock.connect(daemon.url, rank=rank, world_size=2) for rank in range(2)]
    end.join()
    assert "rank 0 of 2 reads this feed already" in caplog.text
    assert "Trying again for up to 30 s" in caplog.text
    new[1].close()  # rank 1 has left the stream that rank 0 reads
    timer = threading.Timer(0.5, new[0].close)
    timer.start()
    with penstock.connect(daemon.url, rank=1, world_size=2):
        pass
    timer.join()
