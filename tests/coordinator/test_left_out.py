"""Splits that are left out because user code raised once: a stream that goes on from any batch leaves out the same, in
the simulated world."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock_proto.batches.position import Position, pack, unpack
from tests.coordinator.test_coordinator import (
    Case,
    cases,
    lane_feeds,
    pooled_feeds,
    quick,
    ragged_feeds,
    small_pools,
    soak,
    uneven_feeds,
)
from tests.simulation.simulation import Batch, Consumer, SimFeed

__all__ = ["small_pools"]

any_case = (cases(st.one_of(lane_feeds, pooled_feeds, uneven_feeds, ragged_feeds)), st.integers(1, 3), st.integers(0))
plain = {"credit_bytes": 0, "credit": 1, "quota": 0, "hoards": False}


def read_by_ranks(case: Case, world_size: int, position: Position | None = None) -> list[Consumer]:
    """Return the ranks that have read epoch 0."""
    world = case.world()
    options = {**case.asks, "hoards": False, "pad": True, "stays": True, "world_size": world_size}
    ranks = [world.open(reads=[(0, None)], rank=rank, position=position, **options) for rank in range(world_size)]
    world.settle()
    for consumer in ranks:
        consumer.let_go()
    world.run()
    return ranks


def in_order(ranks: list[Consumer]) -> list[Batch]:
    """Return the batches of epoch 0, with those that fill up the last round."""
    rounds = zip(*(consumer.read[0] for consumer in ranks), strict=True)
    return [batch for one in rounds for batch in one]


def check_that_it_goes_on(case: Case, world_size: int, seed: int) -> None:
    """Let one or two samples raise when they are first read. Go on from the state after each batch, in another world
    where they do not raise. Check that the batches before and after the state form one stream."""
    dice = random.Random(seed)
    samples = case.feed.samples_of(0)
    if not samples:
        return
    raising = tuple((dice.choice(samples), frozenset({0})) for _ in range(dice.randint(1, 2)))
    feed = replace(case.feed, transient=raising, on_error="skip", drop_remainder=False)
    case = replace(case, feed=feed, slots=case.slots + 8 * world_size)
    streams = [list(feed.expected(0, cuts)) for cuts in feed.possible_cuts(0)]
    ranks = read_by_ranks(case, world_size)
    if any(consumer.failures for consumer in ranks):  # nothing is left of the epoch
        return
    read = in_order(ranks)
    for consumed in range(len(read) // world_size):
        positions = {consumer.track.position(consumed) for consumer in ranks}
        assert len(positions) == 1
        later = replace(case, feed=replace(feed, transient=()), seed=case.seed + consumed)
        again = read_by_ranks(later, world_size, unpack(pack(positions.pop())))
        assert not any(consumer.failures for consumer in again)
        whole = read[: consumed * world_size] + in_order(again)
        fills = [len(whole) - len(stream) for stream in streams if whole[: len(stream)] == stream]
        assert any(fill < world_size for fill in fills), f"after step {consumed}"


@settings(quick, max_examples=40)
@example(  # a lane that ends without a batch, before the slab within which the state is
    Case(SimFeed(splits=(2, 3, 13, 24, 24), lanes=9, batch_size=5, turn=2, room=1), 1, 3, 0, plain), 1, 1
)
@example(  # a split is left out in the first batch of a round, and the second batch is of the next report
    Case(SimFeed(splits=(10, 10, 9, 6, 0, 5, 5, 0, 0), lanes=1, batch_size=1, turn=3, room=1), 1, 3, 0, plain), 2, 1
)
@given(*any_case)
def test_what_was_left_out_before_a_state_is_left_out_after_it(case: Case, world_size: int, seed: int) -> None:
    check_that_it_goes_on(case, world_size, seed)


@pytest.mark.soak
@soak
@given(*any_case)
def test_what_was_left_out_is_left_out_again_in_thousands_of_worlds(case: Case, world_size: int, seed: int) -> None:
    check_that_it_goes_on(case, world_size, seed)
