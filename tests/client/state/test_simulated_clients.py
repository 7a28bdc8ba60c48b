"""The client's state machine against the coordinator, in the simulated world: whatever a client does, and whenever its
connection breaks, it reads the same stream (see simulated_client.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordinator.test_coordinator import (
    Case,
    any_feeds,
    asks,
    cases,
    lane_feeds,
    quick,
    ready_feeds,
    seeds,
    small_pools,  # noqa: F401 (a fixture)
    soak,
    until_error,
)
from tests.simulation.simulated_client import Client
from tests.simulation.simulation import SimFeed, World

habits = st.fixed_dictionaries(
    {
        "leaves": st.lists(st.none() | st.integers(-4, 6), max_size=4).map(lambda leaves: [*leaves, None]),
        "impatient": st.sampled_from((0.0, 0.3)),
        "breaks": st.integers(0, 6),
    }
)
"""How clients read: some epochs in part, and the last one whole."""
faults = st.fixed_dictionaries(
    {"cuts": st.integers(0, 4), "restarts": st.integers(0, 2), "kills": st.integers(0, 2), "scales": st.integers(0, 1)}
)


def _reads_one_stream(case: Case, habits: dict[str, Any], faults: dict[str, int]) -> None:
    world = case.world(**faults)
    client = world.open(made=Client, **habits, **case.asks)
    world.run()
    assert isinstance(client, Client)
    assert list(client.read) == list(range(len(client.read)))
    for epoch, read in client.read.items():
        batches, error = until_error(case.feed, epoch)
        assert read == batches[: len(read)]
        if epoch in client.ended:
            assert (read, error) == (batches, None)
    if client.failures:
        (failure,) = client.failures
        assert (client.read[epoch], str(failure).partition("\n")[0]) == (batches, error)
    else:
        assert len(client.read) == len(habits["leaves"])


def _fails(case: Case, data: st.DataObject, habits: dict[str, Any]) -> Case:
    """Let user code raise in each epoch or not: anywhere, or soon after the client leaves the epoch."""
    poison = set()
    for epoch, leave in enumerate(habits["leaves"]):
        batches = list(case.feed.expected(epoch))
        soon = [] if leave is None else batches[abs(leave) : abs(leave) + 3]
        samples = [sample for batch in soon or batches for sample in batch]
        poison |= data.draw(st.sets(st.sampled_from(samples), max_size=1)) if samples else set()
    return replace(case, feed=replace(case.feed, poison=frozenset(poison)))


@settings(quick, max_examples=25)
@given(cases(any_feeds), habits, faults)
def test_a_client_reads_one_stream_whatever_it_does_while_its_connection_is_lost(
    case: Case, habits: dict[str, Any], faults: dict[str, int]
) -> None:
    _reads_one_stream(case, habits, faults)


@settings(quick, max_examples=25)
@given(st.data(), cases(st.one_of(lane_feeds, ready_feeds)), habits, faults)
def test_a_client_meets_an_error_in_its_place_or_not_at_all(
    data: st.DataObject, case: Case, habits: dict[str, Any], faults: dict[str, int]
) -> None:
    _reads_one_stream(_fails(case, data, habits), habits, faults)


def _shares_each_batch(
    feed: SimFeed, ask: dict[str, Any], habits: list[dict[str, Any]], seed: int, faults: dict[str, int]
) -> None:
    """Let a group read three epochs. Its first member keeps its connection and leaves no epoch, so each epoch goes on
    until all of it was handed over."""
    feed = replace(feed, turn=1, shuffle=0)
    world = World(feed, workers=2, seed=seed, state=seed % 2 == 0, **{**faults, "restarts": 0})
    first = world.open(made=Client, group="g", leaves=[None] * 3, **ask)
    clients = [first, *(world.open(made=Client, group="g", **habit, **ask) for habit in habits)]

    def cut() -> None:
        world.faults["cut"] -= 1
        world._due["cut"] = world._when()
        others = [one for one in world.consumers.values() if one is not first and not (one.gone or one.lost)]
        if others:
            world.random.choice(others).cut()

    world._cut = cut  # type: ignore[method-assign]
    world.run()
    for epoch in range(3):
        got = Counter(batch for client in clients for batch in client.read.get(epoch, []))
        assert got == Counter(feed.expected(epoch))


group_habits = st.lists(habits, min_size=1, max_size=2)


@settings(quick, max_examples=25)
@given(lane_feeds, asks, group_habits, seeds, faults)
def test_members_of_a_group_get_each_batch_once_whatever_they_do_while_their_connections_are_lost(
    feed: SimFeed, ask: dict[str, Any], habits: list[dict[str, Any]], seed: int, faults: dict[str, int]
) -> None:
    _shares_each_batch(feed, ask, habits, seed, faults)


@pytest.mark.soak
class TestManySchedules:
    @soak
    @given(cases(any_feeds), habits, faults)
    def test_a_client(self, case: Case, habits: dict[str, Any], faults: dict[str, int]) -> None:
        _reads_one_stream(case, habits, faults)

    @soak
    @given(st.data(), cases(st.one_of(lane_feeds, ready_feeds)), habits, faults)
    def test_errors(self, data: st.DataObject, case: Case, habits: dict[str, Any], faults: dict[str, int]) -> None:
        _reads_one_stream(_fails(case, data, habits), habits, faults)

    @soak
    @given(lane_feeds, asks, group_habits, seeds, faults)
    def test_groups(
        self, feed: SimFeed, ask: dict[str, Any], habits: list[dict[str, Any]], seed: int, faults: dict[str, int]
    ) -> None:
        _shares_each_batch(feed, ask, habits, seed, faults)
