"""The coordinator alone, in a simulated world (see simulation.py): its promises hold for every schedule."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_proto import (
    DaemonStopped,
    EndOfStream,
    GeneratorError,
    IncompleteEpoch,
    MemoryBound,
    PenstockError,
    ProtocolError,
    UnknownFeed,
    WorkerDied,
)
from penstock_proto.batches.position import pack, unpack
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.memory import Share
from penstock_server.feed.options import plan_sizes
from tests.reference.reference import epoch_length
from tests.simulation.simulation import Batch, Consumer, SimFeed, World

PAGE = 4096
"""Bytes of a slot of the simulated feeds."""

quick = settings(derandomize=True, deadline=None, max_examples=50)
soak = settings(deadline=None, max_examples=20_000, print_blob=True, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Case:
    """A feed, the options of the world that serves it, and its consumer's options."""

    feed: SimFeed
    workers: int
    slots: int
    seed: int
    asks: Mapping[str, Any]

    @property
    def memory(self) -> int:
        """Bytes of `slots` slots, plus those of a pool. Plenty if the sizes of batches vary."""
        slots = self.slots + (self.feed.pool if self.feed.pool > 1 else 0) + (self.feed.shuffle > 0) + self.feed.striped
        return slots * PAGE if not self.feed.growth else 1 << 22

    def world(self, *others: SimFeed, **options: Any) -> World:
        """Return a world with this memory for each feed."""
        memory = self.memory * (1 + len(others))
        return World(self.feed, *others, workers=self.workers, memory=memory, seed=self.seed, **options)


@pytest.fixture(autouse=True, scope="module")
def small_pools() -> Iterator[None]:
    """Let at most three lanes mix their rows with each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_sizes, "MAX_POOLED", 3)
        yield


seeds = st.integers(0, 2**32)
shuffles = st.sampled_from((0, 0, 7))
"""If a feed is shuffled in exact order, its lanes mix their rows."""
rooms = st.sampled_from((1, 2, 3, 5, 9, 20))
"""How many batches a stripe has, if turns have one batch and lanes do not mix their rows. 1: there are no stripes. Also
how many batches a range has at most."""
asks = st.fixed_dictionaries(
    {
        "credit": st.integers(1, 5),
        "credit_bytes": st.integers(0, 2000),
        "quota": st.integers(0, 4),
        "hoards": st.booleans(),
    }
)
transforms = st.sampled_from((False, False, True))
lane_feeds = st.builds(
    SimFeed,
    splits=st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any).map(tuple),
    lanes=st.integers(1, 10),
    batch_size=st.integers(1, 5),
    turn=st.integers(1, 3),
    drop_remainder=st.booleans(),
    dynamic=st.booleans(),
    shuffle=shuffles,
    room=rooms,
    transforms=transforms,
).filter(lambda feed: not feed.drop_remainder or sum(feed.splits) >= (feed.batch_size or 1))  # less is an error
index_feeds = st.builds(
    SimFeed,
    length=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    turn=st.integers(1, 3),
    drop_remainder=st.booleans(),
    room=rooms,
)
ready_feeds = st.builds(
    SimFeed,
    splits=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any).map(tuple),
    lanes=st.integers(1, 7),
    batch_size=st.none(),
    growth=st.integers(1, 400),
)
ragged_feeds = st.builds(
    SimFeed,
    splits=st.lists(st.sampled_from((0, 2, 3, 7, 13)), min_size=1, max_size=9).filter(any).map(tuple),
    lanes=st.integers(1, 9),
    batch_size=st.integers(2, 5),
    growth=st.integers(1, 100),
    transforms=transforms,
)
"""Feeds whose merged batches must be measured before they are written."""
uneven_feeds = st.builds(
    SimFeed,
    splits=st.lists(st.sampled_from((2, 3, 7, 13, 18, 24)), min_size=5, max_size=9).map(tuple),
    lanes=st.just(9),
    batch_size=st.integers(4, 5),
    turn=st.integers(1, 3),
    shuffle=shuffles,
    room=rooms,
    transforms=transforms,
)
"""Feeds whose lanes end at different places, so merged batches come in the middle of the epoch."""
endless_feeds = st.builds(
    SimFeed,
    splits=st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any).map(tuple),
    lanes=st.sampled_from((1, 2, 4, 8)),
    batch_size=st.integers(1, 5),
    turn=st.integers(1, 3),
    shuffle=shuffles,
    endless=st.just(True),
    room=rooms,
    transforms=transforms,
).filter(lambda feed: feed.lanes == 1 or len(feed.splits) % 2 == 1)  # otherwise a lane may have only empty segments
pooled_feeds = st.builds(
    SimFeed,
    splits=st.lists(st.sampled_from((0, 3, 7, 12, 18)), min_size=2, max_size=9).filter(sum).map(tuple),
    lanes=st.integers(2, 9),
    batch_size=st.integers(1, 4),
    turn=st.integers(1, 3),
    dynamic=st.booleans(),
    shuffle=st.just(7),
    transforms=transforms,
)
"""Feeds whose lanes mix their rows. (Few of the feeds above have pools with turns of several batches.)"""
any_feeds = st.one_of(lane_feeds, index_feeds, ready_feeds, ragged_feeds, pooled_feeds)


def cases(feeds: st.SearchStrategy[SimFeed]) -> st.SearchStrategy[Case]:
    """Return cases with any memory from the least that is accepted, and consumers of every kind."""
    return st.builds(Case, feeds, st.integers(1, 5), st.integers(3, 40), seeds, asks)


several_streams = (
    st.lists(cases(any_feeds), min_size=2, max_size=3),
    seeds,
    st.integers(0, 2),
    st.sampled_from((0, 2, 8, 30)),
)
"""Streams beside each other, the seed of their world, and how often its workers die and stand."""


def fast(feed: SimFeed) -> SimFeed:
    return replace(feed, order="fast")


def until_error(feed: SimFeed, epoch: int) -> tuple[list[Batch], str | None]:
    """Return the batches of an epoch before its first error in exact order, and the text of that error."""
    batches = []
    try:
        for batch in feed.expected(epoch):
            batches.append(batch)
    except PenstockError as error:
        return batches, error.message
    return batches, None


def check_epoch(feed: SimFeed, epoch: int, read: list[Batch]) -> None:
    """Check that every sample came once, in the right number of batches, with at most one smaller batch."""
    samples, size = feed.samples_of(epoch), feed.batch_size or 1
    assert len(read) == epoch_length(len(samples), size, drop_remainder=feed.drop_remainder)
    came = Counter(sample for batch in read for sample in batch)
    assert came <= Counter(samples)
    assert came.total() == (len(read) * size if feed.drop_remainder else len(samples))
    assert sum(len(batch) != size for batch in read) <= 1


def check_exact_order(case: Case) -> None:
    """Check that three epochs are those of the reference, and that only the last batch of each may be smaller."""
    world = case.world()
    consumer = world.open(reads=[(0, None), (1, None), (2, None)], **case.asks)
    world.run()
    for epoch in range(3):
        assert consumer.read[epoch] == list(case.feed.expected(epoch))
        check_epoch(case.feed, epoch, consumer.read[epoch])
        assert all(len(batch) == (case.feed.batch_size or 1) for batch in consumer.read[epoch][:-1])


def failure(consumer: Consumer) -> PenstockError:
    """Return the consumer's only error."""
    (error,) = consumer.failures
    return error


