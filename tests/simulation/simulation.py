"""The coordinator in a simulated world: a host with its arena, workers and consumers, and a schedule drawn from a seed.

There are only a few kinds of steps: the next message on a link arrives, a ticket gets its slot, a worker makes part of
a turn, or a consumer takes one of the actions that it has now. Faults are steps too: a worker dies, is added or is
removed, or stands in one step for a while; a host joins, leaves or is lost (simulated_hosts.py); a connection is cut,
and everything under way is lost; the daemon is restarted. `World.step` takes one step, chosen at random, and
`World.check` then checks the coordinator's promises. The same arguments and the same seed give the same history.

No process, socket, clock or byte of memory is real. Samples are (epoch, split, number); a slot holds batches of them.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace as replace_struct

from penstock._state.epoch_bounds import EpochBounds
from penstock._state.progress import EpochCheck, Progress
from penstock_proto import (
    ConnectionLost,
    DaemonStopped,
    GeneratorError,
    Leaf,
    MemoryBound,
    PenstockError,
    ProtocolError,
)
from penstock_proto import messages as m
from penstock_proto.batches.layout import TAIL_LANE, SlotLayout, fixed_layout, lay_out
from penstock_proto.batches.position import Position, pack, unpack
from penstock_proto.messages import IDS_PER_STREAM, FeedInfo, FeedPlan
from penstock_proto.spec import Spec
from penstock_server.coordinator import Coordinator
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model import feeds
from penstock_server.coordinator.model.consumer import Consumer as Reader
from penstock_server.coordinator.model.feeds import ServedFeed, Skipped
from penstock_server.coordinator.model.known_lists import SplitsInfo
from penstock_server.coordinator.model.open_request import OpenRequest
from penstock_server.coordinator.model.workers import REMOTE, VACANT
from penstock_server.feed.options import plan_sizes
from penstock_server.feed.options.plan_sizes import ENDLESS
from penstock_server.shuffling.pool_order import source_rows
from penstock_server.state_file.statefile import StateFile
from tests.reference.reference import batches_of_index, batches_of_lanes, batches_of_pools
from tests.simulation.simulated_attacker import Attacker
from tests.simulation.simulated_hosts import Host, Hosts, machine_of

Sample: TypeAlias = tuple[int, int, int]
"""(epoch, split, number within the split)."""
Batch: TypeAlias = tuple[Sample, ...]
Event: TypeAlias = Callable[[], object]
Meet: TypeAlias = Callable[[Sample, int], bool]
"""Called with each sample that is read, and the position of its split. Return False to end the split before it."""


PATIENCE = 1e9
"""Seconds that a group waits for lost consumers. They come back sooner, even if the clock of a world runs fast."""

MOST_STEPS = 10_000
"""The most steps of a world for each consumer. Worlds of these sizes need far fewer."""


class Broken(AssertionError):
    """The coordinator broke a promise."""


class Deadly(Exception):
    """A sample that kills the worker was read."""


class Stuck(Broken):
    """No step is possible, but a consumer still waits."""


def hold(promise: object, broken: str) -> None:
    """Raise Broken unless the promise holds."""
    if not promise:
        raise Broken(broken)


SIMULATED = ("simulated",)
"""Tells the plans of simulated feeds from those of real ones, which tests of the same process may serve."""


def _small_slots(plan: FeedPlan, spec: Spec, batch_size: int) -> SlotLayout:
    """Return the layout of the slots of a feed. A stripe of a simulated feed has `plan.block` batches, as a real one
    would have too many. (The option has no meaning for lanes otherwise.)"""
    if plan.block is not None and plan.warnings == SIMULATED:
        return fixed_layout(spec, batch_size, plan.block)
    return plan_sizes.fixed_slots(plan, spec, batch_size)


feeds.fixed_slots = _small_slots


@dataclass(frozen=True, kw_only=True)
class SimFeed:
    """A feed of the simulation; options as in `FeedPlan`.

    `splits` are the numbers of samples in each split. Split i goes to lane i mod lanes, shifted by the epoch. A
    `dynamic` feed lists its splits in each epoch, and fails to do so in `unlisted` epochs. Reading a sample in `poison`
    raises. If `batch_size` is None, each sample is a ready batch, and number k of a split has 1 + k * `growth` rows.
    Otherwise `growth` makes samples ragged, of these lengths. An `endless` feed has segments with the lengths in
    `splits`, again and again. A sample in `transient` raises at those of its readings in a world whose numbers, from 0,
    are given with it. A sample in `deadly` kills the worker that reads it, outside of user code. If the feed can have
    stripes, a stripe has `room` batches. If it is indexable, and a turn has one batch, ranges have `room` at most. One
    that `transforms` batches needs 4096 bytes more for the result of a merged batch, if its samples vary in size.
    """

    name: str = "train"
    splits: tuple[int, ...] = (9, 9, 9, 9)
    lanes: int = 4
    batch_size: int | None = 4
    turn: int = 1
    order: str = "exact"
    epochs: int | None = None
    samples: int | None = None
    length: int | None = None
    drop_remainder: bool = False
    shuffle: int = 0
    dynamic: bool = False
    unlisted: frozenset[int] = frozenset()
    poison: frozenset[Sample] = frozenset()
    transient: tuple[tuple[Sample, frozenset[int]], ...] = ()
    deadly: frozenset[Sample] = frozenset()
    growth: int = 0
    on_error: str = "raise"
    attempts: int = 1000
    endless: bool = False
    room: int = 1
    transforms: bool = False

    def plan(self) -> FeedPlan:
        return FeedPlan(
            name=self.name,
            spec=None,
            batch_size=self.batch_size,
            turn=None if self.striped or self.ranges_vary else self.turn,
            block=self.room if self.striped or self.ranges_vary else None,
            lanes=self.lanes,
            order="exact" if self.length is not None else self.order,
            shuffle=self.shuffle,
            interleave=1,
            seed=0,
            epochs=self.epochs,
            samples=self.samples,
            length=self.length,
            drop_remainder=self.drop_remainder or self.endless,
            segment=max(self.splits) if self.endless else None,
            static_splits=not self.dynamic,
            on_error=self.on_error,
            attempts=self.attempts,
            warnings=SIMULATED,
        )

    def served(self) -> ServedFeed:
        """Return the feed as a coordinator knows it."""
        splits = SplitsInfo(0, len(self.splits), bytes(32)) if self.length is None and not self.dynamic else None
        return ServedFeed(self.plan(), self.spec(), 8, splits, self.sample_spec())

    def info(self) -> FeedInfo:
        """Return the FeedInfo of a daemon's Welcome."""
        return self.served().info

    @cached_property
    def pool(self) -> int:
        """The number of lanes that mix their rows with each other."""
        return self.info().pool

    def sample_spec(self) -> Leaf | None:
        return self.spec() if self.transforms else None

    def spec(self) -> Leaf:
        if self.fixed:
            return Leaf("int64", ())
        return Leaf("int64", (None,), ragged=self.batch_size is not None)

    @property
    def fixed(self) -> bool:
        """Whether all batches have the same size."""
        return self.batch_size is not None and not self.growth

    @property
    def striped(self) -> bool:
        """Whether slots hold batches of several lanes."""
        lanes = self.length is None and self.order == "exact" and not self.shuffle
        return self.room > self.turn == 1 and lanes and self.fixed

    @property
    def ranges_vary(self) -> bool:
        """Whether it is indexable, and the lengths of its ranges follow the time that they take: `room` at most."""
        return self.room > self.turn == 1 and self.length is not None and self.fixed

    def sizes(self, rows: Batch) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of ragged rows."""
        return ((sum(1 + row[2] * self.growth for row in rows),),)

    def shapes(self, batch: Batch) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a batch in messages. They have none for a fixed feed."""
        if self.fixed:
            return ()
        return self.sizes(batch) if self.batch_size is None else (*self.sizes(batch), (len(batch) + 1,))

    def nbytes(self, batch: Batch, batches: int = 1) -> int:
        """Return the bytes of a slab of `batches` batches, the first of which is `batch`."""
        shapes = self.shapes(batch) or ((self.batch_size,),)
        return lay_out(["int64"] * len(shapes), shapes, self._room if self.fixed else 1).nbytes_of(batches)

    @property
    def _room(self) -> int:
        return self.room if self.striped or self.ranges_vary else self.turn

    def rows(self, batch: Batch) -> int:
        return len(batch) if self.batch_size is not None else self.shapes(batch)[0][0]

    def lane_count(self) -> int:
        return self.lanes if self.endless else min(self.lanes, len(self.splits))

    def lane(
        self, epoch: int, lane: int, cuts: Mapping[int, int] | None = None, meet: Meet | None = None
    ) -> Iterator[Sample]:
        """Yield the samples of one lane.

        Args:
            cuts: where splits are cut short: the number of samples that remain, by the split's position.
            meet: called with each sample; False ends its split before it.

        Raises:
            GeneratorError: the next sample is poisoned.
        """
        end = ENDLESS if self.endless else len(self.splits)
        for position in range(lane, end, self.lane_count()):
            split = (position + epoch) % len(self.splits)
            for number in range((cuts or {}).get(position, self.splits[split])):
                sample = (epoch, position if self.endless else split, number)
                if sample in self.poison:
                    raise GeneratorError(f"poison at {sample}")
                if meet is not None and not meet(sample, position):
                    break
                yield sample

    def index(self, epoch: int, start: int, stop: int) -> Batch:
        """Return the items from `start` to `stop` of an epoch of an indexable feed."""
        assert self.length is not None
        return tuple((epoch, 0, (number + epoch) % self.length) for number in range(start, min(stop, self.length)))

    def samples_of(self, epoch: int) -> list[Sample]:
        """Return all samples of an epoch that has no poison."""
        if self.length is not None:
            return list(self.index(epoch, 0, self.length))
        return [sample for lane in range(self.lane_count()) for sample in self.lane(epoch, lane)]

    def possible_cuts(self, epoch: int) -> list[dict[int, int]]:
        """Return where splits of the epoch may have been cut short: at none or one of their raising samples each."""
        found: list[dict[int, int]] = [{}]
        for at in range(len(self.splits)):
            split = (at + epoch) % len(self.splits)
            numbers = {sample[2] for sample, _ in self.transient if sample[:2] == (epoch, split)}
            found += [{**cuts, at: number} for cuts in found for number in numbers]
        return found

    def expected(self, epoch: int, cuts: Mapping[int, int] | None = None) -> Iterator[Batch]:
        """Yield the batches of an epoch in exact order. Raise a poisoned sample's error where a batch needs it.

        `cuts`: as for `lane`.
        """
        if self.length is not None:
            items = self.index(epoch, 0, self.length)
            return batches_of_index(items, batch_size=self.batch_size or 1, drop_remainder=self.drop_remainder)
        lanes = [self.lane(epoch, lane, cuts) for lane in range(self.lane_count())]
        if self.pool > 1:
            return batches_of_pools(
                lanes,
                batch_size=self.batch_size or 1,
                turn=self.turn,
                pool=self.pool,
                mix=partial(mixed, epoch),
                drop_remainder=self.drop_remainder,
            )
        return batches_of_lanes(
            lanes, batch_size=self.batch_size or 1, turn=self.turn, drop_remainder=self.drop_remainder
        )


