"""User code that fails for a while, streams that kill workers, and peers that lie, in the simulated world.

Other streams must get the same batches as if nothing were wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_proto import GeneratorError, IncompleteEpoch, WorkerDied
from penstock_proto.batches.position import pack, unpack
from tests.coordinator.test_coordinator import (
    Case,
    cases,
    faults,
    index_feeds,
    lane_feeds,
    pooled_feeds,
    quick,
    ragged_feeds,
    ready_feeds,
    small_pools,
    soak,
    uneven_feeds,
)
from tests.simulation.simulation import Batch, Consumer, World

__all__ = ["small_pools"]

Check = Callable[..., None]

EPOCHS = (0, 1, 2)

failing_cases = cases(st.one_of(lane_feeds, index_feeds, ragged_feeds, ready_feeds, uneven_feeds, pooled_feeds))
failing = (failing_cases, faults, st.sampled_from(("raise", "retry", "skip")), st.integers(0, 2**32))


def check_through_errors(case: Case, faults: dict[str, int], on_error: str, seed: int) -> None:
    """Check streams whose user code raises at some samples, once or more, while workers die and connections are cut.

    With "retry" the stream is the same. With "raise" it is the same if it resumes from a state after each error. With
    "skip" it is the stream of splits that end before these samples. (With "skip" they raise at their first readings.
    Otherwise some of them raise only when they are read again.)
    """
    dice = random.Random(seed)
    samples = [sample for epoch in EPOCHS for sample in case.feed.samples_of(epoch)]
    if case.feed.length is not None and on_error == "skip":
        on_error = "retry"
    transient = []
    for _ in range(dice.randint(1, 4)):
        first = 0 if on_error == "skip" else dice.choice((0, 0, 1, 2))
        transient.append((dice.choice(samples), frozenset(range(first, first + dice.randint(1, 3)))))
    feed = replace(case.feed, transient=tuple(transient), on_error=on_error)
    asks = {**case.asks, "hoards": False}
    world = replace(case, feed=feed).world(**faults)
    position = None
    read: list[tuple[int, Batch]] = []
    for _ in range(1 + 3 * len(transient)):
        epochs = [epoch for epoch in EPOCHS if position is None or epoch >= position.epoch]
        consumer = world.open(reads=[(epoch, None) for epoch in epochs], position=position, **asks)
        world.run()
        read += [(epoch, batch) for epoch in epochs for batch in consumer.read.get(epoch, ())]
        if not consumer.failures:
            break
        (error,) = consumer.failures
        if on_error == "skip":
            break
        assert isinstance(error, GeneratorError)
        assert on_error == "raise"
        position = unpack(pack(consumer.track.newest()))
    last = EPOCHS[-1]
    for error in consumer.failures:  # so much was left out that the epoch has no batch
        last = max(consumer.read)
        assert isinstance(error, IncompleteEpoch)
        cuts = left_out(consumer, last)
        rows = sum(len(list(feed.lane(last, lane, cuts))) for lane in range(feed.lane_count()))
        if rows:
            assert error.message.startswith(f"epoch {last} had {rows} samples, less than a batch of {feed.batch_size}")
        else:
            assert error.message == f"epoch {last} is empty: the generator yielded nothing"
    for epoch in range(last + 1):
        expected = list(feed.expected(epoch, left_out(consumer, epoch)))
        assert [batch for number, batch in read if number == epoch] == expected


def left_out(consumer: Consumer, epoch: int) -> dict[int, int]:
    """Return the splits of the epoch that were cut short, according to the last records of its lanes."""
    cuts: dict[int, int] = {}
    for (number, _), record in consumer.cuts.items():
        words = [int.from_bytes(record[at : at + 8]) for at in range(8, len(record), 8)]
        cuts.update(zip(words[::2], words[1::2], strict=True) if number == epoch else ())
    return cuts


deadly = (
    cases(lane_feeds),
    cases(st.one_of(lane_feeds, index_feeds)),
    faults,
    st.integers(1, 4),
    st.integers(0, 2**32),
)


def check_deadly(case: Case, other: Case, faults: dict[str, int], attempts: int, seed: int) -> None:
    """Check that a stream that kills every worker at a certain sample fails alone. Another stream does not notice."""
    feed = replace(case.feed, name="deadly", attempts=attempts)
    samples = feed.samples_of(0)
    feed = replace(feed, deadly=frozenset({random.Random(seed).choice(samples)}))
    victim = replace(other.feed, name="victim", growth=0, attempts=1)  # so it fails if it is wrongly blamed even once
    memory = case.memory + replace(other, feed=victim).memory
    faults = {**faults, "restarts": 0, "kills": 0}
    world = World(feed, victim, workers=case.workers, memory=memory, seed=case.seed, **faults)
    doomed = world.open("deadly", **{**case.asks, "hoards": False})
    consumer = world.open("victim", reads=[(0, None), (1, None)], **{**other.asks, "hoards": False})
    world.run()
    assert not consumer.failures
    assert [consumer.read[epoch] for epoch in (0, 1)] == [list(victim.expected(epoch)) for epoch in (0, 1)]
    expected = list(feed.expected(0))
    assert doomed.read[0] == expected[: len(doomed.read[0])]
    if feed.drop_remainder and not doomed.failures:  # the sample belongs to no batch, so it was not read
        return
    (error,) = doomed.failures
    assert isinstance(error, WorkerDied)


attacks = (
    cases(st.one_of(lane_feeds, index_feeds, ragged_feeds, ready_feeds, uneven_feeds)),
    faults,
    st.integers(1, 3),
    st.booleans(),
)


def check_attack(case: Case, faults: dict[str, int], attackers: int, group: bool) -> None:
    """Check that a victim reads its stream, whatever peers say, and that nothing is left of them when they are gone."""
    feed = replace(case.feed, growth=0, epochs=2 if attackers == 2 else None)
    case = replace(case, feed=feed, slots=case.slots + 400)
    world = case.world(**{**faults, "restarts": 0, "cuts": 0 if group else faults["cuts"]})
    asks: dict[str, Any] = {**case.asks, "hoards": False, "group": "g" if group else ""}
    victim = world.open(reads=[(0, None), (1, None)], **asks)
    for number in range(attackers):
        world.attack(acts=40, group="g" if group and not number else "")
    world.run()
    assert not victim.failures
    for epoch in (0, 1):
        expected = list(case.feed.expected(epoch))
        read = victim.read[epoch]
        assert (sorted(read) == sorted(expected)) if group else (read == expected)


@settings(quick, max_examples=25)
@given(*failing)
def test_errors_that_pass_change_nothing(case: Case, faults: dict[str, int], on_error: str, seed: int) -> None:
    check_through_errors(case, faults, on_error, seed)


@settings(quick, max_examples=18)
@given(*deadly)
def test_a_stream_that_ends_workers_fails_alone(
    case: Case, other: Case, faults: dict[str, int], attempts: int, seed: int
) -> None:
    check_deadly(case, other, faults, attempts, seed)


@settings(quick, max_examples=25)
@given(*attacks)
def test_what_peers_say_changes_nothing_for_others(
    case: Case, faults: dict[str, int], attackers: int, group: bool
) -> None:
    check_attack(case, faults, attackers, group)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("drawn", "check"),
    [(failing, check_through_errors), (deadly, check_deadly), (attacks, check_attack)],
    ids=["errors", "deaths", "attacks"],
)
def test_thousands_of_worlds(drawn: tuple[Any, ...], check: Check) -> None:
    @soak
    @given(st.tuples(*drawn))
    def in_each(world: tuple[Any, ...]) -> None:
        check(*world)

    in_each()
