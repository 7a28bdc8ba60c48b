"""Hosts join, leave and are lost in a simulated world. The stream is the same, and waits while there is no host."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.coordinator.test_coordinator import (
    Case,
    any_feeds,
    cases,
    check_group,
    check_kept_group,
    check_ranks,
    check_through_faults,
    endless_feeds,
    fast,
    faulty_cases,
    kept_groups,
    pooled_feeds,
    quick,
    shared_groups,
    small_pools,
    soak,
)
from tests.coordinator.test_coordinator import faults as other_faults
from tests.simulation.simulation import SimFeed

__all__ = ["small_pools"]

hosts = st.fixed_dictionaries(
    {
        "idle": st.booleans(),
        "hosts": st.integers(0, 4),
        "joins": st.integers(0, 3),
        "leaves": st.integers(0, 2),
        "losses": st.integers(0, 4),
    }
)
faults = st.builds(lambda faults, hosts: {**faults, **hosts}, other_faults, hosts)
"""The faults of a daemon alone, and those of hosts."""


placed_feeds = st.one_of(
    st.builds(
        SimFeed,
        splits=st.lists(st.integers(0, 30), min_size=2, max_size=16).filter(lambda splits: sum(splits) > 5).map(tuple),
        lanes=st.sampled_from((2, 4, 6, 8)),
        batch_size=st.integers(1, 5),
        turn=st.just(1),
        dynamic=st.booleans(),
    ),
    st.builds(SimFeed, length=st.integers(1, 150), batch_size=st.integers(1, 5), turn=st.just(1)),
)
"""Feeds for which the reader of a batch is known before it is made."""
even_hosts = st.fixed_dictionaries(
    {
        "idle": st.just(True),
        "hosts": st.sampled_from((2, 2, 4, 1)),
        "host_workers": st.integers(1, 3),
        "joins": st.integers(0, 4),
        "leaves": st.integers(0, 2),
        "losses": st.integers(0, 3),
    }
)
"""Hosts on the machines of ranks, mostly with equally many workers."""
placed_faults = st.builds(lambda faults, hosts: {**faults, **hosts}, other_faults, even_hosts)


def without_patience(case: Case, hosts: dict[str, Any]) -> None:
    """Check a stream while hosts are lost, with attempts=1: a split that ended a single worker would fail the
    stream."""
    check_through_faults(replace(case, feed=replace(case.feed, attempts=1)), hosts)


def check_without_end(case: Case, faults: dict[str, Any], slabs: int) -> None:
    """Check that an endless stream is the reference's for as long as it is read."""
    world = case.world(**faults)
    consumer = world.open(reads=[(0, slabs)], **{**case.asks, "hoards": False})
    world.run()
    assert not consumer.failures
    assert len(consumer.read[0]) >= slabs
    assert consumer.read[0] == list(islice(case.feed.expected(0), len(consumer.read[0])))


@settings(quick, max_examples=25)
@given(faulty_cases, faults)
def test_the_stream_is_the_same_with_any_hosts(case: Case, faults: dict[str, Any]) -> None:
    check_through_faults(case, faults)


@settings(quick, max_examples=35)
@given(cases(st.one_of(any_feeds, any_feeds.map(fast))), hosts)
def test_no_stream_fails_because_hosts_are_lost(case: Case, hosts: dict[str, Any]) -> None:
    without_patience(case, hosts)


@settings(quick, max_examples=15)
@given(cases(pooled_feeds), st.integers(1, 4), faults)
def test_ranks_see_the_same_stream_with_any_hosts(case: Case, world_size: int, faults: dict[str, Any]) -> None:
    check_ranks(case, world_size, faults)


@settings(quick, max_examples=18)
@given(cases(placed_feeds), st.sampled_from((2, 4)), placed_faults)
def test_ranks_see_the_same_stream_if_their_own_machines_make_it(
    case: Case, world_size: int, faults: dict[str, Any]
) -> None:
    check_ranks(case, world_size, faults)


@settings(quick, max_examples=15)
@given(*shared_groups, hosts)
def test_a_group_reads_each_batch_once_with_any_hosts(
    case: Case,
    consumers: int,
    faults: dict[str, int],
    leaves: int | None,
    goes: tuple[str, int] | None,
    hosts: dict[str, Any],
) -> None:
    check_group(case, consumers, {**(faults if leaves is None else {**faults, "cuts": 0}), **hosts}, leaves, goes)


@settings(quick, max_examples=15)
@given(*kept_groups, hosts)
def test_a_kept_group_loses_nothing_with_any_hosts(
    case: Case, consumers: int, faults: dict[str, int], leaves: int | None, dies: int | None, hosts: dict[str, Any]
) -> None:
    check_kept_group(case, consumers, {**faults, **hosts}, leaves, dies)


@settings(quick, max_examples=20)
@given(cases(endless_feeds), faults, st.integers(1, 40))
def test_an_endless_stream_is_the_same_with_any_hosts(case: Case, faults: dict[str, Any], slabs: int) -> None:
    check_without_end(case, faults, slabs)


@pytest.mark.soak
@soak
@given(faulty_cases, faults)
def test_the_stream_is_the_same_with_any_hosts_in_thousands_of_worlds(case: Case, faults: dict[str, Any]) -> None:
    check_through_faults(case, faults)


@pytest.mark.soak
@soak
@given(cases(st.one_of(any_feeds, any_feeds.map(fast))), hosts)
def test_no_stream_fails_because_hosts_are_lost_in_thousands_of_worlds(case: Case, hosts: dict[str, Any]) -> None:
    without_patience(case, hosts)


@pytest.mark.soak
@soak
@given(cases(placed_feeds), st.sampled_from((2, 4)), placed_faults)
def test_ranks_see_the_same_stream_if_their_own_machines_make_it_in_thousands_of_worlds(
    case: Case, world_size: int, faults: dict[str, Any]
) -> None:
    check_ranks(case, world_size, faults)


@pytest.mark.soak
@soak
@given(cases(any_feeds), st.integers(1, 4), faults)
def test_ranks_see_the_same_stream_with_any_hosts_in_thousands_of_worlds(
    case: Case, world_size: int, faults: dict[str, Any]
) -> None:
    check_ranks(case, world_size, faults)


@pytest.mark.soak
@soak
@given(*kept_groups, hosts)
def test_a_kept_group_loses_nothing_with_any_hosts_in_thousands_of_worlds(
    case: Case, consumers: int, faults: dict[str, int], leaves: int | None, dies: int | None, hosts: dict[str, Any]
) -> None:
    check_kept_group(case, consumers, {**faults, **hosts}, leaves, dies)