def mixed(epoch: int, visit: int, part: int, rows: Sequence[Sample]) -> list[Sample]:
    """Return the rows of a pool in their new order."""
    return [rows[k] for k in source_rows(0, epoch, visit, part, len(rows), 0, len(rows))] if rows else []


# --- the host's memory ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Slot:
    """One piece of the arena's memory: its ticket, its contents, and its current users."""

    nbytes: int
    ticket: int = -1
    content: dict[int, list[Sample | None]] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    kept: dict[int, Host] = field(default_factory=dict)
    """The batches that a joined host keeps, each with its host."""
    stays: bool = True
    """Whether hosts may keep batches of this slot. They may not once a host has sent some to the daemon."""
    transformed: bool = False
    """Whether it has a merged batch that was transformed."""
    unreadable: bool = False
    """True if some batches were lost and will not be made again."""
    lost: dict[int, Batch] = field(default_factory=dict)
    """The batches that were lost with their host, with their contents."""
    alone: set[int] = field(default_factory=set)
    fillers: set[tuple[Worker, int]] = field(default_factory=set)
    readers: set[tuple[Consumer, int]] = field(default_factory=set)

    def write(
        self, ticket: int, position: int, samples: Sequence[Sample], row: int = 0, rows: int = 0, *, skips: bool = False
    ) -> None:
        """Write samples to the rows of a batch, from `row` on, for a ticket.

        Rows that a dead worker wrote and did not report are written again. The samples must be the same, unless the
        feed `skips`: then a sample may have raised for the dead worker only.
        """
        hold(self.ticket == ticket, f"ticket {ticket} writes into a slot that ticket {self.ticket} has now")
        again = position in self.lost
        hold(again or position not in self.sent, f"batch {position} of ticket {ticket} is written after it was sent")
        hold(not again or self.lost[position] == samples, f"batch {position} of ticket {ticket} was made differently")
        if skips:
            self.content.pop(position, None)
        batch = self.content.setdefault(position, [None] * (rows or len(samples)))
        for number, sample in enumerate(samples, row):
            hold(batch[number] in (None, sample), f"row {number} of batch {position} of ticket {ticket} changes")
            batch[number] = sample

    def has(self, position: int) -> bool:
        """Return whether the daemon has the bytes of this batch."""
        return position not in self.kept and position not in self.lost

    def lose(self, host: Host) -> None:
        """Lose the batches that a lost host kept."""
        for position in [position for position, at in self.kept.items() if at is host]:
            del self.kept[position]
            self.lost[position] = self.read(self.ticket, position)
            del self.content[position]

    def read(self, ticket: int, position: int) -> Batch:
        """Return a whole batch, read for a ticket."""
        hold(self.ticket == ticket, f"ticket {ticket} is read from a slot that ticket {self.ticket} has now")
        batch = tuple(sample for sample in self.content[position] if sample is not None)
        hold(len(batch) == len(self.content[position]), f"a batch of ticket {ticket} is read before it is whole")
        return batch


class Arena:
    """Slots by ticket. A freed slot is used again at once, to catch anybody who still uses it."""

    def __init__(self, refused: frozenset[int]) -> None:
        self.used: dict[int, Slot] = {}
        self._free: list[Slot] = []
        self._refused = refused
        self._asked = 0

    @property
    def has_memory(self) -> bool:
        """Whether the machine has memory for the next slot that is asked for."""
        return self._asked + 1 not in self._refused

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.used.values())

    def take(self, ticket: int, nbytes: int) -> Slot | None:
        """Give the ticket a slot, instead of the one that it may have. Return None if the machine has no memory."""
        self._asked += 1
        if self._asked in self._refused:
            return None
        if ticket in self.used:
            self.free(ticket)
        slot = next((slot for slot in reversed(self._free) if slot.nbytes == nbytes), None)
        if slot is None:
            slot = Slot(nbytes)
        else:
            self._free.remove(slot)
        slot.ticket = ticket
        self.used[ticket] = slot
        return slot

    def free(self, ticket: int) -> None:
        """Free the ticket's slot. It has none if the machine had no memory."""
        slot = self.used.pop(ticket, None)
        if slot is None:
            return
        hold(not slot.readers, f"the slot of ticket {ticket} is freed while the consumer has {len(slot.readers)} slabs")
        filling = [worker.number for worker, run in slot.fillers if worker.alive and worker.fills_of(run)]
        hold(not filling, f"the slot of ticket {ticket} is freed while worker {filling} fills it")
        slot.ticket = -1
        slot.content, slot.sent, slot.fillers, slot.kept, slot.stays, slot.lost = {}, set(), set(), {}, True, {}
        slot.alone = set()
        slot.unreadable = slot.transformed = False
        self._free.append(slot)


# --- workers ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Run:
    """A worker's run: one lane of an epoch, or an epoch of an indexable feed."""

    feed: SimFeed
    epoch: int
    samples: Iterator[Sample]
    index: int = 0
    ended: bool = False
    leftover: Batch = ()
    kept: Batch | None = None
    failed: bool = False
    careful: bool = False
    cuts: dict[int, int] = field(default_factory=dict)
    passing: bool = False
    """Whether it makes batches again that were consumed."""
    meet: Meet | None = None
    forged: bool = False

    def record(self) -> bytes:
        """Return the restart record with which another run continues after the last batch."""
        if self.feed.length is not None:
            return b""
        cuts = b"".join(number.to_bytes(8) for pair in self.cuts.items() for number in pair)
        return self.index.to_bytes(8) + cuts

    def take(self, index: int) -> Batch | None:
        """Return batch number `index`, or None if there are no more full batches."""
        if self.kept is not None:
            batch, self.kept = self.kept, None
            return batch
        if self.feed.length is not None:
            size = self.feed.batch_size or 1
            items = self.feed.index(self.epoch, index * size, index * size + size)
            for item in items:
                if self.meet is not None:
                    self.meet(item, 0)
            return items
        if self.ended:
            return None
        if self.forged and index != self.index:
            raise ProtocolError(f"batch {index} of a lane is asked for when {self.index} is next")
        hold(index == self.index, f"batch {index} of a lane is asked for when {self.index} is next")
        batch = tuple(islice(self.samples, self.feed.batch_size or 1))
        if len(batch) < (self.feed.batch_size or 1):
            self.ended, self.leftover = True, batch
            return None
        self.index += 1
        return batch


@dataclass(eq=False)
class Fill:
    """A turn that the worker has to make. It has made `made` of the batches. They go into a slot with the ticket
    `memory`, each `step` places after the one before."""

    ticket: int
    run: int
    index: int
    batches: int
    slot: Slot
    base: int
    memory: int
    step: int = 1
    stays: bool = False
    may_stop: bool = False
    made: int = 0
    waits: bool = False
    work_ms: int = 0


