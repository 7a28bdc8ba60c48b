"""Schedules that random worlds hardly ever produce. Bugs planted on purpose showed only in these."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product

import pytest

from penstock_proto import DaemonStopped, GeneratorError, StreamClosed, WorkerDied
from penstock_proto import messages as m
from penstock_server.coordinator import Coordinator
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.failures import LAST_PAUSE
from penstock_server.coordinator.model.known_lists import SplitsInfo
from penstock_server.coordinator.model.open_request import OpenRequest
from penstock_server.coordinator.stream.stream import Stream
from tests.coordinator.test_coordinator import Case, check_kept_group
from tests.simulation.simulation import PATIENCE, SimFeed, World


def test_what_a_consumer_of_a_group_gave_back_by_leaving_is_dealt_once_though_it_is_lost_then() -> None:
    world = World(SimFeed(splits=(40,), lanes=1, batch_size=4))
    one = world.open(reads=[(0, None)], group="g", stays=True, credit=4)
    two = world.open(reads=[], group="g", stays=True, credit=4)
    two.gone = True  # the world ignores it: this test sends its messages
    world.handle(on.Begin(two.reader.number, 0))
    while two.reader.sent < 2:
        assert world.step()
    world.handle(on.Leave(two.reader.number, 0, 0))
    world.handle(on.Lost(two.reader.number, 0))
    world.carry_out()
    world.settle()
    one.let_go()
    world.run()
    assert Counter(one.read[0]) == Counter(world.feeds["train"].expected(0))


def test_a_member_of_a_group_gets_the_next_epoch_as_soon_as_the_others_have_read_this_one() -> None:
    world = World(SimFeed(splits=(4,), lanes=1, batch_size=4))
    one, two = (world.open(reads=[], group="g", stays=True, credit=4) for _ in range(2))
    one.gone = two.gone = True  # the world ignores them: this test sends their messages
    world.handle(on.Begin(one.reader.number, 0))
    world.handle(on.Begin(two.reader.number, 0))
    world.handle(on.Leave(two.reader.number, 0, 0))
    world.handle(on.Begin(two.reader.number, 1))
    world.carry_out()
    world.settle()
    assert (one.reader.sent, two.reader.sent) == (1, 0)
    world.handle(on.Acknowledge(one.reader.number, 1, (), 0))
    assert [command.consumer for command in world.take() if isinstance(command, do.SendSlab)] == [two.reader.number]


def test_a_member_of_a_group_that_is_late_for_the_last_epoch_hears_that_it_has_ended() -> None:
    world = World(SimFeed(splits=(4,), lanes=1, batch_size=4, epochs=1))
    one = world.open(reads=[(0, None)], group="g", stays=True, credit=4)
    two = world.open(reads=[], group="g", stays=True, credit=4)
    world.settle()
    assert one.read[0] == list(world.feeds["train"].expected(0))
    assert 0 in one.ended
    two.gone = True  # the world ignores it: this test sends its messages
    world.handle(on.Begin(two.reader.number, 0))
    assert do.Tell(two.reader.number, m.End(0, 0, 0, 0)) in world.take()


def test_a_daemon_that_stops_waits_until_all_was_handed_over() -> None:
    world = World(SimFeed())
    consumer = world.open(stays=True)
    while not consumer.reader.sent:
        assert world.step()
    world.handle(on.Stop(DaemonStopped("stops")))
    while not world.coordinator.stopped and world.step():
        pass
    assert world.coordinator.stopped
    assert consumer.read[0] == list(world.feeds["train"].expected(0))
    assert consumer.reader.handed == consumer.reader.sent
    assert 0 in consumer.ended


@pytest.mark.parametrize("share", ["group", "ranks"])
def test_a_daemon_that_stops_reads_the_epoch_to_its_end_that_one_of_several_consumers_has_begun(share: str) -> None:
    begun = 0
    for seed in range(60):
        world = World(SimFeed(splits=(5, 9, 9, 9)), seed=seed)
        who = [{"group": "g"} if share == "group" else {"rank": rank, "world_size": 2} for rank in range(2)]
        ahead = world.open(reads=[(0, 1), (1, None), (2, None)], **who[0])
        other = world.open(reads=[(0, None), (1, None), (2, None)], **who[1])
        for _ in range(world.random.randrange(200)):
            world.step()
        if ahead.reader.epoch == 1 and ahead.reader.reading and other.reader.epoch == 0:
            begun += 1
        world.handle(on.Stop(DaemonStopped("stops")))
        world.run()
        for consumer in (ahead, other):
            assert [type(error) for error in consumer.failures] in ([], [DaemonStopped])
            read = {epoch for epoch, batches in consumer.read.items() if batches}
            assert read - consumer.ended.keys() <= {0}, seed  # the epoch that was begun was read to its end
    assert begun > 3


@pytest.mark.parametrize("first", ["fails", "is lost"])
def test_a_groups_stream_that_failed_ends_with_its_last_consumer_also_if_that_is_lost(first: str) -> None:
    world = World(SimFeed())
    consumer = world.open(group="g", stays=True)
    while not consumer.reader.sent:
        assert world.step()
    (stream,) = world.coordinator.streams.values()
    if first == "is lost":
        consumer.vanish()
        world.settle()
        world.handle(on.Stop(DaemonStopped("stops")))
    else:
        world.handle(on.StreamFailed(stream.number, WorkerDied("for good")))
        world.settle()
        assert world.coordinator.streams
        consumer.vanish()
    world.run()


def test_of_an_endless_stream_a_daemon_that_stops_deals_again_what_a_lost_consumer_had_not_handed_over() -> None:
    for seed in range(20):
        world = World(SimFeed(endless=True), seed=seed)
        group = [world.open(reads=[(0, None)], group="g", credit=credit) for credit in (1, 4)]
        for _ in range(200):
            world.step()
            if group[0].under_way[0] and group[1].under_way[0] > 1:
                break
        group[1].vanish()
        dealt = group[0].stream.epochs[0].batches
        world.handle(on.Stop(DaemonStopped("stops")))
        world.run()
        batches = islice(world.feeds["train"].expected(0), dealt)
        assert Counter(batch for one in group for batch in one.read.get(0, [])) == Counter(batches)


def test_a_group_waits_for_a_consumer_that_was_cut_off_though_all_others_have_closed() -> None:
    world = World(SimFeed())
    asks = [OpenRequest(2, 1 << 40, 2, group="g", identity=name) for name in (b"one", b"other")]
    one, other = (world.ask("train", ask) for ask in asks)
    world.handle(on.Lost(one.number, 0))
    world.handle(on.Close(other.number, 0))
    back = world.ask("train", replace(asks[0], again=True))
    assert back.stream == one.stream
    world.handle(on.Lost(back.number, 0))
    world.wait(1.0)
    world.wait(2 * PATIENCE)
    with pytest.raises(StreamClosed, match="nobody read it for a while"):
        world.ask("train", replace(asks[0], again=True))
    world.ask("train", asks[1])  # another run begins the group again
    with pytest.raises(StreamClosed, match="have to start again from the beginning"):
        world.ask("train", replace(asks[0], again=True))


def test_a_second_split_that_is_left_out_does_not_bring_the_first_back() -> None:
    world = World(SimFeed(splits=(40,), lanes=1, on_error="skip", attempts=1))
    stream = world.open().stream
    lane = stream.epochs[0].lane(0)
    for split in (0, 1):
        while lane.run is None:
            assert world.step()
        worker, run = lane.run
        world.handle(on.WorkerDied(worker, "was killed", (run, split, f"split {split}")))
    assert lane.skip == (0, 1)


def test_a_split_that_ends_its_worker_while_its_lane_moves_counts_too() -> None:
    world = World(SimFeed(splits=(40,), lanes=1, on_error="skip", attempts=1))
    stream = world.open().stream
    epoch = stream.epochs[0]
    lane = epoch.lane(0)
    while lane.run is None or not lane.busy:
        assert world.step()
    worker, run = lane.run
    stream.production._move(epoch, lane)
    assert lane.dropped == (worker, run)
    world.handle(on.WorkerDied(worker, "was killed", (run, 0, "split 0")))
    assert lane.skip == (0,)


def test_a_worker_dies_whose_dropped_run_has_ended_a_lane_that_another_run_reads_for_its_leftover_rows() -> None:
    met = 0
    for seed in range(20):
        feed = SimFeed(splits=(3, 3), lanes=2, batch_size=4, turn=1, epochs=1)
        world = World(feed, seed=seed)
        consumer = world.open(reads=[(0, None)])
        production, epoch = consumer.stream.production, consumer.stream.epochs[0]
        lane = epoch.lane(0)
        while not (len(lane.turns) > 1 and lane.busy) and world.step():
            pass
        if lane.run is not None and not lane.ended:
            worker, run = lane.run
            world.coordinator.workers.on_stands(worker)
            epoch.moved = True
            lane.drop(production._drop(epoch, lane))
            while not (lane.ended and lane.run is not None) and world.step():
                pass
            if lane.dropped is not None:
                met += 1
                lane.failures = 1  # so the next attempt has to wait
                world.workers[worker].end((run, 0, "split 0"))
        world.run()
        assert consumer.read[0] == list(feed.expected(0))
    assert met


@pytest.mark.parametrize("workers", [2, 3])
def test_a_lane_that_ends_workers_again_and_again_is_made_beside_all_others(workers: int) -> None:
    feeds = [SimFeed(name=name, splits=(80,) * 6, lanes=6, epochs=1) for name in ("train", "other")]
    world = World(*feeds, workers=workers)
    consumers = [world.open(feed.name, reads=[(0, None)]) for feed in feeds]
    epoch, other = (consumer.stream.epochs[0] for consumer in consumers)
    lane = epoch.lane(0)

    def step_until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert world.step()

    step_until(lambda: lane.run is not None and len(other.lanes) == 6)
    aparts = set()
    for times in (1, 2):
        assert lane.run is not None
        worker, run = lane.run
        world.workers[worker].end((run, 0, "split 0"))
        step_until(lambda: lane.deaths[0] == times)  # noqa: B023
        world._started(world.workers[worker])
        world.wait(0.3)
        assert lane.run is not None
        apart = world.coordinator.workers.apart
        assert lane.run[0] == apart
        aparts.add(apart)
        for one in (*epoch.lanes.values(), *other.lanes.values()):
            assert one is lane or one.run is None or one.run[0] != apart
    assert len(aparts) == 1, "after the first death, no other worker has to hand over its lanes"
    world.run()
    for feed, consumer in zip(feeds, consumers, strict=True):
        assert consumer.read[0] == list(feed.expected(0))
    world.wait(61.0)
    assert world.coordinator.workers.apart is None


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_lane_that_ends_workers_does_not_go_to_a_worker_that_is_to_leave(workers: int) -> None:
    feeds = [SimFeed(name=name, splits=(80,) * 6, lanes=6, epochs=1) for name in ("train", "other")]
    world = World(*feeds, workers=workers)
    consumers = [world.open(feed.name, reads=[(0, None)]) for feed in feeds]
    lane = consumers[0].stream.epochs[0].lane(0)
    while lane.run is None:
        assert world.step()
    worker, run = lane.run
    world.workers[worker].end((run, 0, "split 0"))
    while not lane.deaths:
        assert world.step()
    world._started(world.workers[worker])
    there = world.coordinator.workers
    leaves = there.apart
    assert leaves is not None
    world.handle(on.RetireWorkers((leaves,)))
    assert there.apart is None if workers == 2 else there.apart not in (None, leaves)
    world.run()  # which holds that no run begins at a worker that is to leave
    for feed, consumer in zip(feeds, consumers, strict=True):
        assert consumer.read[0] == list(feed.expected(0))


def test_no_worker_is_set_apart_from_the_only_stream() -> None:
    feed = SimFeed(splits=(80,) * 6, lanes=6, epochs=1)
    world = World(feed, workers=3)
    consumer = world.open(reads=[(0, None)])
    epoch = consumer.stream.epochs[0]
    lane = epoch.lane(0)
    while lane.run is None:
        assert world.step()
    worker, run = lane.run
    world.workers[worker].end((run, 0, "split 0"))
    while not lane.deaths:
        assert world.step()
    assert world.coordinator.workers.apart is None
    world._started(world.workers[worker])
    while lane.run is None or not epoch.loads_of(world.coordinator.workers.available, 3).even:
        assert world.step()
    assert {epoch.loads[number] for number in range(3)} == {2}, "all workers make their share again"
    world.run()
    assert consumer.read[0] == list(feed.expected(0))


@pytest.mark.parametrize(
    "other",
    [
        SimFeed(name="other", splits=(30,) * 6, lanes=6, epochs=2),
        SimFeed(name="other", splits=(30, 7, 22, 31), lanes=4, epochs=2, shuffle=7),
        SimFeed(name="other", splits=(31,) * 6, lanes=6, epochs=2, order="fast", turn=2),
        SimFeed(name="other", length=90, turn=2, epochs=2),
        SimFeed(name="other", splits=(9, 13), lanes=2, batch_size=None, growth=300, epochs=2),
        SimFeed(name="other", splits=(30,) * 6, lanes=3, dynamic=True, epochs=2),
    ],
    ids=["lanes", "pools", "fast", "ranges", "varies", "dynamic"],
)
@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_worker_that_stands_in_one_stream_holds_up_no_other(other: SimFeed, comes_back: bool, seed: int) -> None:
    feed = SimFeed(splits=(80,) * 6, lanes=6, epochs=1)
    world = World(feed, other, workers=3, seed=seed)
    consumer, beside = world.open("train"), world.open("other", reads=[(0, None), (1, None)])
    lane, worker = consumer.stream.epochs[0].lane(0), world.workers[0]
    stands = 0
    while not (stands and (fill := worker.next_fill()) and fill.run == stands):
        assert world.step()
        stands = lane.run[1] if lane.run is not None and lane.run[0] == 0 else 0
    worker.hung, worker.stands = True, stands
    worker.revoked.update(worker.to_drop)
    world.settle()
    before = len(beside.read.get(0, ())) + len(beside.read.get(1, ()))
    for _ in range(40):
        world.handle(on.WorkerStands(0, stands, 1.0))
        world.carry_out()
        world.settle()
    assert not beside.failures
    assert beside.gone
    if other.order == "exact":
        assert [beside.read[epoch] for epoch in (0, 1)] == [list(other.expected(epoch)) for epoch in (0, 1)]
    read = sum(map(len, beside.read.values()))
    assert read > before, "it had everything when the worker began to stand"
    assert not consumer.gone
    worker.hung = False
    if comes_back:
        worker.go_on()
        world.handle(on.WorkerGoesOn(0))
    else:
        worker.die()
    world.run()
    assert consumer.read[0] == list(feed.expected(0))


def test_when_all_workers_stand_now_and_then_lanes_are_spread_as_if_none_did() -> None:
    feeds = [SimFeed(name=name, splits=(400,) * 6, lanes=6, epochs=1) for name in ("train", "other")]
    world = World(*feeds, workers=2)
    consumers = [world.open(feed.name) for feed in feeds]
    epoch, number = consumers[1].stream.epochs[0], consumers[0].stream.number
    while not (len(epoch.lanes) == 6 and all(lane.index for lane in epoch.lanes.values())):
        assert world.step()
    worker = world.workers[0]
    worker.hung, worker.stands = True, number * m.IDS_PER_STREAM
    worker.revoked.update(worker.to_drop)
    while epoch.runs[0]:
        world.handle(on.WorkerStands(0, worker.stands, 10.0))
        world.carry_out()
        assert world.step()
    worker.hung, worker.stands = False, 0
    worker.go_on()
    for _ in range(100):
        assert world.step()
        assert not epoch.runs[0]
    world.handle(on.WorkerStands(1, number * m.IDS_PER_STREAM, 10.0))
    while epoch.runs[0] < 3:
        assert world.step()
    world.run()
    for feed, one in zip(feeds, consumers, strict=True):
        assert one.read[0] == list(feed.expected(0))


@pytest.mark.parametrize("dies", [True, False])
def test_work_of_a_worker_that_stands_stays_there_if_no_other_is_free_or_reading_again_takes_longer(dies: bool) -> None:
    feeds = [SimFeed(name=name, splits=(80,) * 6, lanes=6, epochs=1) for name in ("train", "other")]
    world = World(*feeds, workers=2)
    consumers = [world.open(feed.name) for feed in feeds]
    epoch = consumers[1].stream.epochs[0]
    while not (len(epoch.lanes) == 6 and all(lane.index for lane in epoch.lanes.values())):
        assert world.step()
    for lane in epoch.lanes.values():
        lane.replay = 3.0
    runs = [lane.run for lane in epoch.lanes.values()]
    stream = consumers[0].stream.number
    world.handle(on.WorkerStands(0, stream * m.IDS_PER_STREAM, 2.9))
    assert [lane.run for lane in epoch.lanes.values()] == runs
    if dies:
        world.workers[1].end(None)
        world.bury(world.workers[1])
    else:
        world.handle(on.WorkerStands(1, stream * m.IDS_PER_STREAM, 2.9))
    runs = [lane.run for lane in epoch.lanes.values()]
    world.handle(on.WorkerStands(0, stream * m.IDS_PER_STREAM, 1000.0))
    assert [lane.run for lane in epoch.lanes.values()] == runs
    world.run()
    for feed, one in zip(feeds, consumers, strict=True):
        assert one.read[0] == list(feed.expected(0))


@pytest.mark.parametrize(
    ("on_error", "pauses"), [("raise", [0.2] * 4), ("skip", [0.2] * 4), ("retry", [0.2, 0.4, 0.8, 1.6])]
)
@pytest.mark.parametrize("split", [0, -1], ids=["in user code", "outside"])
def test_a_lane_waits_for_seconds_only_where_it_is_tried_without_end_and_gets_no_further(
    on_error: str, pauses: list[float], split: int
) -> None:
    world = World(SimFeed(splits=(80,), lanes=1, on_error=on_error, attempts=9), workers=1)
    lane = world.open().stream.epochs[0].lane(0)

    def deaths(count: int) -> list[float]:
        """Return how long the lane waits after each of `count` deaths in a row."""
        found = []
        for _ in range(count):
            assert lane.run is not None
            worker, run = lane.run
            world.handle(on.WorkerDied(worker, "was killed", (run, split, "split 0")))
            timers = world.coordinator.timers
            found += [round(due - timers.now, 3) for due in timers.times]
            world.handle(world.imports(worker))
            world.wait(LAST_PAUSE)
        return found

    while lane.run is None:
        assert world.step()
    assert deaths(5) == pauses
    assert lane.run is not None
    _, run = lane.run
    ticket, record = lane.turns[0].slot.ticket, (1).to_bytes(8)
    world.handle(m.Made(run, ticket, first=0, batches=1, rows=4, last=True, record=record))
    assert deaths(2) == pauses[:1], "deaths count only from the batch that the lane has reached"
    assert (lane.error is None) == (on_error == "retry" or split == -1 or lane.deaths[0] < 9)


def test_what_a_lane_of_an_indexable_feed_fails_with_is_raised_also_where_its_worker_has_turns_of_another() -> None:
    """The turns of a worker that has to leave go to a worker that had none so far."""
    world = World(SimFeed(length=2, batch_size=1), workers=2, memory=3 * 4096)
    consumer = world.open(credit=1)
    world.handle(on.RetireWorkers((1,)))
    epoch = consumer.stream.epochs[0]
    while not any(lane.run is not None for lane in epoch.lanes.values()):
        assert world.step()
    ((_, run),) = [lane.run for lane in epoch.lanes.values() if lane.run is not None]
    world.handle(on.RetireWorkers((0,)))
    world.handle(on.WorkerAdded(2))
    world.handle(world.imports(2))
    world.handle(on.RunFailed(run, GeneratorError("fails")))
    assert [turn.error is not None for turn in epoch.order.window if turn.error] == [True]


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.soak)], ids=str)
def test_turns_that_wait_for_larger_slots_keep_their_order_through_deaths(seeds: range) -> None:
    for seed in seeds:
        dice = random.Random(seed)
        splits = tuple(dice.randint(3, 8) for _ in range(dice.randint(1, 3)))
        growth = dice.choice((100, 300, 600))
        feed = SimFeed(splits=splits, lanes=dice.randint(1, 2), batch_size=None, growth=growth)
        world = World(feed, workers=dice.randint(1, 3), memory=1 << 22, seed=seed, kills=4)
        consumer = world.open(reads=[(0, None), (1, None)], credit=dice.randint(1, 4))
        world.run()
        assert not consumer.failures
        assert [consumer.read[epoch] for epoch in (0, 1)] == [list(feed.expected(epoch)) for epoch in (0, 1)], seed


@pytest.mark.parametrize("seeds", [range(90), pytest.param(range(90, 4000), marks=pytest.mark.soak)], ids=str)
def test_lanes_that_end_while_they_move_are_made_to_the_end_through_deaths(seeds: range) -> None:
    for seed in seeds:
        dice = random.Random(seed)
        feed = SimFeed(splits=tuple(dice.choice((1, 2, 3, 6)) for _ in range(6)), lanes=6, batch_size=5)
        world = World(
            feed, workers=dice.randint(2, 4), memory=40 * 4096, seed=seed, kills=4, scales=dice.choice((0, 2))
        )
        reads = [*((epoch, dice.choice((None, 0, 1, 2, 3))) for epoch in range(3)), (3, None)]
        consumer = world.open(reads=reads, credit=dice.randint(1, 4))
        world.run()
        assert not consumer.failures
        assert consumer.read[3] == list(feed.expected(3)), seed


def test_parts_of_a_turn_that_wait_are_sent_as_one_slab() -> None:
    for seed in range(10):
        world = World(SimFeed(splits=(42,), lanes=1, batch_size=4, turn=6), seed=seed)
        consumer = world.open(stays=True)
        world.settle()  # the next epoch is made, but nobody reads it
        first, second = list(consumer.stream.epochs[0].order.window)[:2]
        assert [(part.first, part.batches, part.rows) for part in first.parts] == [(0, 6, 24)]
        assert [(part.first, part.batches, part.rows) for part in second.parts] == [(0, 4, 16)]
        assert first.parts[-1].record != second.parts[-1].record
        assert consumer.read[0] == list(world.feeds["train"].expected(0))


def test_leftovers_are_written_once_though_the_worker_that_had_their_lane_before_dies() -> None:
    """Rows must not be written twice. By the second time, the batch may be handed over, and the slot used for something
    else."""
    met = 0
    for seed in range(100):
        world = World(SimFeed(splits=(1, 2) * 3, lanes=6, batch_size=5), workers=2, seed=seed, kills=2)
        stream = world.open(reads=[(0, None), (1, None), (2, None)]).stream
        for run, before in _runs_that_write_while_their_lane_moves(world, stream):
            world.carry_out()
            world.handle(on.WorkerDied(before, "was killed"))
            again = [command for command in world.take() if isinstance(command, do.WriteRows)]
            assert again
            assert run not in [command.run for command in again], seed
            met += 1
            break
    assert met


def _runs_that_write_while_their_lane_moves(world: World, stream: Stream) -> Iterator[tuple[int, int]]:
    """Yield each run that writes rows of a merged batch while the worker that its lane moves away from still writes
    rows of the same batch; and that worker. The world goes on in between."""
    while world.step():
        for epoch in stream.epochs:
            for turn, lane in product(list(stream.production.turns.merged(epoch)), list(epoch.lanes.values())):
                if lane.dropped is not None and lane.run in turn.fillers:
                    (worker, run), before = lane.run, lane.dropped[0]
                    if worker != before and before in (writer for writer, _ in turn.fillers):
                        yield run, before


def test_a_worker_that_lists_splits_may_be_told_to_leave() -> None:
    coordinator = Coordinator(workers=2, memory=1 << 30)
    feed = SimFeed()
    commands = coordinator.handle(on.Imported(1, (feed.plan(),)), 0.0)
    assert commands[0] == do.ListSplits(1, 0, "train", 0)
    assert coordinator.handle(on.RetireWorkers((1,)), 0.0) == []  # its answer is awaited
    assert coordinator.handle(on.WorkerDied(1, "was killed"), 0.0) == [do.ListSplits(0, 0, "train", 0), do.Retire(1)]
    found = coordinator.handle(on.SplitsListed(0, SplitsInfo(1, 4, bytes(32)), feed.spec(), 8), 0.0)
    assert do.FeedReady("train", 4) in found


def test_a_merged_batch_that_stands_next_gets_a_slot_though_slots_have_become_larger_and_fewer() -> None:
    feed = SimFeed(splits=(7, 13, 2), lanes=3, batch_size=3, growth=17)
    case = Case(feed, 2, 3, 0, {"credit": 1, "credit_bytes": 0, "quota": 0, "hoards": False})
    none = dict.fromkeys(("kills", "cuts", "restarts", "scales", "fulls"), 0)
    check_kept_group(case, 2, none, None, None)