class TestOrder:
    @settings(quick, max_examples=25)
    @given(cases(any_feeds))
    def test_the_stream_is_a_function_of_the_feed_alone(self, case: Case) -> None:
        check_exact_order(case)

    @quick
    @given(cases(any_feeds.map(fast)))
    def test_fast_order_delivers_the_same_samples_in_as_many_batches(self, case: Case) -> None:
        world = case.world()
        consumer = world.open(reads=[(0, None), (1, None)], **case.asks)
        world.run()
        for epoch in range(2):
            check_epoch(case.feed, epoch, consumer.read[epoch])

    @quick
    @given(st.one_of(any_feeds, any_feeds.map(fast)), st.integers(1, 5), st.booleans(), seeds)
    def test_the_least_memory_that_is_accepted_suffices(
        self, feed: SimFeed, workers: int, local: bool, seed: int
    ) -> None:
        feed = replace(feed, growth=0)
        made = 1 if feed.pool == 1 else feed.pool + 1  # the slots of a pool, and one more
        made += feed.striped  # one for a merged batch between batches of the stripe
        blocks = feed.served().blocks_nbytes
        world = World(feed, workers=workers, memory=(made + 2) * PAGE + blocks, seed=seed)
        reads = [(0, None), (1, None)]
        consumer = world.open(reads=reads, credit=4, quota=4 if local else 0, hoards=True)
        assert consumer.stream.share == Share(made, 1, int(local), (made + 1 + local) * PAGE + blocks)
        world.run()
        for epoch, _ in reads:
            check_epoch(feed, epoch, consumer.read[epoch])

    @quick
    @given(cases(any_feeds), st.lists(st.tuples(st.integers(1, 2), st.none() | st.integers(0, 9)), max_size=4))
    def test_leaving_or_skipping_epochs_changes_no_other(
        self, case: Case, visits: list[tuple[int, int | None]]
    ) -> None:
        reads: list[tuple[int, int | None]] = []
        for step, count in visits:
            reads.append((reads[-1][0] + step if reads else step - 1, count))
        reads.append((reads[-1][0] + 1 if reads else 0, None))
        world = case.world()
        consumer = world.open(reads=reads, **case.asks)
        world.run()
        for epoch, count in reads:
            expected = list(case.feed.expected(epoch))
            read = consumer.read[epoch]
            assert read == expected[: len(read)]
            assert count is not None or read == expected

    @settings(quick, max_examples=18)
    @given(*several_streams)
    def test_streams_share_workers_and_memory_and_do_not_disturb_one_another(
        self, all_: list[Case], seed: int, kills: int, stands: int
    ) -> None:
        check_several_streams(all_, seed, kills, stands)

    def test_in_fast_order_a_hung_worker_holds_up_its_own_lanes_only(self) -> None:
        feed = SimFeed(splits=(40,) * 8, lanes=8, order="fast")
        world = World(feed, workers=4)
        consumer = world.open()
        world.workers[2].hung = True
        world.settle()
        splits = {sample[1] for batch in consumer.read[0] for sample in batch}
        assert splits == {0, 1, 3, 4, 5, 7}
        assert len(consumer.read[0]) == 6 * 10
        world.workers[2].hung = False
        world.run()
        check_epoch(feed, 0, consumer.read[0])

    def test_in_exact_order_a_hung_worker_does_not_keep_others_from_working_ahead(self) -> None:
        feed = SimFeed(splits=(40,) * 8, lanes=8)
        world = World(feed, workers=4)
        consumer = world.open()
        world.workers[2].hung = True
        world.settle()
        assert consumer.read[0] == list(feed.expected(0))[:2]
        ready = [turn for turn in consumer.stream.epochs[0].order.window if turn.complete]
        assert len(ready) == consumer.stream.share.production - 3  # turns 2, 6 and 10 are of lanes 2, 6 and 2

    def test_epochs_are_numbered_to_the_end_that_the_feed_says(self) -> None:
        world = World(SimFeed(epochs=2))
        consumer = world.open(reads=[(0, None), (1, None), (2, None)])
        world.run()
        assert len(consumer.ended) == 2
        assert isinstance(failure(consumer), EndOfStream)
        assert failure(consumer).message == "the feed has 2 epochs"

    def test_the_next_epoch_is_begun_while_the_consumer_does_something_else(self) -> None:
        world = World(SimFeed())
        consumer = world.open(stays=True)
        world.settle()
        assert consumer.read[0] == list(world.feeds["train"].expected(0))
        assert [epoch.number for epoch in consumer.stream.epochs] == [1]
        assert consumer.stream.epochs[0].order.window[0].parts