class Worker:
    """A worker process. It reads its messages in order, makes its turns in order, and answers over its own link.

    While it stands in one step, it does none of this. Then it reads all of its messages before the next step.
    """

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.alive = True
        self.hung = False
        self.started = True
        self.blamed: tuple[int, int, str] | None = None
        self.dropped: set[int] = set()
        self.runs: dict[int, Run] = {}
        self.fills: list[Fill] = []
        self.pooling: set[int] = set()
        """Runs that only copy the rows of pools, or transform merged batches."""
        self.stands: int | None = None
        """The run in one of whose steps it stands; 0: for something else than a stream."""
        self.to_drop: set[int] = set()
        """The runs that it was told to drop, and does not know it yet."""
        self.revoked: set[int] = set()
        """Those of them that it does not stand in. It writes nothing more for them."""
        self.told: deque[Event] = deque()
        self.answers: deque[Event] = deque()
        self._world = world

    def next_fill(self) -> Fill | None:
        """Return the first turn that can continue. A turn that waits for a larger slot holds up only its own run."""
        if not self.fills:
            return None
        waiting = {fill.run for fill in self.fills if fill.waits}
        return next((fill for fill in self.fills if fill.run not in waiting), None)

    def fills_of(self, run: int) -> bool:
        """Return whether the worker writes into slots for this run."""
        return run not in self.revoked and (run in self.pooling or self._is_open(run))

    def _is_open(self, run: int) -> bool:
        return run in self.runs and not self.runs[run].failed

    # commands from the coordinator

    def list_splits(self, run: int, feed: SimFeed, epoch: int) -> None:
        if epoch in feed.unlisted:
            self._answer(on.RunFailed(run, GeneratorError(f"no splits in epoch {epoch}")))
            return
        self.answers.append(partial(self._world.listed, run, feed, epoch))

    def start_run(self, start: do.StartRun, feed: SimFeed) -> None:
        hold(start.run not in self.runs, f"run {start.run} is started twice")
        index, cuts = _record(start.record)
        ahead, cuts_ahead = _record(start.ahead)
        cuts |= cuts_ahead  # splits that were cut short on the way there are cut short again
        run = Run(feed, start.epoch, iter(()), index, careful=start.careful > 0, cuts=cuts)
        run.forged = self._world.is_forged(start.run)
        run.meet = partial(self._meet, start.run, run)
        run.samples = feed.lane(start.epoch, start.lane, cuts, run.meet)
        self.runs[start.run] = run
        count, there = index * (feed.batch_size or 1), max(index, ahead) * (feed.batch_size or 1)
        if run.forged and (there > 1000 or any(len(one) % 16 not in (0, 8) for one in (start.record, start.ahead))):
            self._fail(start.run, ProtocolError("a record of no lane"))
            return
        try:
            came = sum(1 for _ in islice(run.samples, count))
        except GeneratorError as error:
            self._fail(start.run, error)
            return
        reached = sum(1 for _ in islice(feed.lane(start.epoch, start.lane, cuts), there))
        if run.forged and (came < count or reached < there):
            self._fail(start.run, ProtocolError("a record of no lane"))
            return
        hold(came == count, f"run {start.run} begins after the end of its lane")
        hold(reached == there, f"lane {start.lane} must pass sample {there}, but has only {reached}")

    def _meet(self, number: int, run: Run, sample: Sample, position: int) -> bool:
        """Let user code read a sample. Return False if the sample raises and the rest of its split is skipped."""
        feed = run.feed
        if sample in feed.deadly:
            raise Deadly
        if not self._world.raises(feed, sample):
            return True
        if feed.on_error != "skip" or run.passing:
            raise GeneratorError(f"raises at {sample}")
        run.cuts[position] = sample[2]
        self._answer(on.SplitSkipped(number, position, Skipped(str(position), sample[2], "raises")))
        return False

    def fill(self, fill: Fill) -> None:
        """Take a turn to make: `batches` batches from number `index` on, in the places of the slot from `base` on."""
        hold(fill.run not in self.dropped, f"run {fill.run}, which was dropped, is told to make a turn")
        if not self._is_open(fill.run):
            return  # the run failed, or was that of a dead predecessor, and the daemon did not know yet
        for waiting in self.fills:
            if waiting.ticket == fill.ticket:
                hold(waiting.waits, f"a worker is told to fill ticket {fill.ticket} twice")
                hold(waiting.base == fill.base, f"ticket {fill.ticket} is continued at another place")
                waiting.slot, waiting.waits = fill.slot, False
                return
        self.fills.append(fill)

    def leftover(self, rows: do.MeasureRows | do.WriteRows, slot: Slot) -> None:
        """Measure or write leftover rows of a lane."""
        hold(rows.run in self.runs, f"run {rows.run}, which is not open, is told to write rows")
        run = self.runs[rows.run]
        if run.failed or rows.run in self.revoked:  # the daemon did not know yet, or only waits for the slot
            slot.fillers.discard((self, rows.run))
            self._answer(m.RowsWritten(rows.run, rows.ticket))
            return
        try:
            ended = run.ended or run.take(run.index) is None
        except PenstockError as error:
            self._fail(rows.run, error)
            return
        leftover = run.leftover[rows.start : rows.start + rows.count]
        if run.forged and (not ended or len(leftover) != rows.count):
            self._fail(rows.run, ProtocolError("rows that are not left over"))
            return
        hold(ended, f"run {rows.run}, which has not ended, is told to write leftovers")
        hold(len(leftover) == rows.count, f"run {rows.run} has too few leftover rows")
        slot.fillers.discard((self, rows.run))
        if isinstance(rows, do.MeasureRows):
            self._answer(m.RowsMeasured(rows.run, rows.ticket, run.feed.sizes(leftover)))
            return
        if not run.feed.fixed:
            hold(rows.sizes == run.feed.sizes(leftover), "rows have another size than when they were measured")
            nbytes = lay_out(["int64", "int64"], rows.shapes).nbytes
            hold(nbytes <= slot.nbytes, f"a merged batch of {nbytes} bytes is written to a slot of {slot.nbytes}")
            hold((rows.row == 0) == (rows.before == ((0,),)), "rows are written to the wrong place")
        if slot.transformed:
            slot.content, slot.transformed = {}, False
        slot.write(rows.ticket, 0, leftover, rows.row, rows.rows)
        self._answer(m.RowsWritten(rows.run, rows.ticket))

    def transform_rows(self, command: do.TransformRows, feed: SimFeed, slot: Slot) -> None:
        """Transform a merged batch, all of whose rows are written."""
        slot.fillers.discard((self, command.run))
        self.pooling.discard(command.run)
        shapes: m.Shapes = ()
        if command.run not in self.revoked:  # otherwise the daemon only waits for the slot
            batch = slot.read(command.ticket, 0)
            hold(len(batch) == command.rows, "a merged batch is transformed that has other rows")
            hold(not slot.transformed, "a merged batch is transformed twice")
            shapes = feed.shapes(batch)
            nbytes = feed.nbytes(batch) + (0 if feed.fixed else 4096)
            if nbytes > slot.nbytes:
                self._answer(m.NeedRoom(command.run, command.ticket, nbytes))
                return
            slot.transformed = True
        self._answer(m.RowsWritten(command.run, command.ticket, shapes))

    def pool_rows(self, command: do.PoolRows, feed: SimFeed, slot: Slot, sources: list[Slot]) -> None:
        """Copy rows of a pool into their new order."""
        if command.run in self.revoked:  # the daemon only waits for the slot
            slot.fillers.discard((self, command.run))
            self.pooling.discard(command.run)
            self._answer(m.RowsWritten(command.run, command.ticket))
            return
        rows: list[Sample] = []
        for source, (ticket, batches) in zip(sources, command.sources, strict=True):
            if source.ticket != ticket:  # the epoch was closed, so nobody needs the copy
                rows = []
                break
            hold(set(source.content) >= set(range(batches)), "a pool is mixed before its visits are made")
            rows += [row for place in range(batches) for row in source.read(ticket, place)]
        size = feed.batch_size or 1
        hold(slot.ticket == command.ticket, "a slot is freed while rows are copied into it")
        if rows:
            order = mixed(command.epoch, command.visit, command.part, rows)
            for place in range(command.batches):
                at = (command.first + place) * size
                slot.write(command.ticket, place, order[at : at + size])
        slot.fillers.discard((self, command.run))
        self.pooling.discard(command.run)
        self._answer(m.RowsWritten(command.run, command.ticket))

    def drop_run(self, run: int) -> None:
        self.dropped.add(run)
        self.to_drop.discard(run)
        if self.runs.pop(run, None) is not None:
            for fill in [fill for fill in self.fills if fill.run == run]:
                self._close(fill)
                self._answer(m.Made(run, fill.ticket, first=0, batches=0, rows=0, last=True))

    # actions

    def stand(self) -> None:
        """Stand in a step: of the next turn, or of something that belongs to no stream."""
        fill = self.next_fill()
        self.stands = 0 if fill is None or self._world.random.random() < 0.5 else fill.run
        self.revoked.update(run for run in self.to_drop if run != self.stands)

    def go_on(self) -> None:
        """End the step, and read all messages."""
        run, self.stands = self.stands, None
        if run:
            self.make()
        while self.alive and self.told:
            self.told.popleft()()
        self.revoked.clear()

    def make(self) -> None:
        """Make a random number of batches of the next turn that can continue."""
        fill = self.next_fill()
        assert fill is not None
        run = self.runs[fill.run]
        wanted = 1 if run.careful else self._world.random.randint(1, fill.batches - fill.made)
        parts: list[Batch] = []
        try:
            run.passing = run.feed.length is None and run.index < fill.index
            while run.feed.length is None and run.index < fill.index and not run.ended:
                passed = run.take(run.index)
                hold(passed is not None or run.forged, "a lane ends before the place that its run is to reach")
            run.passing = False
            cuts = len(run.cuts)
            while (
                len(parts) < wanted and len(run.cuts) == cuts
            ):  # a batch for which something is skipped is told at once
                batch = run.take(fill.index + fill.made + len(parts))
                if batch is None:
                    break
                if not run.feed.fixed and run.feed.nbytes(batch) > fill.slot.nbytes:
                    run.kept, fill.waits = batch, True
                    fill.slot.fillers.remove((self, fill.run))
                    self._answer(m.NeedRoom(fill.run, fill.ticket, run.feed.nbytes(batch)))
                    return
                skips = run.feed.on_error == "skip"
                place = fill.base + (fill.made + len(parts)) * fill.step
                fill.slot.write(fill.memory, place, batch, skips=skips)
                parts.append(batch)
        except PenstockError as error:
            self._made(fill, run, parts, last=False)
            self._fail(fill.run, error)
        except Deadly:
            self._made(fill, run, parts, last=False)
            self.end((fill.run, -1, ""))
        else:
            stops = fill.may_stop and bool(parts) and self._world.random.random() < 0.2
            last = run.ended or stops or fill.made + len(parts) == fill.batches
            self._made(fill, run, parts, last=last, skipped=len(run.cuts) > cuts and not run.ended)
            if run.feed.striped and self._world.random.random() < 0.5:
                self._turn_to_another_lane()

    def _turn_to_another_lane(self) -> None:
        """Put the first turn behind all those of other runs in its slot."""
        first, *rest = self.fills or [None]
        if first is None:
            return
        at = next((at for at, fill in enumerate(rest) if fill.slot is not first.slot or fill.run == first.run), None)
        rest.insert(len(rest) if at is None else at, first)
        self.fills = rest

    def die(self) -> None:
        """Die, perhaps in the middle of a batch. The messages already sent still arrive, then the news of the death."""
        fill = self.next_fill()
        blamed = None
        if fill is not None and not self.hung and self.started and self.stands in (None, fill.run):
            blamed = fill.run, self._world.random.choice((0, -1)), "the split"
            if self._world.random.random() < 0.5:
                said = len(self.answers)
                self.make()
                while len(self.answers) > said:
                    self.answers.pop()
                if not self.alive:  # it read a deadly sample
                    self.alive = True
        self.end(blamed)

    def end(self, blamed: tuple[int, int, str] | None) -> None:
        self.blamed = blamed
        self.alive = False
        self.told.clear()
        self.answers.append(partial(self._world.bury, self))

    def _made(self, fill: Fill, run: Run, parts: list[Batch], *, last: bool, skipped: bool = False) -> None:
        replay_ms = self._world.replay_ms()
        record = run.record()
        if run.feed.ranges_vary:
            fill.work_ms += self._world.random.choice((0, 0, 30, 150, 1000))
        made = m.Made(
            fill.run, fill.ticket, 0, 0, 0, last=False, record=record, replay_ms=replay_ms, work_ms=fill.work_ms
        )
        if parts:
            rows = sum(run.feed.rows(batch) for batch in parts)
            shapes = run.feed.shapes(parts[0])
            made = replace_struct(made, first=fill.made, batches=len(parts), rows=rows, shapes=shapes, skipped=skipped)
            fill.made += len(parts)
        if last:
            self._close(fill)
        full = fill.made == fill.batches  # then the end of the turn is never reported separately
        if parts and (not last or (self._world.random.random() < 0.3 and not full)):
            self._reported(fill, replace_struct(made, border=self._border()))
            made = replace_struct(made, first=0, batches=0, rows=0, shapes=(), skipped=False)
        if last:
            ended, leftover = run.ended, len(run.leftover)
            made = replace_struct(made, last=True, ended=ended, leftover=leftover, border=self._border())
            self._reported(fill, made)

    def _reported(self, fill: Fill, made: m.Made) -> None:
        """Report batches to the coordinator. The worker's host may keep their bytes."""

        def arrive() -> None:
            if fill.stays:
                self._world.hosts.keep(self.number, fill, range(made.first, made.first + made.batches))
            self._world.hear(self.number, made)

        self.answers.append(arrive)

    def _border(self) -> bool:
        return self._world.random.random() < 0.3

    def _fail(self, run: int, error: PenstockError) -> None:
        self.runs[run].failed = True
        self.fills = [fill for fill in self.fills if fill.run != run]
        self._answer(on.RunFailed(run, error))

    def _close(self, fill: Fill) -> None:
        self.fills.remove(fill)
        fill.slot.fillers.discard((self, fill.run))

    def _answer(self, event: on.Event) -> None:
        self.answers.append(partial(self._world.hear, self.number, event))


