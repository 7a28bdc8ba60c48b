"""One epoch of a stream: its order, once its splits are known; how far its lanes are; how much of it was sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock_proto import IncompleteEpoch, PenstockError, StateMismatch
from penstock_proto.batches.position import Position

from ..model.feeds import ServedFeed
from ..model.known_lists import SplitsInfo
from ..model.positions import check
from .lane import Filler, Lane, LaneSets
from .order import EpochOrder, ExactOrder, FastOrder
from .pooled_order import PooledOrder
from .striped_order import StripedOrder
from .visits import LaneVisits, RangeVisits


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """How workers share those lanes of an epoch that have not ended.

    Attributes:
        workers: the workers that may make these lanes.
        least, most: the smallest and the largest number of lanes that one of them makes.
        free: how many lanes have no run. At its next visit such a lane goes to the worker that makes the fewest.
        lacking: how many lanes the workers with less than their share lack in all.
    """

    workers: list[int]
    least: int
    most: int
    free: int
    lacking: int

    @property
    def even(self) -> bool:
        """Whether every lane has a run, and no worker makes two lanes more than another."""
        return not self.free and self.most - self.least < 2


@dataclass(slots=True, eq=False)
class Epoch:
    """What a stream knows of one epoch, from its opening to its close.

    Attributes:
        listing: the worker and run that list the splits now.
        listings, listing_deaths: how often a worker was asked to list them, and how often one died of it.
        listing_pause, listing_failures: with on_error="retry": the failed run after which the next attempt waits, and
            how often listing failed.
        error: why there are no splits, or no order.
        failing: whether a turn in the order has an error, so that nothing after it needs to be made.
        lane_sets: in fast order, the sets of lanes that are visited independently of each other.
        lane_count: how many lanes there are; 1 for an indexable feed.
        moved: whether workers came or went, so that lanes may have to move.
        runs, loads: how many lanes each worker makes, and how many of these have not ended.
        live: how many lanes have not ended, as far as is known.
        skip: how many batches have to be made and dropped first.
        deaths: for an indexable feed: how often each turn, named by its first batch, ended its worker.
        batches, rows: how many were sent or passed over since the start of the epoch.
    """

    number: int
    position: Position | None = None
    listing: Filler | None = None
    listings: int = 0
    listing_deaths: int = 0
    listing_pause: int | None = None
    listing_failures: int = 0
    splits: SplitsInfo | None = None
    order: EpochOrder | None = None
    lanes: dict[int, Lane] = field(default_factory=dict)
    error: PenstockError | None = None
    failing: bool = False
    lane_sets: LaneSets | None = None
    lane_count: int = 1
    moved: bool = False
    runs: Counter[int] = field(default_factory=Counter)
    loads: Counter[int] = field(default_factory=Counter)
    live: int = 0
    _loads: list[Loads] = field(default_factory=list)
    skip: int = 0
    deaths: Counter[int] = field(default_factory=Counter)
    batches: int = 0
    rows: int = 0

    def plan(self, feed: ServedFeed, splits: SplitsInfo, lane_sets: int, *, singly: bool) -> None:
        """Make the order, now that the splits are known. `singly`: batches are delivered one by one.

        Raises:
            StateMismatch: the epoch is to begin at a position that is impossible in it.
        """
        plan, position = feed.plan, self.position
        self.splits = splits
        exact = plan.order == "exact"
        self.lane_sets = None if exact else LaneSets(lane_sets)
        if position is not None:
            check(position, plan, splits)
            self.skip, self.batches, self.rows = position.skip, position.batches, position.rows
        visits: LaneVisits | RangeVisits
        if plan.length is not None:
            assert feed.info.batches is not None
            visits = RangeVisits(feed.info.batches, feed.turn, position.batches if position else 0)
        else:
            self.lane_count = lanes = min(plan.lanes, splits.count)
            self.live = lanes - (len(position.ended) if position else 0)
            visits = LaneVisits(lanes, feed.turn, lane_sets, position, feed.info.pool)
            for place in position.places if position else ():
                lane = Lane(place.lane, index=place.index, record=place.record, ahead=place.ahead, border=False)
                self.lanes[place.lane] = lane
            for over in position.ended if position else ():
                self.lanes[over.lane] = Lane(over.lane, index=over.index, record=over.record, ended=True)
            if feed.info.stripe > 1:
                assert plan.batch_size is not None
                self.order = StripedOrder(
                    visits,
                    batches=feed.info.stripe,
                    most=feed.info.most,
                    batch_size=plan.batch_size,
                    drop_remainder=plan.drop_remainder,
                    singly=singly,
                    position=position,
                )
                return
            if feed.info.pool > 1:
                self.order = PooledOrder(
                    visits,
                    feed.turn,
                    batch_size=plan.batch_size,
                    drop_remainder=plan.drop_remainder,
                    position=position,
                )
                return
        self.order = (ExactOrder if exact else FastOrder)(
            visits, batch_size=plan.batch_size, drop_remainder=plan.drop_remainder, position=position
        )

    @property
    def granting(self) -> bool:
        """Whether more visits can be made, as far as is known."""
        return self.order is None or self.order.more

    def lane(self, key: int) -> Lane:
        """Return the lane with this number (for an indexable feed: the lane of this worker)."""
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(key)
        return lane

    def start(self, lane: Lane, run: Filler) -> None:
        """Let this run make the lane from now on."""
        lane.start(run)
        self.runs[run[0]] += 1
        self.loads[run[0]] += not lane.ended
        self._loads.clear()

    def stop(self, lane: Lane) -> Filler:
        """Take the lane from its run, and return that run."""
        run = lane.stop()
        self.runs[run[0]] -= 1
        self.loads[run[0]] -= not lane.ended
        self._loads.clear()
        return run

    def on_lane_ended(self, lane: Lane) -> None:
        """Note that the lane has no further full batch."""
        if lane.ended:
            return
        if lane.run is not None:
            self.loads[lane.run[0]] -= 1
        self.live -= 1
        self._loads.clear()
        lane.ended = True

    def loads_of(self, workers: list[int], of: int) -> Loads:
        """Return how workers share the lanes that have not ended.

        Args:
            workers: the workers that may make some or all of the lanes; the list must not change.
            of: how many workers make lanes; all have the same share.
        """
        for known in self._loads:  # with many workers the rest takes long
            if known.workers is workers:
                return known
        loads = [self.loads[worker] for worker in workers]
        lacking = sum(max(0, self.live // of - load) for load in loads)
        self._loads.append(Loads(workers, min(loads), max(loads), self.live - self.loads.total(), lacking))
        return self._loads[-1]

    def fault_at_end(self, feed: ServedFeed) -> PenstockError | None:
        """Return the error if the delivered epoch is empty, is incomplete or contradicts the feed; else None."""
        plan, name = feed.plan, feed.name
        assert self.order is not None
        if self.skip:  # not everything that was consumed could be made again
            return StateMismatch(
                f"{self.batches + self.skip} batches of epoch {self.number} were consumed before, and only "
                f"{self.batches} were there when it was read again: the splits have fewer samples now. Restore "
                "them, or begin again from the start",
                feed=name,
            )
        seen = self.batches if plan.batch_size is None else self.rows + self.order.dropped_rows
        wanted = self.rows if plan.length is not None and plan.drop_remainder else feed.info.samples
        if not seen and wanted != 0:
            return IncompleteEpoch(f"epoch {self.number} is empty: the generator yielded nothing", feed=name)
        if wanted is not None and seen != wanted:
            what = "batches" if plan.batch_size is None else "samples"
            said = f"epoch {self.number} had {seen} {what}, but the feed says samples={wanted}"
            return IncompleteEpoch(f"{said}: correct it, or leave it out", feed=name)
        if seen and not self.batches and plan.length is None:  # an indexable feed this short is refused earlier
            said = f"epoch {self.number} had {seen} samples, less than a batch of {plan.batch_size}"
            advice = "make batch_size= smaller, or leave drop_remainder= out"
            return IncompleteEpoch(f"{said}, and drop_remainder=True drops them all: {advice}", feed=name)
        return None