class TestFailures:
    @quick
    @given(st.data(), cases(st.one_of(lane_feeds, ready_feeds)), st.booleans())
    def test_what_stands_before_an_error_is_delivered_and_then_the_error_once(
        self, data: st.DataObject, case: Case, bystands: bool
    ) -> None:
        poison = data.draw(st.sets(st.sampled_from(case.feed.samples_of(0) + case.feed.samples_of(1)), max_size=2))
        feed = replace(case.feed, poison=frozenset(poison))
        others = [replace(case.feed, name="other", poison=frozenset())] if bystands else []
        world = replace(case, feed=feed).world(*others)
        consumer = world.open(reads=[(0, None), (1, None)], **case.asks)
        bystanders = [world.open("other", **case.asks) for _ in others]
        world.run()
        for epoch in (0, 1):
            batches, error = until_error(feed, epoch)
            assert consumer.read[epoch] == batches
            if error is not None:
                assert failure(consumer).message == error
                assert str(consumer.stream.error) == str(failure(consumer))
                break
        else:
            assert not consumer.failures
        for bystander in bystanders:
            assert bystander.read[0] == list(case.feed.expected(0))

    @quick
    @given(cases(lane_feeds.filter(lambda feed: sum(feed.splits) > 10)), st.integers(0, 2))
    def test_an_error_in_an_epoch_that_is_left_before_it_does_no_harm(self, case: Case, slabs: int) -> None:
        feed = replace(case.feed, poison=frozenset(case.feed.samples_of(0)[-1:] + case.feed.samples_of(1)[:1]))
        world = replace(case, feed=feed).world()
        consumer = world.open(reads=[(0, slabs), (2, None)], **case.asks)
        world.run()
        before, error = until_error(feed, 0)
        if consumer.failures:
            assert failure(consumer).message == error  # the error was on its way when the consumer left
            assert consumer.read[0] == before[: len(consumer.read[0])]
        else:
            assert consumer.read[2] == list(feed.expected(2))

    def test_what_a_worker_held_when_it_died_is_made_again_elsewhere(self) -> None:
        """That is its turns, the lanes that were between two turns, and the leftover rows in its heap."""
        feed = SimFeed(splits=(9, 8, 8, 9), lanes=4)
        world = World(feed, workers=4)
        consumer = world.open()
        world.workers[3].hung = True
        world.settle()
        world.workers[0].die()
        world.settle()
        world.workers[3].hung = False
        world.run()
        assert not consumer.failures
        assert consumer.read[0] == list(feed.expected(0))

    def test_a_worker_that_dies_before_there_are_feeds_refuses_the_start(self) -> None:
        world = World(SimFeed(), starts=False)
        world.crash(0, after=0)
        world.start()
        (error,) = world.refusals
        assert isinstance(error, WorkerDied)
        assert "was killed by SIGKILL" in error.message

    @quick
    @given(cases(lane_feeds), st.sets(st.integers(1, 30), min_size=1, max_size=3))
    def test_when_the_machine_has_no_memory_the_stream_fails_as_a_whole(self, case: Case, refused: set[int]) -> None:
        world = case.world(refused=frozenset(refused))
        consumer = world.open(reads=[(0, None), (1, None)], **case.asks)
        world.run()
        if consumer.failures:
            assert failure(consumer).message == "the machine has no memory"
        for epoch, read in consumer.read.items():
            expected = list(case.feed.expected(epoch))
            assert read == expected[: len(read)]
            assert epoch not in consumer.ended or read == expected

    @quick
    @given(cases(lane_feeds.filter(lambda feed: feed.dynamic)))
    def test_an_epoch_whose_splits_cannot_be_listed_fails_when_it_is_begun(self, case: Case) -> None:
        feed = replace(case.feed, unlisted=frozenset({1}))
        world = replace(case, feed=feed).world()
        reader = world.open(reads=[(0, None), (1, None)], **case.asks)
        world.run()
        assert reader.read == {0: list(feed.expected(0)), 1: []}
        assert failure(reader).message == "no splits in epoch 1"
        skipper = world.open(reads=[(0, None), (2, None)], **case.asks)
        world.run()
        assert skipper.read[2] == list(feed.expected(2))

    def test_a_feed_whose_splits_cannot_be_listed_at_start_refuses_it(self) -> None:
        world = World(SimFeed(unlisted=frozenset({0})))
        (error,) = world.refusals
        assert isinstance(error, GeneratorError)
        assert not world.ready

    @pytest.mark.parametrize(("splits", "lanes"), [((0, 0), 2), ((), 4)])
    @pytest.mark.parametrize("order", ["exact", "fast"])
    def test_an_empty_epoch_is_an_error(self, splits: tuple[int, ...], lanes: int, order: str) -> None:
        world = World(SimFeed(splits=splits, lanes=lanes, order=order))
        consumer = world.open()
        world.run()
        assert isinstance(failure(consumer), IncompleteEpoch)
        assert failure(consumer).message == "epoch 0 is empty: the generator yielded nothing"

    @pytest.mark.parametrize("order", ["exact", "fast"])
    def test_an_epoch_that_drop_remainder_drops_as_a_whole_is_an_error(self, order: str) -> None:
        world = World(SimFeed(splits=(1, 2), lanes=2, order=order, drop_remainder=True))
        consumer = world.open()
        world.run()
        assert isinstance(failure(consumer), IncompleteEpoch)
        assert "epoch 0 had 3 samples, less than a batch of 4, and drop_remainder=True" in failure(consumer).message

    @pytest.mark.parametrize(
        ("feed", "message"),
        [
            (SimFeed(samples=37), "epoch 0 had 36 samples, but the feed says samples=37: correct it, or leave it out"),
            (SimFeed(samples=35), "epoch 0 had 36 samples, but the feed says samples=35: correct it, or leave it out"),
            (
                SimFeed(batch_size=None, splits=(3, 4), samples=9),
                "epoch 0 had 7 batches, but the feed says samples=9: correct it, or leave it out",
            ),
        ],
    )
    def test_an_epoch_of_another_length_than_the_feed_says_is_an_error(self, feed: SimFeed, message: str) -> None:
        world = World(feed)
        consumer = world.open()
        world.run()
        assert isinstance(failure(consumer), IncompleteEpoch)
        assert failure(consumer).message == message
        assert consumer.read[0] == list(feed.expected(0))

    @pytest.mark.parametrize("drop_remainder", [False, True])
    def test_samples_counts_what_drop_remainder_drops(self, drop_remainder: bool) -> None:
        feed = SimFeed(splits=(5, 6), samples=11, drop_remainder=drop_remainder)
        world = World(feed)
        assert world.coordinator.feeds["train"].info.batches == (2 if drop_remainder else 3)
        consumer = world.open()
        world.run()
        assert consumer.ended[0].batches == (2 if drop_remainder else 3)

    def test_an_indexable_feed_shorter_than_a_batch_may_have_an_epoch_without_batches(self) -> None:
        world = World(SimFeed(length=3, drop_remainder=True))
        consumer = world.open()
        world.run()
        assert consumer.ended[0].batches == 0


