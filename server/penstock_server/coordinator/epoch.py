"""One epoch of a stream: its order once its splits are known, how far its lanes are, and what was sent of it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock_proto import PenstockError, StateMismatch
from penstock_proto.messages import FeedInfo, FeedPlan, LaneEnded
from penstock_proto.position import Position

from .feeds import ServedFeed, SplitsInfo
from .order import EpochOrder, ExactOrder, FastOrder, LaneVisits, Part, RangeVisits, Turn

REMEMBERED = 1024
"""Splits of a lane of which it is known how often they ended a worker, or that they were left out: the latest. (A lane
of an endless feed has no end of them.)"""

Filler: TypeAlias = tuple[int, int]
"""(worker, run)."""


@dataclass(slots=True, eq=False)
class Lane:
    """How far a lane was made, and by whom. (Of an indexable feed: what one worker makes, whose number is the lane's.)

    Attributes:
        run: who makes it now; None where nobody does, or the last one must let go first.
        turns: visits to it that are not closed, in order.
        index, record: batches that were reported, and the restart record behind them.
        ahead: a later record, of the position from which the epoch goes on, by which it must come.
        border: whether going on from there elsewhere costs next to nothing.
        ended: whether it has no further full batch.
        letting_go: the run that was told to drop it and still has turns to answer.
        pause: the run that failed and after which it waits, where the feed says "retry".
        failures: how often in a row user code raised, or the worker died, since a batch was reported.
        unexplained: how often in a row the worker died outside of user code while it worked on the lane.
        deaths: how often each split (by its number within the lane) ended its worker.
        skip: splits to leave out from the record on.
        skipped: the latest splits that were left out.
        careful: how many batches from the record on are to be reported at once.
        error: why it cannot be gone on with.
    """

    run: Filler | None = None
    turns: deque[Turn] = field(default_factory=deque)
    index: int = 0
    record: bytes = b""
    ahead: bytes = b""
    border: bool = True
    ended: bool = False
    letting_go: Filler | None = None
    pause: int | None = None
    failures: int = 0
    unexplained: int = 0
    deaths: Counter[int] = field(default_factory=Counter)
    skip: tuple[int, ...] = ()
    skipped: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    careful: int = 0
    error: PenstockError | None = None

    def blame(self, split: int) -> int:
        """The split has ended its worker (-1: no split has, but it died at this lane); returns how often by now."""
        if split < 0:
            self.unexplained += 1
            return self.unexplained
        self.deaths[split] += 1
        if len(self.deaths) > REMEMBERED:
            del self.deaths[next(iter(self.deaths))]
        return self.deaths[split]

    @property
    def waits(self) -> bool:
        """Whether nobody may go on with it now."""
        return self.letting_go is not None or self.pause is not None

    @property
    def busy(self) -> bool:
        """Whether a worker fills a turn of it."""
        return any(turn.fillers for turn in self.turns)


class Groups:
    """The groups in which lanes take turns apart from each other: how many turns of each are being made, and which
    group has fewest. Of those with as few it is the one that has waited longest."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._filling = [0] * count
        self._by_filling: list[dict[int, None]] = [dict.fromkeys(range(count))]
        self._over: set[int] = set()

    def least(self, below: int) -> int | None:
        """The group that has fewest, if it has fewer than `below`."""
        return next((group for groups in self._by_filling[:below] for group in groups), None)

    def begins(self, group: int) -> None:
        """One turn more of the group is being made."""
        self._move(group, self._filling[group] + 1)

    def ends(self, group: int) -> None:
        """One turn of it is made."""
        self._move(group, self._filling[group] - 1)

    def over(self, group: int) -> None:
        """The group has no lanes any more."""
        self._over.add(group)
        del self._by_filling[self._filling[group]][group]

    def _move(self, group: int, filling: int) -> None:
        before, self._filling[group] = self._filling[group], filling
        if group not in self._over:
            del self._by_filling[before][group]
            if filling == len(self._by_filling):
                self._by_filling.append({})
            self._by_filling[filling][group] = None


@dataclass(slots=True, eq=False)
class Epoch:
    """See the file's head.

    Attributes:
        listing: who lists the splits now.
        listings, listing_deaths: how often that was asked for, and how often it ended its worker.
        listing_pause, listing_failures: the run that could not and after which it waits, where the feed says "retry",
            and how often that happened.
        error: why there are no splits.
        failing: whether a turn in the order has an error: nothing behind it needs to be made.
        groups: in fast order, the groups in which lanes take turns apart from each other.
        moved: whether workers came or went, so that lanes may have to move.
        runs, loads: how many lanes each worker makes, and how many of these have not ended.
        skip: how many batches are to be made and dropped first.
        deaths: of an indexable feed: how often each turn, by its first batch, ended its worker.
        batches, rows: sent or passed over, counted from the start of the epoch.
        round: where there are several consumers: the batches of the next round, with the lanes that ended among them.
        again: in a group: what a consumer did not hand over, to be sent to another.
        rounds: how many rounds were dealt, counted from the start of the epoch.
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
    groups: Groups | None = None
    moved: bool = False
    runs: Counter[int] = field(default_factory=Counter)
    loads: Counter[int] = field(default_factory=Counter)
    skip: int = 0
    deaths: Counter[int] = field(default_factory=Counter)
    batches: int = 0
    rows: int = 0
    round: list[tuple[Turn, Part] | LaneEnded] = field(default_factory=list)
    rounds: int = 0
    again: deque[tuple[Turn, Part]] = field(default_factory=deque)

    def plan(self, feed: ServedFeed, splits: SplitsInfo, groups: int, consumers: int) -> None:
        """The splits are known: the order can be made.

        Raises:
            StateMismatch: the epoch shall go on from a position that cannot be one in it.
        """
        plan, position = feed.plan, self.position
        self.splits = splits
        exact = plan.order == "exact"
        self.groups = None if exact else Groups(groups)
        if position is not None:
            check(position, plan, splits)
            self.skip, self.batches, self.rows = position.skip, position.batches, position.rows
            self.rounds = (position.batches + position.skip) // max(1, consumers)  # a group may be deserted
        visits: LaneVisits | RangeVisits
        if plan.length is not None:
            assert feed.info.batches is not None
            visits = RangeVisits(feed.info.batches, feed.turn, position.batches if position else 0)
        else:
            visits = LaneVisits(min(plan.lanes, splits.count), feed.turn, groups, position)
            for place in position.places if position else ():
                self.lanes[place.lane] = Lane(index=place.index, record=place.record, ahead=place.ahead, border=False)
            for lane in position.ended if position else ():
                self.lanes[lane.lane] = Lane(index=lane.index, record=lane.record, ended=True)
        self.order = (ExactOrder if exact else FastOrder)(
            visits, batch_size=plan.batch_size, drop_remainder=plan.drop_remainder, position=position
        )

    @property
    def granting(self) -> bool:
        """Whether visits are still to be made, as far as can be known."""
        return self.order is None or self.order.more

    @property
    def dealt_next(self) -> list[tuple[Turn, Part]]:
        """The batches of the round, by rank."""
        return [item for item in self.round if isinstance(item, tuple)]

    @property
    def in_round(self) -> int:
        """How many these are."""
        return len(self.dealt_next)

    def lane(self, key: int) -> Lane:
        """The lane with this number (for an indexable feed: of this worker)."""
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane()
        return lane

    def start(self, lane: Lane, filler: Filler) -> None:
        """The lane is made by this run from now on."""
        lane.run = filler
        self.runs[filler[0]] += 1
        self.loads[filler[0]] += not lane.ended

    def stop(self, lane: Lane) -> Filler:
        """The lane's run makes it no longer; returns which that was."""
        assert lane.run is not None
        filler, lane.run = lane.run, None
        self.runs[filler[0]] -= 1
        self.loads[filler[0]] -= not lane.ended
        return filler

    def end(self, lane: Lane) -> None:
        """The lane has no further full batch."""
        if not lane.ended and lane.run is not None:
            self.loads[lane.run[0]] -= 1
        lane.ended = True


def check_counts(position: Position, info: FeedInfo) -> None:
    """Refuse a position that is at no place in a stream of this feed, whatever its splits.

    Raises:
        StateMismatch: names the number that does not fit.
    """
    lanes = [place.lane for place in position.places] + [lane.lane for lane in position.ended]
    highest = max(lanes, default=-1)
    batches = position.batches + position.skip
    if highest >= info.lanes:
        why = f"lane {highest}, and the feed has {info.lanes}"
    elif info.batches is not None and batches > info.batches:
        why = f"{batches} batches, and an epoch of the feed has {info.batches}"
    else:
        return
    raise StateMismatch(f"{_DAMAGED} ({why})", feed=info.name)


def check(position: Position, plan: FeedPlan, splits: SplitsInfo) -> None:
    """Refuse a position that cannot be one in this list of splits.

    Raises:
        StateMismatch: says what does not fit.
    """
    name = plan.name
    if position.digest and position.digest != splits.digest:
        raise StateMismatch(
            f"the list of splits of epoch {position.epoch} is another one now: its SHA-256 was "
            f"{position.digest.hex()[:16]} and is {splits.digest.hex()[:16]}, of {splits.count} splits. The stream can "
            "only go on with the same splits in the same order: bring them back, or begin anew",
            feed=name,
        )
    lanes = [place.lane for place in position.places] + [lane.lane for lane in position.ended]
    count = 0 if plan.length is not None else min(plan.lanes, splits.count)
    fits = len(set(lanes)) == len(lanes) and max(lanes, default=0) < max(count, 1)
    if plan.length is not None:
        fits = not lanes and position.batches + position.skip <= -(-plan.length // (plan.batch_size or 1))
    elif plan.batch_size is not None:
        fits = fits and all(lane.leftover < plan.batch_size for lane in position.ended)
    if not fits:
        raise StateMismatch(_DAMAGED, feed=name)


_DAMAGED = "the position was not made by this feed, or is damaged"