# --- consumers --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Slab:
    """A slab on its way to a consumer, or under its tensors."""

    seq: int
    epoch: int
    ticket: int
    slot: Slot
    nbytes: int
    batches: dict[int, Batch]
    message: m.Slab
    before: tuple[m.LaneEnded | m.PoolBegun | m.SentElsewhere, ...] = ()
    fetched: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the consumer or the slot has the bytes of all batches."""
        return self.fetched or (not self.slot.unreadable and all(map(self.slot.has, self.batches)))

    def verify(self) -> None:
        """Check that the slot still has the bytes that were sent."""
        if self.fetched:
            return
        for position, batch in self.batches.items():
            hold(self.slot.read(self.ticket, position) == batch, f"slab {self.seq} changed under its reader")


class Consumer:
    """A consumer and its stream: on the daemon's host, with a quota of slots to alias, or over the network, with none.

    Args:
        reads: the epochs to read, each with the number of slabs after which to leave it, or None to read all of it.
        hoards: keep all tensors until it closes.
        dies_after: vanish without a Close after this many slabs.
        stays: do not close when everything is read.
        greedy: alias every slab, even beyond the quota.
        closes_after: close after this many slabs, anywhere in an epoch.
    """

    def __init__(
        self,
        world: World,
        reader: Reader,
        reads: Sequence[tuple[int, int | None]],
        *,
        hoards: bool = False,
        dies_after: int | None = None,
        stays: bool = False,
        greedy: bool = False,
        closes_after: int | None = None,
        ask: OpenRequest,
        position: Position | None = None,
    ) -> None:
        self.reader = reader
        self.number = reader.number
        self.stream = world.coordinator.streams[reader.stream]
        self.track = Progress(self.stream.feed.info, position)
        self.read: dict[int, list[Batch]] = {}
        self.ended: dict[int, m.End] = {}
        self.failures: list[PenstockError] = []
        self.gone = False
        self.told: deque[Event] = deque()
        self.says: deque[Event] = deque()
        self.received = 0
        self._world = world
        self._reads = deque(reads)
        self._hoards = hoards
        self._dies_after = dies_after
        self._stays = stays
        self._greedy = greedy
        self._closes_after = closes_after
        self._last_batches = 0
        """The number of batches of the last slab, if it belongs to this epoch."""
        self.cuts: dict[tuple[int, int], bytes] = {}
        """The last record of each lane of each epoch. It names the splits that were cut short."""
        self._local = reader.share.quota > 0
        self._quota = reader.share.quota
        self._epoch: int | None = None
        self._leave_after: int | None = None
        self._queue: deque[Slab] = deque()
        self._aliased: list[Slab] = []
        self._handed = 0
        self._handed_said = 0
        self._given = 0
        """The number of slabs handed over when it closed. Later slabs are void, and go to another consumer."""
        self._handed_here = 0
        self._released: list[int] = []
        self.closed = False
        self._ask = ask
        self._position = position
        self.lost = False
        self._before: list[m.LaneEnded | m.PoolBegun | m.SentElsewhere] = []
        self._tally = EpochCheck(position)
        self._bounds = self._bounds_from(position)
        self._ends = self._ends_said = 0
        self._begin_again = False
        self._outlived = 0
        self._untold: deque[m.Had] = deque(maxlen=ask.credit)
        self.opening = False

    def _bounds_from(self, position: Position | None) -> EpochBounds:
        ranks = self._ask.world_size or 1
        return EpochBounds(self.stream.feed.info, position, ranks=ranks, shares=self._shares)

    @property
    def _shares(self) -> bool:
        return bool(self._ask.group) and not self._ask.world_size

    @property
    def under_way(self) -> tuple[int, int]:
        """Slabs and bytes that were sent but not acknowledged yet, as the daemon counts them."""
        reader = self.reader
        return reader.sent - reader.handed, reader._unhanded_bytes

    def options(self) -> list[Event]:
        """Return the steps that are possible now."""
        if self.gone:
            return []
        if self.lost:
            return [self._come_back]
        if self._dies_after is not None and self._handed >= self._dies_after:
            return [self.vanish]
        if self._closes_after is not None and self._handed >= self._closes_after and not self.closed:
            return [self.close]
        options: list[Event] = []
        leaving = self._leave_after is not None and self._handed_here >= self._leave_after
        if self._epoch is not None and leaving:
            options.append(self.leave)
        elif self._epoch is not None and self._queue and self._queue[0].is_there:
            options.append(self._hand)
        if not self._local and self._unfetched:
            options.append(self._fetch)
        if self._handed > self._handed_said or self._released or self._ends > self._ends_said:
            options.append(self._acknowledge)
        if self._aliased and (not self._hoards or self.closed):
            options.append(self._release)
        if self._epoch is None and not self.closed:
            if self._reads and not self.failures:
                options.append(self._begin)
            elif not self._stays:
                options.append(self.close)
        if self.closed and not (self._local and (self._aliased or self._released)):
            options.append(self.vanish)
        return options

    # messages from the daemon

    def slab(self, slab: Slab) -> None:
        hold(slab.seq == self.received, f"slab {slab.seq} comes, but {self.received} is next")
        hold(not self.failures, "a slab comes after the stream failed")
        self.received += 1
        if slab.epoch == self._epoch:
            slab.before = tuple(self._before)
            self._before.clear()
            self._tally.on_batches(slab.message)
            self._bounds.on_slab(slab.message)
            self._queue.append(slab)
        else:
            hold(
                slab.epoch in self.read and slab.epoch not in self.ended, f"a slab of epoch {slab.epoch} comes unasked"
            )
            self._void(slab)

    def hear(self, message: do.Said) -> None:
        """Handle a message other than a slab."""
        match message:
            case m.End():
                self._end(message)
            case m.Failed():
                self._fail(message.error.error())
            case m.Opened():
                self._quota = message.quota
                if self.opening:
                    self._untold.clear()
                    self.opening = False
            case m.Begun():
                self.track.on_listed(message.epoch, message.digest)
            case m.LaneEnded() if message.epoch != self._epoch:
                pass
            case m.SentElsewhere() if message.epoch == self._epoch:
                self._before.append(message)
                self._tally.on_batches(message)
                self._bounds.on_message(message)
            case m.LaneEnded() if message.epoch == self._epoch:
                self._before.append(message)
                self._tally.on_lane_ended(message)
                self._bounds.on_message(message)
                self.cuts[message.epoch, message.lane] = message.record
            case m.PoolBegun() if message.epoch == self._epoch:
                self._before.append(message)
                self._tally.on_pool(message)
                self._bounds.on_message(message)
                for lane in message.lanes:
                    if lane.number >= 0:
                        self.cuts[message.epoch, lane.lane] = lane.record

    def _end(self, end: m.End) -> None:
        hold(end.epoch not in self.ended, f"epoch {end.epoch} ends twice")
        self._ends += 1
        if end.epoch == self._epoch:
            fault = self._tally.fault(end)
            hold(fault is None, f"the epoch {fault}")
        self.ended[end.epoch] = end
        self._finish()

    def _fail(self, error: PenstockError) -> None:
        stops = self._world.coordinator.stopping is not None
        if isinstance(error, ConnectionLost | DaemonStopped) and not stops:
            self.cut()  # another rank is gone, or the disk of the state file is full
            return
        self.failures.append(error)
        hold(len(self.failures) == 1, "the stream fails twice")
        while self._queue:
            self._hand()
        self._epoch = None

    @property
    def has_read_all(self) -> bool:
        """Whether nothing is left to read, and the daemon knows it."""
        return self._epoch is None and not (self._reads or self.says or self.lost)

    def let_go(self) -> None:
        """From now on, let tensors die and close when everything is read."""
        self._hoards = self._stays = False

    def last_act(self) -> None:
        """Take one more step after the daemon was killed: receive a message that was under way, or hand over a slab."""
        if self.told and not (self.gone or self.lost):
            self.told.popleft()()
        elif self._hand in self.options():
            self._hand()

    # actions

    def _begin(self) -> None:
        if self._begin_again:
            assert self._epoch is not None
        else:
            self._epoch, self._leave_after = self._reads.popleft()
            self._handed_here = self._last_batches = 0
            self.read[self._epoch] = []
            if self._epoch > self.track.newest().epoch:
                self.track.begin(self._epoch)
        newest = self.track.newest()
        self._begin_again = False
        self._before.clear()
        start = newest if newest.epoch == self._epoch and not self._shares else None
        self._tally = EpochCheck(start)
        self._bounds = self._bounds_from(start)
        self._say(on.Begin(self.number, self._epoch))

    def cut(self) -> None:
        """Cut the connection. Slabs that were handed over stay. All others are lost, and have to come again."""
        self.lost = True
        self._forget()
        if self._epoch is not None:
            self.ended.pop(self._epoch, None)

    def _come_back(self) -> None:
        """Open a new session at the consumer's position. Leave it to a later step if there is no memory for it.

        The new session replaces the old one, if the daemon still has the old one and knows that both belong to this
        consumer (here: with a state file).
        """
        if self.closed or self.failures:
            self.gone = True
            return
        if self._ask.identity and self.number in self._world.coordinator.consumers:
            self._world.handle(on.Cut(self.number, self._handed))
        try:
            position = None if self._shares else unpack(pack(self.track.newest()))
            ask = replace(self._ask, position=position, again=True, had=tuple(self._untold))
            reader = self._world.ask(self.stream.feed.name, ask)
        except (MemoryBound, ProtocolError):  # or the daemon does not know yet that our old session is gone
            return
        del self._world.consumers[self.number]
        self.reader, self.number = reader, reader.number
        self.stream = self._world.coordinator.streams[reader.stream]
        self._world.consumers[self.number] = self
        self.lost = False
        self.opening = True
        self.received = self._handed = self._handed_said = self._ends = self._ends_said = 0
        self._quota = reader.share.quota
        if self._epoch is not None:
            self._begin_again = True
            self._begin()

    def _forget(self) -> None:
        self.told.clear()
        self.says.clear()
        self._queue.clear()
        kept = [] if self.gone else list(self._aliased)
        self._aliased.clear()
        self._released.clear()
        for slot in self._world.arena.used.values():
            slot.readers = {reader for reader in slot.readers if reader[0] is not self or reader[1] < 0}
        for slab in kept:
            self._outlived += 1
            slab.seq = -self._outlived
            slab.slot.readers.add((self, slab.seq))
        handed = self._given if self.closed else self._handed
        if kept:
            self._world.ends.append(partial(self._world.handle, on.Cut(self.number, handed)))
        self._world.ends.append(partial(self._end_of_file, self.number, handed, kept))

    def _end_of_file(self, number: int, handed: int, kept: list[Slab]) -> None:
        """Let the last tensor of a session that was cut off die."""
        for slab in kept:
            slab.verify()
            slab.slot.readers.remove((self, slab.seq))
        self._world.handle(on.Lost(number, handed))

    def _hand(self) -> None:
        slab = self._queue.popleft()
        slab.verify()
        self.read[slab.epoch] += slab.batches.values()
        self._last_batches = len(slab.batches)
        self.track.on_handed(slab.message, slab.before)
        message = slab.message
        self._untold.append(m.Had(message.epoch, message.lane, message.index, message.batches))
        self._handed += 1
        self._handed_here += 1
        if self._local and (self._greedy or len(self._aliased) < self._quota):
            self._aliased.append(slab)
        else:
            self._let_go(slab)
        self._finish()

    @property
    def _unfetched(self) -> list[Slab]:
        unfetched = [slab for slab in self._queue if not slab.fetched]
        return [slab for slab in unfetched if any(not at.lost for at in map(slab.slot.kept.get, slab.batches) if at)]

    def _fetch(self) -> None:
        """Fetch a slab from the host that keeps it. The daemon sends the batches that no host keeps."""
        slab = self._world.random.choice(self._unfetched)
        slab.fetched = not any(position in slab.slot.lost for position in slab.batches)

    def _release(self) -> None:
        slab = self._aliased.pop(self._world.random.randrange(len(self._aliased)))
        slab.verify()
        self._let_go(slab)

    def _acknowledge(self) -> None:
        self._say(on.Acknowledge(self.number, self._handed, tuple(self._released), self._ends))
        if self._world.random.random() < 0.1:  # saying the same again changes nothing
            self._say(on.Acknowledge(self.number, self._handed, (), self._ends))
        self._handed_said, self._ends_said = self._handed, self._ends
        self._released = []

    def leave(self) -> None:
        self._leave_unread()
        epoch, self._epoch = self._epoch, None
        assert epoch is not None
        self.track.begin(epoch + 1)
        handed = self._handed
        while self._queue:
            self._void(self._queue.popleft())
        self._say(on.Leave(self.number, epoch, handed))

    def close(self) -> None:
        self.closed = True
        handed = self._given = self._handed
        self._leave_unread()
        self._epoch = None
        while self._queue:
            self._void(self._queue.popleft())
        self._say(on.Close(self.number, handed))

    def vanish(self) -> None:
        self._leave_unread()
        self.gone = True
        self._forget()

    def _leave_unread(self) -> None:
        """Leave in the middle of the last slab. Its unread batches have to go to another consumer."""
        if self._shares and self._epoch is not None and self._last_batches > 1:
            unread = self._world.random.randrange(self._last_batches)
            del self.read[self._epoch][len(self.read[self._epoch]) - unread :]
            self._last_batches -= unread

    def _finish(self) -> None:
        if self._epoch is not None and self._epoch in self.ended and not self._queue:
            end, read = self.ended[self._epoch], self.read[self._epoch]
            position = self._position
            if self._shares:
                pass  # other consumers have read the rest
            elif self._ask.world_size:
                more = self._ask.world_size - 1 if self._ask.pad else 0
                rounds = (end.batches + more) // self._ask.world_size
                if position is not None and position.epoch == self._epoch:
                    rounds -= (position.batches + position.skip + more) // self._ask.world_size
                hold(rounds == len(read), f"a rank has {len(read)} batches of {rounds} rounds")
            elif position is None or position.epoch != self._epoch:
                hold(end.batches == len(read), f"the epoch ends with {end.batches} batches, but {len(read)} came")
                hold(end.rows == sum(map(self._feed.rows, read)), "the epoch ends with a wrong number of rows")
            else:
                came = position.batches + position.skip + len(read)
                hold(end.batches == came, f"the epoch ends with {end.batches} batches instead of {came}")
            self.track.on_epoch_ended(self._epoch)
            self._epoch = None

    def _void(self, slab: Slab) -> None:
        self._handed += 1
        self._let_go(slab)

    def _let_go(self, slab: Slab) -> None:
        slab.slot.readers.remove((self, slab.seq))
        if self._local:
            self._released.append(slab.seq)

    @property
    def _feed(self) -> SimFeed:
        return self._world.feeds[self.stream.feed.name]

    def _say(self, event: on.Event) -> None:
        self.says.append(partial(self._world.handle, event))


# --- the world --------------------------------------------------------------------------------------------------------


class World:
    """The coordinator, and all that it talks to.

    Args:
        feeds: the feeds that the daemon serves.
        workers: the number of worker processes.
        memory: `--memory`.
        seed: seed of all random choices.
        refused: the requests for a slot, counted from 1, for which the machine has no memory.
        starts: start at once, so that the feeds can be read when the constructor returns.
        state: the daemon has a state file, and may be killed between any two commands.
        kills, cuts, restarts, scales: how many times a worker dies, a consumer's connection is cut, the daemon is
            restarted, and workers are added or told to leave, each at a random time. (A short world may end before.)
        stands: how many times one of the daemon's own workers stands for a while.
        fulls: how many times the state file cannot be written for a while.
        looks: how often the coordinator looks whether streams of jobs have met.
        idle: the daemon's only own worker is an idle worker. If there is no other worker and no other step is
            possible, a host joins.
        hosts: the number of hosts that have joined at the beginning.
        host_workers: the number of workers of each host; None: one to three, at random.
        joins, leaves, losses: how many times a host joins, leaves, and is lost. (Sometimes all hosts leave or are lost
            at once.)
    """

    def __init__(
        self,
        *feeds: SimFeed,
        workers: int = 2,
        memory: int = 1 << 30,
        seed: int = 0,
        refused: frozenset[int] = frozenset(),
        starts: bool = True,
        state: bool = False,
        kills: int = 0,
        cuts: int = 0,
        restarts: int = 0,
        scales: int = 0,
        stands: int = 0,
        fulls: int = 0,
        looks: int = 0,
        idle: bool = False,
        hosts: int = 0,
        host_workers: int | None = None,
        joins: int = 0,
        leaves: int = 0,
        losses: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.feeds = {feed.name: feed for feed in feeds}
        self._state = StateFile(":memory:") if state else None
        self._idle = idle
        workers = 1 if idle else workers
        self.coordinator = self._new_coordinator(workers, memory)
        self._commands: deque[do.Command] = deque()
        self.arena = Arena(refused)
        self._fuse: int | None = None
        """The number of commands to carry out before the daemon is killed; None: it is not about to be killed."""
        self._cannot_write = 0
        """The number of writes to the state file that will fail from now on."""
        self._unkept: set[tuple[str, str]] = set()
        self._muted: set[int] = set()
        """Consumers that now receive nothing but the error of their stream."""
        self._now = 0.0
        self._memory = memory
        self._refused = refused
        self.faults = {"kill": kills, "cut": cuts, "restart": restarts, "scale": scales, "full": fulls}
        if stands:
            self.faults["stand"] = stands
        self.looks = looks
        self._stood: set[int] = set()
        """The workers that the coordinator thinks stand."""
        if idle or hosts or joins:
            self.faults |= {"join": joins, "leave": leaves, "lose": losses}
        self.hosts = Hosts(self, host_workers)
        self.forged: set[int] = set()
        """Streams that an attacker opened."""
        self.attackers: list[Attacker] = []
        self._last_consumer = 0
        self._raises = {(feed.name, sample): readings for feed in feeds for sample, readings in feed.transient}
        self._readings: Counter[tuple[str, Sample]] = Counter()
        self.ends: deque[Event] = deque()
        """Closed connections that the daemon has not noticed yet."""
        self.ready: list[str] = []
        self.refusals: list[PenstockError] = []
        self.consumers: dict[int, Consumer] = {}
        self.steps = 0
        self._due = {fault: self._when() for fault in self.faults}
        self._crash: tuple[int, int] | None = None
        self._waiting: dict[int, deque[do.FindSlot]] = {}
        self._lists: dict[int, tuple[SimFeed, int]] = {}
        self._last_list = 0
        self._pace: dict[object, float] = {}
        self._checked = False
        """Whether the coordinator was checked after its last event. Many steps only take a message from a link."""
        self.workers = {number: Worker(self, number) for number in range(workers)}
        if starts:
            self.start()
        for _ in range(hosts):
            self.hosts.join()

    def _new_coordinator(self, workers: int, memory: int) -> Coordinator:
        saved = None if self._state is None else self._state.load()
        return Coordinator(workers=workers, idle=self._idle, memory=memory, saved=saved, patience=PATIENCE)

    def handle(self, event: on.Event) -> None:
        """Tell the coordinator of an event, and queue its commands for `carry_out`.

        Raises:
            PenstockError: the coordinator refuses the event.
        """
        self._checked = False
        commands = self.coordinator.handle(event, self._now)
        self._commands.extend(command for command in commands if not isinstance(command, do.Refuse))
        for command in commands:
            if isinstance(command, do.Refuse):
                raise command.error

    def take(self) -> list[do.Command]:
        """Take the queued commands away, and return them. They are not carried out."""
        commands = list(self._commands)
        self._commands.clear()
        return commands

    def wait(self, seconds: float) -> None:
        """Let time pass, and let the coordinator do what is due by then."""
        self._now += seconds
        self.handle(on.Tick())

    def ask(self, feed: str, ask: OpenRequest) -> Reader:
        """Open a stream for a new consumer.

        Raises:
            PenstockError: the coordinator refuses it.
        """
        self._last_consumer += 1
        ask = replace(ask, machine=machine_of(self._last_consumer))
        self.handle(on.Open(self._last_consumer, feed, ask))
        return self.coordinator.consumers[self._last_consumer]

    def start(self) -> None:
        """Let a worker import the feeds, and continue until they can be read."""
        self.handle(self.imports(0))
        self.carry_out()
        self.settle()

    def imports(self, worker: int) -> on.Imported:
        return on.Imported(worker, tuple(feed.plan() for feed in self.feeds.values()))

    def crash(self, worker: int | None, after: int = 0) -> None:
        """Let `worker` die after `after` more steps. None: cancel the crash."""
        self._crash = None if worker is None else (self.steps + after, worker)

    def open(
        self,
        feed: str = "train",
        *,
        reads: Sequence[tuple[int, int | None]] = ((0, None),),
        credit: int = 4,
        credit_bytes: int = 1 << 40,
        quota: int = 0,
        position: Position | None = None,
        again: bool = False,
        group: str = "",
        rank: int = 0,
        world_size: int = 0,
        pad: bool = False,
        shares: bool = False,
        start: m.Start = "beginning",
        made: Callable[..., Consumer] | None = None,
        **habits: Any,
    ) -> Consumer:
        """Open a stream for a new consumer with these habits; see Consumer. `made`: makes the consumer."""
        name = self.random.randbytes(16)
        ask = OpenRequest(
            credit,
            credit_bytes,
            quota,
            position,
            again,
            group,
            rank,
            world_size,
            pad,
            name,
            shares=shares,
            start=start,
        )
        try:
            reader = self.ask(feed, ask)
        except PenstockError:
            self.carry_out()
            raise
        opened = (made or Consumer)(self, reader, reads, ask=ask, position=position or reader.start, **habits)
        self.consumers[reader.number] = opened
        self.carry_out()
        return opened

    # --- the schedule ---

    def run(self) -> None:
        """Continue until all consumers are gone, and check that nothing is left behind.

        Raises:
            Stuck: no step is possible before that.
            Broken: the coordinator broke a promise.
        """
        self.settle()
        waiting = [consumer.number for consumer in self.consumers.values() if not consumer.gone]
        if waiting:
            raise Stuck(f"no step is possible, but consumers {waiting} still wait")
        self._fuse = None
        self._wait()  # a group's stream waits a while for consumers to come back
        self.carry_out()
        self.settle()
        hold(not self.coordinator.streams, f"streams {list(self.coordinator.streams)} never end")
        hold(not self.arena.used, f"the slots of tickets {list(self.arena.used)} are never freed")
        hold(self.coordinator.budget.nbytes_reserved == 0, "memory stays reserved")
        for worker in list(self.workers.values()):
            hold(not worker.runs and not worker.fills, f"worker {worker.number} keeps runs {list(worker.runs)}")
        kept = [feed.name for feed, _ in self._lists.values() if feed.dynamic]
        hold(not kept, f"lists of splits of {kept} are never forgotten")
        hold(self._state is None or not self._state.load(), "groups are kept that nobody reads")

    def settle(self) -> None:
        """Take steps until none is possible."""
        while self.step():
            self.expect_an_end()

    def expect_an_end(self) -> None:
        """Raise an error after far more steps than any run needs."""
        if self.steps > MOST_STEPS * max(1, len(self.consumers)):
            raise Stuck(f"no end after {self.steps} steps")

    def step(self) -> bool:
        """Take one step, if any is possible."""
        if self._crash is not None and self._crash[0] <= self.steps:
            self.workers[self._crash[1]].die()
            self._crash = None
        choices = list(self._choices()) or list(self._late_choices())
        if not choices:
            return False
        self.steps += 1
        weights = [self._pace_of(actor) for actor, _ in choices]
        ((_, event),) = self.random.choices(choices, weights)
        event()
        self.carry_out()
        if not self._checked:
            self.check()
        return True

    def _pace_of(self, actor: object) -> float:
        """Return how likely this actor is to act. It is drawn once for each actor."""
        pace = self._pace.get(actor)
        if pace is None:
            pace = self._pace[actor] = self.random.choice((1, 1, 0.1, 0.01))
        return pace

    def is_forged(self, run: int) -> bool:
        """Return whether an attacker may have chosen the record at which the run begins."""
        return run // IDS_PER_STREAM in self.forged

    def raises(self, feed: SimFeed, sample: Sample) -> bool:
        """Count a reading of this sample, and return whether it raises."""
        key = feed.name, sample
        if key not in self._raises:
            return False
        self._readings[key] += 1
        return self._readings[key] - 1 in self._raises[key]

    def attack(self, feed: str = "train", acts: int = 50, group: str = "") -> None:
        """Add an attacker that takes this many steps."""
        self.attackers.append(Attacker(self, feed, acts, group))

    def _choices(self) -> Iterator[tuple[object, Event]]:
        for attacker in self.attackers:
            if attacker.acts:
                yield attacker, attacker.act
        for stream, wishes in self._waiting.items():
            if wishes:
                yield ("slots", stream), partial(self._serve, wishes)
        if self.ends:
            yield "ends", partial(_arrive, self.ends)
        if self.looks and len(self.coordinator.streams) > 1 and self.coordinator.periodic_checks.due:
            yield "looks", self._look
        if (
            len(self.coordinator.timers.times) > self.coordinator.periodic_checks.due
        ):  # a timer besides periodic_checks's
            yield "clock", self._tick
        if any(not consumer.gone for consumer in self.consumers.values()):
            for fault, left in self.faults.items():
                if left and self.steps >= self._due[fault]:
                    yield fault, getattr(self, f"_{fault}")
        yield from self.hosts.choices()
        for worker in list(self.workers.values()):
            if worker.answers:
                yield (worker.number, "answers"), partial(_arrive, worker.answers)
            if not worker.started:
                if worker.alive:
                    yield (worker.number, "starts"), partial(self._started, worker)
                continue
            if worker.alive and worker.stands is not None and worker.hung:
                continue
            if worker.alive and worker.stands is not None:
                yield (worker.number, "stands"), partial(self._tell_that_it_stands, worker)
                yield (worker.number, "goes on"), worker.go_on
                continue
            if worker.number in self._stood:
                yield (worker.number, "has gone on"), partial(self._tell_that_it_goes_on, worker)
            if worker.alive and worker.told:
                yield (worker.number, "told"), partial(_arrive, worker.told)
            if worker.alive and not worker.hung and worker.next_fill() is not None:
                yield (worker.number, "makes"), worker.make
        for number, consumer in list(self.consumers.items()):
            if consumer.told and not consumer.gone:
                yield ("consumer", number, "told"), partial(_arrive, consumer.told)
            if consumer.says:
                yield ("consumer", number, "says"), partial(_arrive, consumer.says)
            for option in consumer.options():
                yield ("consumer", number, option.__name__), option

    def _late_choices(self) -> Iterator[tuple[object, Event]]:
        """Yield the steps for a world in which nothing else can happen.

        Hosts send what they keep. If there is no worker that makes batches, a host joins. Otherwise time passes, until
        the daemon gives up the consumers of a group that it waits for.
        """
        yield from self.hosts.late_choices()
        there = any(not consumer.gone for consumer in self.consumers.values())
        if there and self.coordinator.workers.available == [VACANT]:
            yield "join", self.hosts.join
            return
        for stream in self.coordinator.streams.values():
            if stream.group_log is not None and stream.group_log.awaited:
                yield "clock", self._wait
                return

    def _wait(self) -> None:
        """Let a long time pass."""
        for _ in range(2):
            self.wait(2 * PATIENCE)

    def _look(self) -> None:
        """Let a second pass, so that the coordinator looks whether streams have met."""
        self.looks -= 1
        self.wait(1.0)

    def _tick(self) -> None:
        """Let the coordinator do something that is due."""
        self._now = max(self._now, self.random.choice(self.coordinator.timers.times))
        self.handle(on.Tick())

    def check(self) -> None:
        """Check what must hold after every event."""
        self._checked = True
        coordinator = self.coordinator
        found = coordinator.check()
        hold(not found, "; ".join(found))
        hold(self.arena.nbytes <= coordinator.budget.nbytes_reserved, f"slots take {self.arena.nbytes} bytes")
        for stream in coordinator.streams.values():
            # Old slots may exist beside the larger ones that replace them, and slots of consumers that left a group.
            if not (self.feeds[stream.feed.name].growth or stream._delivery.shared):
                most = stream.taken()[1] + (stream.sharing.window.slots if stream.sharing else 0)
                most += stream.remaking.unwanted  # a job that is gone needed these slots
                hold(len(stream.slots) <= most, f"stream {stream.number} holds {len(stream.slots)} slots of {most}")

    # --- what the host does for the coordinator ---

    def listed(self, run: int, feed: SimFeed, epoch: int) -> None:
        """Tell the coordinator that a worker has listed the splits of an epoch."""
        self._last_list += 1
        self._lists[self._last_list] = feed, epoch
        count = ENDLESS if feed.endless else len(feed.splits)
        splits = SplitsInfo(self._last_list, count if feed.length is None else 0, bytes(32))
        if run >= IDS_PER_STREAM:
            self.handle(on.SplitsListed(run, splits))
        else:
            nbytes = feed.nbytes(((0, 0, 0),)) - 64 if feed.batch_size is None else 8 + 8 * feed.growth
            self.handle(on.SplitsListed(run, splits, feed.spec(), nbytes, sample_spec=feed.sample_spec()))

    def hear(self, worker: int, event: on.Event) -> None:
        """Hear what a worker says."""
        if self.hosts.believes(worker, event):
            self.handle(event)

    def bury(self, worker: Worker) -> None:
        """Tell the coordinator of a worker's death, and start another worker with the same number."""
        if self.workers.get(worker.number) is worker:
            self.hosts.ended(worker.number)
            self.workers[worker.number] = Worker(self, worker.number)
            self.workers[worker.number].started = False
            self.workers[worker.number].alive = not self.hosts.is_lost(worker.number)
            self.handle(on.WorkerDied(worker.number, "was killed by SIGKILL", worker.blamed))

    def _started(self, worker: Worker) -> None:
        worker.started = True
        self.handle(self.imports(worker.number))

    # --- faults ---

    def _when(self) -> int:
        """Return the first step at which the next fault may come. Early faults find little to break."""
        return self.steps + self.random.choice((0, 0, 20, 60, 150, 300))

    def _kill(self) -> None:
        self.faults["kill"] -= 1
        self._due["kill"] = self._when()
        living = [worker for worker in self.workers.values() if worker.alive]
        if living:
            self.random.choice(living).die()

    def _cut(self) -> None:
        self.faults["cut"] -= 1
        self._due["cut"] = self._when()
        there = [consumer for consumer in self.consumers.values() if not (consumer.gone or consumer.lost)]
        if there:
            self.random.choice(there).cut()

    def _restart(self) -> None:
        """Kill the daemon with its workers, and start another daemon: now, or within the next commands."""
        self.faults["restart"] -= 1
        self._due["restart"] = self._when()
        if self._state is not None and self._fuse is None and self.random.random() < 0.7:
            self._fuse = self.random.randrange(8)
        else:
            self._start_again()

    def _start_again(self) -> None:
        self._fuse = None
        for consumer in self.consumers.values():
            while self.random.random() < 0.6:
                consumer.last_act()
            if not consumer.gone:
                consumer.cut()
            if consumer.closed:
                consumer.gone = True
            consumer.opening = False
        old = list(self.consumers.values())
        own = 1 if self._idle else len([number for number in self.workers if number < REMOTE])
        if hosts := self.hosts.leave_behind():
            self.faults["join"] += hosts
        self.coordinator = self._new_coordinator(own, self._memory)
        self.arena = Arena(self._refused)
        self._waiting, self._lists = {}, {}
        self._commands.clear()
        self.ends.clear()
        self._muted.clear()
        self._unkept.clear()
        self._stood.clear()
        self.workers = {number: Worker(self, number) for number in range(own)}
        self.consumers = {}
        while len(self.coordinator.feeds) != len(self.feeds):
            self.handle(self.imports(0))
            self.carry_out()
            self.settle()
        self.consumers = {-1 - number: consumer for number, consumer in enumerate(old)}
        for number, consumer in self.consumers.items():
            consumer.number = number

    def _full(self) -> None:
        """Let the disk of the state file be full for a while."""
        self.faults["full"] -= 1
        self._due["full"] = self._when()
        self._cannot_write = self.random.randrange(1, 6)

    def _stand(self) -> None:
        """Let one of the daemon's own workers stand in a step."""
        self.faults["stand"] -= 1
        self._due["stand"] = self._when()
        free = [worker for number, worker in self.workers.items() if number < REMOTE and worker.alive]
        free = [worker for worker in free if worker.started and worker.stands is None and not worker.hung]
        if free:
            self.random.choice(free).stand()

    def _tell_that_it_stands(self, worker: Worker) -> None:
        assert worker.stands is not None
        self._stood.add(worker.number)
        self.handle(on.WorkerStands(worker.number, worker.stands, self.random.choice((1.0, 10.0))))

    def _tell_that_it_goes_on(self, worker: Worker) -> None:
        self._stood.discard(worker.number)
        self.handle(on.WorkerGoesOn(worker.number))

    def replay_ms(self) -> int:
        """Return how long it takes to read again what was made."""
        return self.random.choice((0, 0, 5000)) if "stand" in self.faults else 0

    def _scale(self) -> None:
        self.faults["scale"] -= 1
        self._due["scale"] = self._when()
        staying = self.coordinator.workers.scaled
        if self.random.random() < 0.5 or len(staying) <= (0 if self._idle else 1):
            self.add_worker(min(set(range(len(self.workers) + 1)) - set(self.workers)))
        else:
            number = self.random.choice(staying)
            self.handle(on.RetireWorkers((number,), now=self.random.random() < 0.2))

    def add_worker(self, number: int, machine: str = "") -> None:
        """Add a worker that has not imported the feeds yet."""
        self.workers[number] = Worker(self, number)
        self.workers[number].started = False
        self.handle(on.WorkerAdded(number, machine))

    def _join(self) -> None:
        self.faults["join"] -= 1
        self._due["join"] = self._when()
        self.hosts.join()

    def _leave(self) -> None:
        self.faults["leave"] -= 1
        self._due["leave"] = self._when()
        self.hosts.leave()

    def _lose(self) -> None:
        self.faults["lose"] -= 1
        self._due["lose"] = self._when()
        self.hosts.lose()

    # --- commands ---

    def carry_out(self) -> None:
        while self._commands:
            if self._fuse == 0:
                self._start_again()
                return
            self._fuse = self._fuse and self._fuse - 1
            command = self._commands.popleft()
            self.hosts.tell(command)
            getattr(self, f"_do_{type(command).__name__}")(command)
        self._unkept.clear()

    def _tell(self, worker: int, event: Callable[..., object], *values: object) -> None:
        if self.workers[worker].alive:
            undecodable = any(isinstance(one, Struct) and not _fits(one) for one in values)
            told = partial(self.workers[worker].end, None) if undecodable else partial(event, *values)
            self.workers[worker].told.append(told)

    def _do_ListSplits(self, command: do.ListSplits) -> None:
        hold(command.worker < REMOTE, f"remote worker {command.worker} is told to list splits")
        worker = self.workers[command.worker]
        self._tell(command.worker, worker.list_splits, command.run, self.feeds[command.feed], command.epoch)

    def _do_ForgetSplits(self, command: do.ForgetSplits) -> None:
        del self._lists[command.splits]

    def _do_StartRun(self, command: do.StartRun) -> None:
        feed = self.feeds[command.feed]
        if feed.dynamic:
            hold(self._lists.get(command.splits) == (feed, command.epoch), f"no list {command.splits} of this epoch")
        crew = self.coordinator.workers
        hold(command.worker not in crew.idle, f"worker {command.worker}, which makes no batches, gets a run")
        staying = {*crew.makers} - crew.leaving
        able = [number for number, worker in self.workers.items() if worker.started and number in staying]
        hold(command.worker in able or not able, f"worker {command.worker}, which is away or leaving, gets a run")
        self._tell(command.worker, self.workers[command.worker].start_run, command, feed)

    def _do_FindSlot(self, command: do.FindSlot) -> None:
        # A slot is found at once or later. The tickets of one stream keep their order.
        wishes = self._waiting.setdefault(command.ticket // IDS_PER_STREAM, deque())
        wishes.append(command)
        if len(wishes) == 1 and self.arena.has_memory and self.random.random() < 0.7:
            self._serve(wishes)

    def _serve(self, wishes: deque[do.FindSlot]) -> None:
        """Find a slot for the first of these requests."""
        wish = wishes.popleft()
        if self.arena.take(wish.ticket, wish.nbytes) is None:
            self.handle(on.NoSlot(wish.ticket, MemoryBound("the machine has no memory")))
        else:
            self.handle(on.SlotFound(wish.ticket))

    def _do_Fill(self, command: do.Fill) -> None:
        worker, slot = self.workers[command.worker], self.arena.used[command.slot]
        others = [run for one, run in slot.fillers if run != command.run and one.alive and one.fills_of(run)]
        hold(
            not others or command.stripe is not None,
            f"run {command.run} is told to fill ticket {command.ticket} beside run {others}",
        )
        slot.fillers.add((worker, command.run))
        hold(not command.may_stay or command.worker >= REMOTE, "batches of an own worker cannot stay at a host")
        stays = command.may_stay and self.random.random() < 0.7
        places = command.first, command.slot, command.step
        may_stop = command.most_ms > 0
        fill = Fill(command.ticket, command.run, command.index, command.batches, slot, *places, stays, may_stop)
        self._tell(command.worker, lambda fill, _: worker.fill(fill), fill, command)

    def _do_Remade(self, command: do.Remade) -> None:
        slot = self.arena.used[command.ticket]
        for position, batch in slot.lost.items():
            if command.whole:
                hold(slot.read(command.ticket, position) == batch, f"batch {position} was not made again")
            slot.content[position] = list(batch)  # a batch that is not made again is never read, but may be copied
        slot.lost.clear()
        slot.unreadable = not command.whole

    def _do_WriteRows(self, command: do.WriteRows | do.MeasureRows) -> None:
        worker, slot = self.workers[command.worker], self.arena.used[command.ticket]
        slot.fillers.add((worker, command.run))
        self._tell(command.worker, worker.leftover, command, slot)

    _do_MeasureRows = _do_WriteRows

    def _do_PoolRows(self, command: do.PoolRows) -> None:
        hold(command.worker < REMOTE, f"remote worker {command.worker} is told to mix rows")
        worker, slot = self.workers[command.worker], self.arena.used[command.ticket]
        slot.fillers.add((worker, command.run))
        worker.pooling.add(command.run)
        sources = [self.arena.used[ticket] for ticket, _ in command.sources]
        self._tell(command.worker, worker.pool_rows, command, self.feeds[command.feed], slot, sources)

    def _do_TransformRows(self, command: do.TransformRows) -> None:
        hold(command.worker < REMOTE, f"remote worker {command.worker} is told to transform a batch")
        worker, slot = self.workers[command.worker], self.arena.used[command.ticket]
        slot.fillers.add((worker, command.run))
        worker.pooling.add(command.run)
        self._tell(command.worker, worker.transform_rows, command, self.feeds[command.feed], slot)

    def _do_DropRun(self, command: do.DropRun) -> None:
        worker = self.workers[command.worker]
        worker.to_drop.add(command.run)
        if worker.stands not in (None, command.run):
            worker.revoked.add(command.run)
        self._tell(command.worker, worker.drop_run, command.run)

    def _do_KillWorker(self, command: do.KillWorker) -> None:
        if self.workers[command.worker].alive:
            self.workers[command.worker].end(None)  # no split is to blame

    def _do_AcceptWorker(self, command: do.AcceptWorker) -> None:
        """Do nothing: the worker has already begun."""

    def _do_RejectWorker(self, command: do.RejectWorker) -> None:
        raise Broken(f"worker {command.worker} is rejected, but imported the same feeds as the others")

    def _do_ReportSkipped(self, command: do.ReportSkipped) -> None:
        """Do nothing: a daemon only logs it."""

    def _do_Retire(self, command: do.Retire) -> None:
        worker = self.workers.pop(command.worker)
        working = [number for number, run in worker.runs.items() if not run.failed]
        hold(not (worker.alive and working and not worker.told), f"a worker with runs {working} is retired")
        worker.alive = False

    def _do_Tell(self, command: do.Tell) -> None:
        hold(_fits(command.message), f"{command.message} cannot be encoded")
        consumer = self.consumers.get(command.consumer)
        muted = command.consumer in self._muted and not isinstance(command.message, m.Failed)
        if consumer is not None and not (consumer.gone or consumer.lost or muted):
            consumer.told.append(partial(consumer.hear, command.message))

    def _do_Free(self, command: do.Free) -> None:
        self.arena.free(command.ticket)
        for wishes in self._waiting.values():
            for wish in [wish for wish in wishes if wish.ticket == command.ticket]:
                wishes.remove(wish)

    def _do_SendSlab(self, command: do.SendSlab) -> None:
        consumer, slot = self.consumers.get(command.consumer), self.arena.used[command.ticket]
        if consumer is None:
            return  # the slot may belong to another stream by now
        feed = self.feeds[consumer.stream.feed.name]
        first = command.first
        places = range(first, first + command.batches * command.stride, command.stride)
        batches = {place: slot.lost.get(place) or slot.read(command.ticket, place) for place in places}
        hold(command.rows == sum(map(feed.rows, batches.values())), "a slab has the wrong number of rows")
        merged = feed.transforms and command.lane == TAIL_LANE and not command.repeat
        hold(not merged or slot.transformed, "a merged batch is sent that was not transformed")
        nbytes = feed.nbytes(batches[first], command.batches)
        hold(command.nbytes == nbytes, "a slab has the wrong number of bytes")
        hold(command.shapes == feed.shapes(batches[first]), "a slab has the wrong shapes")
        shared = command.lane < 0 or command.repeat or feed.striped or feed.ranges_vary
        hold(shared or command.index % feed.turn >= first, "a slab has the wrong index")
        slabs, nbytes = consumer.under_way
        credit = consumer.reader.share.credit
        hold(slabs <= credit, f"{slabs} slabs are under way with a credit of {credit}")
        hold(slabs == 1 or nbytes <= consumer.reader._credit_bytes, f"{nbytes} bytes are under way")
        if not consumer.stream._delivery.shared:
            again = slot.sent & batches.keys()
            alone = again and not (command.shared and slot.alone.isdisjoint(again))
            hold(not alone, f"batches {again} of {command.ticket} are sent again, and somebody may write to them")
            slot.alone.update(() if command.shared else batches)
        slot.sent.update(batches)
        if not (consumer.gone or consumer.lost or command.consumer in self._muted):
            slot.readers.add((consumer, command.seq))
            message = m.Slab(
                command.seq,
                command.epoch,
                command.lane,
                command.index,
                command.batches,
                command.rows,
                command.nbytes,
                record=command.record,
                repeat=command.repeat,
                lanes=command.lanes,
                places=command.places,
                stride=command.stride,
            )
            slab = Slab(command.seq, command.epoch, command.ticket, slot, command.nbytes, batches, message)
            consumer.told.append(partial(consumer.slab, slab))

    def _do_SaveGroup(self, command: do.SaveGroup) -> None:
        assert self._state is not None
        key = command.feed.name, command.group
        if key in self._unkept:
            return
        if not self._cannot_write:
            self._state.keep(command)
            return
        self._cannot_write -= 1
        self._unkept.add(key)
        self._muted.update(self.coordinator.readers_of_group(*key))
        self.handle(on.NotSaved(*key, self._state.kept(*key), DaemonStopped("the disk is full")))

    def _do_ForgetGroup(self, command: do.ForgetGroup) -> None:
        assert self._state is not None
        self._state.forget(command.feed, command.group)

    def _do_FeedReady(self, command: do.FeedReady) -> None:
        self.ready.append(command.feed)

    def _do_ReportBug(self, command: do.ReportBug) -> None:
        raise command.error

    def _do_FailStart(self, command: do.FailStart) -> None:
        self.refusals.append(command.error)


def _record(record: bytes) -> tuple[int, dict[int, int]]:
    """Return the number of the next batch in a restart record, and where splits are cut short (see `Run.record`)."""
    words = [int.from_bytes(record[at : at + 8]) for at in range(0, len(record), 8)]
    return (words[0] if words else 0), dict(zip(words[1::2], words[2::2], strict=False))


def _fits(message: Struct) -> bool:
    """Return whether the codec accepts all numbers of a message."""
    return all(
        not isinstance(value, int) or value <= 2**62
        for value in (getattr(message, n) for n in message.__struct_fields__)
    )


def _arrive(link: deque[Event]) -> None:
    link.popleft()()