class TestConsumers:
    @quick
    @given(cases(any_feeds), st.integers(0, 20), st.booleans())
    def test_a_consumer_that_dies_leaves_nothing_behind(self, case: Case, slabs: int, again: bool) -> None:
        world = case.world()
        world.open(reads=[(0, None), (1, None), (2, None)], dies_after=slabs, **case.asks)
        world.run()
        if again:
            consumer = world.open(**case.asks)
            world.run()
            assert consumer.read[0] == list(case.feed.expected(0))

    @quick
    @given(cases(any_feeds), st.integers(0, 20))
    def test_a_consumer_that_closes_keeps_its_tensors_until_it_lets_go_of_them(self, case: Case, slabs: int) -> None:
        world = case.world()
        world.open(reads=[(0, slabs)], **{**case.asks, "quota": 3, "hoards": True})
        world.run()

    def test_a_consumer_that_aliases_more_than_it_may_is_sent_no_more(self) -> None:
        world = World(SimFeed(splits=(100,), lanes=1), memory=20 * PAGE)
        consumer = world.open(quota=2, hoards=True, greedy=True)
        world.settle()
        assert consumer.reader.sent == consumer.stream.share.credit + consumer.stream.share.quota < 25
        consumer.let_go()
        world.run()
        assert consumer.read[0] == list(world.feeds["train"].expected(0))

    @pytest.mark.parametrize("local", [False, True])
    def test_what_breaks_the_protocol_is_refused(self, local: bool) -> None:
        world = World(SimFeed())
        consumer = world.open(reads=[], quota=2 * local, stays=True)
        reader = consumer.reader
        world.handle(on.Begin(reader.number, 0))
        with pytest.raises(ProtocolError, match="epoch 0 cannot begin: epochs begin one after another"):
            world.handle(on.Begin(reader.number, 0))
        world.handle(on.Leave(reader.number, 0, 0))
        with pytest.raises(ProtocolError, match="epoch 0 cannot begin"):
            world.handle(on.Begin(reader.number, 0))
        world.handle(on.Begin(reader.number, 1))
        while reader.sent < 2:
            assert world.step()
        with pytest.raises(ProtocolError, match=f"{reader.sent + 1} slabs handed of {reader.sent} sent, after 0"):
            world.handle(on.Acknowledge(reader.number, reader.sent + 1, (), 0))
        for released in ((1,), (0, 1), (2**62,)):
            with pytest.raises(ProtocolError, match=f"slab {released[-1] if local else released[0]} is released befo"):
                world.handle(on.Acknowledge(reader.number, 1, released, 0))
        with pytest.raises(ProtocolError, match="1 Ends of 0, after 0"):
            world.handle(on.Acknowledge(reader.number, 2, (), 1))
        if local:
            with pytest.raises(ProtocolError, match="slab 0 is released twice, or was never sent"):
                world.handle(on.Acknowledge(reader.number, 2, (0, 0), 0))
        assert (reader.handed, reader.ended, reader.under_way, len(reader.out)) == (0, 0, reader.sent, reader.sent)
        world.handle(on.Acknowledge(reader.number, 2, (0,) if local else (), 0))
        if local:
            with pytest.raises(ProtocolError, match="slab 0 is released twice, or was never sent"):
                world.handle(on.Acknowledge(reader.number, 2, (0,), 0))
        for event in (on.Leave(reader.number, 1, reader.sent + 1), on.Close(reader.number, reader.sent + 1)):
            with pytest.raises(ProtocolError, match=f"{reader.sent + 1} slabs handed of {reader.sent} sent"):
                world.handle(event)
        assert reader.reading
        with pytest.raises(ProtocolError, match="0 slabs handed"):
            world.handle(on.Acknowledge(reader.number, 0, (), 0))
        with pytest.raises(ProtocolError, match="1 Ends of 0, after 0"):
            world.handle(on.Acknowledge(reader.number, reader.handed, (), 1))
        world.handle(on.Close(reader.number, 0))
        with pytest.raises(ProtocolError, match="cannot begin"):
            world.handle(on.Begin(reader.number, 2))

    def test_an_unknown_feed_is_named_with_those_that_there_are(self) -> None:
        world = World(SimFeed(name="train"), SimFeed(name="val"))
        with pytest.raises(UnknownFeed, match="no feed 'tests' is served here; there are: train, val"):
            world.open("tests")


def memory_asked_for(error: Exception) -> tuple[int, int]:
    """Return the bytes of the --memory that the error asks for, and the bytes of its unit."""
    found = re.search(r"Give --memory (\d+)([KM])", str(error))
    assert found, error
    unit = 1 << (10 if found[2] == "K" else 20)
    return int(found[1]) * unit, unit


class TestMemory:
    @quick
    @given(st.lists(st.tuples(lane_feeds, st.integers(0, 5000)), min_size=1, max_size=3), st.integers(1, 8), asks)
    def test_the_figure_that_a_refused_start_names_suffices(
        self, feeds: list[tuple[SimFeed, int]], workers: int, asks: dict[str, Any]
    ) -> None:
        served = [replace(feed, name=f"feed{number}", shuffle=shuffle) for number, (feed, shuffle) in enumerate(feeds)]
        (error,) = World(*served, workers=workers, memory=1000).refusals
        assert isinstance(error, MemoryBound)
        assert error.message.startswith("--memory 1000 bytes is too small: at least ")
        figure, unit = memory_asked_for(error)
        assert World(*served, memory=figure - unit).refusals
        world = World(*served, workers=workers, memory=figure)
        assert world.ready == [feed.name for feed in served]
        consumers = [world.open(feed.name, **asks) for feed in served]
        world.run()
        for feed, consumer in zip(served, consumers, strict=True):
            assert consumer.read[0] == list(feed.expected(0))

    def test_a_stream_that_finds_no_memory_is_refused_with_the_figures(self) -> None:
        world = World(SimFeed(), workers=1, memory=5 * PAGE)
        world.open(quota=1)
        with pytest.raises(
            MemoryBound,
            match=r"a stream needs 12.0 KiB, but 1 other stream holds 12.0 KiB of the 20.0 KiB that --memory allows",
        ):
            world.open(quota=1)
        world.open(quota=0)
        world.run()
        assert world.coordinator.budget.nbytes_reserved == 0

    def test_a_batch_that_outgrows_the_memory_fails_the_stream_with_the_figure(self) -> None:
        feed = SimFeed(batch_size=None, splits=(6,), lanes=1, growth=1000)
        world = World(feed, memory=100_000)
        consumer = world.open(credit=1, quota=1)
        world.run()
        assert isinstance(failure(consumer), MemoryBound)
        assert 0 < len(consumer.read[0]) < 6
        figure, _ = memory_asked_for(failure(consumer))
        assert figure > 100_000
        world = World(feed, memory=figure)
        consumer2 = world.open(credit=1, quota=1)
        world.run()
        assert len(consumer2.read[0]) > len(consumer.read[0])


faults = st.fixed_dictionaries(
    {
        "kills": st.integers(0, 4),
        "cuts": st.integers(0, 3),
        "restarts": st.integers(0, 2),
        "scales": st.integers(0, 4),
        "stands": st.integers(0, 6),
    }
)
faulty_cases = cases(st.one_of(any_feeds, lane_feeds.map(fast)))


def check_through_faults(case: Case, faults: dict[str, int]) -> None:
    """Check that, with any faults, three epochs come as without: each batch once, in order, to the end."""
    world = case.world(**faults)
    reads = [(0, None), (1, 3), (2, None)]
    consumer = world.open(reads=reads, **{**case.asks, "hoards": False})
    world.run()
    assert not consumer.failures
    for epoch, stop in reads:
        read = consumer.read[epoch]
        if case.feed.order == "fast":
            samples = Counter(sample for batch in read for sample in batch)
            assert samples <= Counter(case.feed.samples_of(epoch)), "a sample came twice"
            if stop is None:
                check_epoch(case.feed, epoch, read)
        elif stop is None:
            assert read == list(case.feed.expected(epoch))
        else:
            assert read == list(case.feed.expected(epoch))[: len(read)]


def check_several_streams(all_: list[Case], seed: int, kills: int, stands: int) -> None:
    """Check that streams that share workers and memory come as each alone, even if workers die or stand in steps of
    one of them."""
    feeds = [replace(case.feed, name=f"feed{number}", growth=0) for number, case in enumerate(all_)]
    memory = sum(replace(case, feed=feed).memory for case, feed in zip(all_, feeds, strict=True))
    world = World(*feeds, workers=all_[0].workers, memory=memory, seed=seed, kills=kills, stands=stands)
    consumers = [
        world.open(feed.name, reads=[(0, None), (1, None)], **case.asks) for feed, case in zip(feeds, all_, strict=True)
    ]
    world.run()
    for feed, consumer in zip(feeds, consumers, strict=True):
        assert [consumer.read[epoch] for epoch in (0, 1)] == [list(feed.expected(epoch)) for epoch in (0, 1)]


def check_ranks(case: Case, world_size: int, faults: dict[str, int]) -> None:
    """Check that, with any faults, rank r gets batches r, r + n, ... of each epoch, and all ranks get equally many."""
    world = replace(case, slots=case.slots + 8 * world_size).world(**faults)
    asks = {**case.asks, "hoards": False}
    ranks = [
        world.open(reads=[(0, None), (1, None)], rank=rank, world_size=world_size, stays=True, **asks)
        for rank in range(world_size)
    ]
    world.settle()
    for consumer in ranks:
        consumer.let_go()
    world.run()
    for epoch in (0, 1):
        batches = list(case.feed.expected(epoch))
        rounds = len(batches) // world_size
        for rank, consumer in enumerate(ranks):
            assert not consumer.failures
            assert consumer.read[epoch] == batches[rank::world_size][:rounds]


def check_group(
    case: Case, consumers: int, faults: dict[str, int], leaves: int | None, goes: tuple[str, int] | None
) -> None:
    """Check that, with any faults, each batch of an epoch goes to exactly one consumer of the group. One of them may
    close or die at any place."""
    members = consumers + (goes is not None)  # and after a cut each may be there twice for a while
    world = replace(case, slots=case.slots + 16 * members).world(**{**faults, "restarts": 0})
    asks = {**case.asks, "hoards": False}
    reads = [(0, None), (1, None)]
    group = [world.open(reads=reads, group="g", stays=True, **asks)]
    for _ in range(consumers - 1):
        for _ in range(world.random.randrange(20)):
            world.step()
        group.append(world.open(reads=[(0, leaves), (1, None)], group="g", stays=True, **asks))
    if goes is not None:
        group.append(world.open(reads=reads, group="g", stays=True, **asks, **{goes[0]: goes[1]}))
    world.settle()
    for consumer in group:
        consumer.let_go()
    world.run()
    for epoch in (0, 1):
        assert not any(consumer.failures for consumer in group)
        read = Counter(batch for consumer in group for batch in consumer.read.get(epoch, ()))
        assert read == Counter(case.feed.expected(epoch))


def check_kept_group(case: Case, consumers: int, faults: dict[str, int], leaves: int | None, dies: int | None) -> None:
    """Check a group with a state file, whose daemon may be killed at any instant. Each batch goes to one living
    consumer, except the batches that a dead one was handed."""
    if leaves is not None:
        faults = {**faults, "cuts": 0}
    world = replace(case, slots=case.slots + 16 * (consumers + 1)).world(state=True, **faults)
    asks = {**case.asks, "hoards": False}
    reads = [(0, None), (1, None)]
    group = [world.open(reads=reads, group="g", stays=True, **asks)]
    if dies is not None:
        group.append(world.open(reads=reads, group="g", dies_after=dies, **asks))
    for _ in range(consumers - 1):
        for _ in range(world.random.randrange(20)):
            world.step()
        with suppress(MemoryBound):  # the others may be away just now
            group.append(world.open(reads=[(0, leaves), (1, None)], group="g", stays=True, **asks))
    world.settle()
    living = [consumer for consumer in group if not consumer.gone]
    for consumer in living:
        consumer.let_go()
    world.run()
    for epoch in (0, 1):
        assert not any(consumer.failures for consumer in group)
        read = Counter(batch for consumer in living for batch in consumer.read[epoch])
        expected = Counter(case.feed.expected(epoch))
        assert read <= expected
        assert expected - read <= Counter(
            batch for consumer in group if consumer not in living for batch in consumer.read.get(epoch, ())
        )
        if dies is None:
            assert read == expected


def check_resumed(case: Case, wide: bool, seed: int) -> None:
    """Check that a stream continues from a position at any batch, several times, each time with other workers."""
    case = replace(case, feed=replace(case.feed, turn=case.feed.turn + 3 * (wide and case.feed.fixed)))
    dice = random.Random(seed)
    rest = [(epoch, batch) for epoch in range(3) for batch in case.feed.expected(epoch)]
    position = None
    for _ in range(4):
        world = replace(case, workers=dice.randint(1, 5), seed=dice.randrange(2**32)).world()
        epochs = range(position.epoch if position else 0, 3)
        consumer = world.open(reads=[(epoch, None) for epoch in epochs], position=position, **case.asks)
        world.run()
        assert not consumer.failures
        assert [(epoch, batch) for epoch in epochs for batch in consumer.read[epoch]] == rest
        consumed = dice.randint(0, len(rest) // 2)
        position = unpack(pack(consumer.track.position(consumed)))
        rest = rest[consumed:]


resumed = (cases(st.one_of(any_feeds, uneven_feeds)), st.booleans(), seeds)
shared_groups = (
    cases(st.one_of(lane_feeds, index_feeds, pooled_feeds)),
    st.integers(1, 4),
    faults,
    st.none() | st.integers(0, 4),
    st.none() | st.tuples(st.sampled_from(("closes_after", "dies_after")), st.integers(0, 9)),
)
kept_groups = (
    cases(st.one_of(any_feeds, uneven_feeds)),
    st.integers(1, 4),
    st.builds(
        lambda faults, restarts, fulls: {**faults, "restarts": restarts, "fulls": fulls},
        faults,
        st.integers(0, 4),
        st.integers(0, 3),
    ),
    st.none() | st.integers(0, 4),
    st.none() | st.integers(0, 9),
)


class TestFaults:
    @settings(quick, max_examples=30)
    @given(faulty_cases, faults)
    def test_the_stream_is_the_same_through_deaths_cuts_restarts_and_scaling(
        self, case: Case, faults: dict[str, int]
    ) -> None:
        check_through_faults(case, faults)

    @settings(quick, max_examples=23)
    @given(*shared_groups)
    def test_each_batch_goes_to_one_consumer_of_a_group(
        self,
        case: Case,
        consumers: int,
        faults: dict[str, int],
        leaves: int | None,
        goes: tuple[str, int] | None,
    ) -> None:
        if leaves is not None:  # an epoch ends when all connected consumers have left it, so nobody may be cut off
            faults = {**faults, "cuts": 0}
        check_group(case, consumers, faults, leaves, goes)

    @settings(quick, max_examples=20)
    @given(*kept_groups)
    def test_a_group_whose_daemon_keeps_a_state_file_loses_nothing_when_that_is_killed(
        self, case: Case, consumers: int, faults: dict[str, int], leaves: int | None, dies: int | None
    ) -> None:
        check_kept_group(case, consumers, faults, leaves, dies)

    @settings(quick, max_examples=23)
    @given(cases(any_feeds), st.integers(1, 4), faults)
    def test_all_ranks_together_see_the_very_stream_that_one_trainer_would(
        self, case: Case, world_size: int, faults: dict[str, int]
    ) -> None:
        check_ranks(case, world_size, faults)

    @settings(quick, max_examples=18)
    @given(cases(pooled_feeds), st.integers(2, 4), st.integers(2, 6))
    def test_ranks_that_are_cut_off_between_two_pools_see_that_stream_too(
        self, case: Case, world_size: int, cuts: int
    ) -> None:
        check_ranks(case, world_size, {"cuts": cuts})

    @settings(quick, max_examples=25)
    @given(*resumed)
    def test_a_stream_goes_on_from_any_batch_of_it_again_and_again_with_other_workers(
        self, case: Case, wide: bool, seed: int
    ) -> None:
        check_resumed(case, wide, seed)


class TestWithoutEnd:
    @quick
    @given(cases(endless_feeds), faults, st.integers(1, 40))
    def test_an_endless_stream_is_the_same_through_faults_for_as_long_as_it_is_read(
        self, case: Case, faults: dict[str, int], slabs: int
    ) -> None:
        world = case.world(**faults)
        consumer = world.open(reads=[(0, slabs), (1, 3)], **{**case.asks, "hoards": False})
        world.run()
        assert not consumer.failures
        for epoch, least in ((0, slabs), (1, 3)):
            read = consumer.read[epoch]
            assert len(read) >= least
            assert read == list(islice(case.feed.expected(epoch), len(read)))
            assert all(len(batch) == case.feed.batch_size for batch in read)

    @quick
    @given(
        cases(endless_feeds), st.integers(1, 3), st.sampled_from(("", "g", "ranks")), st.integers(0, 300), st.booleans()
    )
    def test_a_daemon_that_stops_delivers_what_it_has_sent_of_an_endless_stream_and_no_more(
        self, case: Case, consumers: int, share: str, steps: int, dies: bool
    ) -> None:
        world = replace(case, slots=case.slots + 16 * consumers).world(kills=1)
        readers = []
        for rank in range(consumers if share else 1):
            who = {"": {}, "g": {"group": "g"}, "ranks": {"rank": rank, "world_size": consumers}}[share]
            habits = {"dies_after": 3} if dies and rank and share == "g" else {}
            readers.append(world.open(reads=[(0, None)], **{**case.asks, "hoards": False}, **who, **habits))
        for _ in range(steps):
            world.step()
        stream = readers[0].stream
        dealt = stream.epochs[0].batches if stream.epochs else 0  # ranks may not have begun
        world.handle(on.Stop(DaemonStopped("stops")))
        for _ in range(2000):
            if stream.error is not None or not world.step():
                break
        assert stream.error is not None, "the stream must go on"
        assert all(consumer.reader.handed == consumer.reader.sent for consumer in readers if not consumer.reader.gone)
        world.run()
        read = [consumer.read.get(0, []) for consumer in readers]
        assert sum(map(len, read)) == dealt
        batches = list(islice(case.feed.expected(0), dealt))
        if share == "g":
            assert Counter(batch for one in read for batch in one) == Counter(batches)
        elif share == "ranks":
            assert read == [batches[rank::consumers] for rank in range(consumers)]
            assert len({len(one) for one in read}) == 1
        else:
            assert read == [batches]
        for consumer in readers:
            assert [type(error) for error in consumer.failures] in ([DaemonStopped], [] if dies else [DaemonStopped])


@pytest.mark.soak
@soak
@given(faulty_cases, faults)
def test_the_stream_is_the_same_through_faults_in_thousands_of_worlds(case: Case, faults: dict[str, int]) -> None:
    check_through_faults(case, faults)


@pytest.mark.soak
@soak
@given(*several_streams)
def test_streams_do_not_disturb_one_another_in_thousands_of_worlds(
    all_: list[Case], seed: int, kills: int, stands: int
) -> None:
    check_several_streams(all_, seed, kills, stands)


@pytest.mark.soak
@soak
@given(cases(any_feeds))
def test_the_stream_is_a_function_of_the_feed_alone_in_thousands_of_worlds(case: Case) -> None:
    check_exact_order(case)


@pytest.mark.soak
@soak
@given(*kept_groups)
def test_a_kept_group_loses_nothing_in_thousands_of_worlds(
    case: Case, consumers: int, faults: dict[str, int], leaves: int | None, dies: int | None
) -> None:
    check_kept_group(case, consumers, faults, leaves, dies)


@pytest.mark.soak
@soak
@given(*shared_groups)
def test_a_group_loses_nothing_in_thousands_of_worlds(
    case: Case, consumers: int, faults: dict[str, int], leaves: int | None, goes: tuple[str, int] | None
) -> None:
    check_group(case, consumers, faults if leaves is None else {**faults, "cuts": 0}, leaves, goes)


@pytest.mark.soak
@soak
@given(cases(any_feeds), st.integers(1, 4), faults)
def test_all_ranks_together_see_one_stream_in_thousands_of_worlds(
    case: Case, world_size: int, faults: dict[str, int]
) -> None:
    check_ranks(case, world_size, faults)


@pytest.mark.soak
@soak
@given(*resumed)
def test_a_stream_goes_on_from_any_batch_in_thousands_of_worlds(case: Case, wide: bool, seed: int) -> None:
    check_resumed(case, wide, seed)
