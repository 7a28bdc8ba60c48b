"""A lane of an epoch: how far it was made, and by whom; and in fast order, the sets in which lanes are visited."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock_proto import PenstockError

from .transitions import States, Table, impossible
from .turn import Turn

REMEMBERED = 1024
"""Splits of a lane of which it is known how often they ended a worker, or that they were left out: the latest. (A lane
of an endless feed has no end of them.)"""

Filler: TypeAlias = tuple[int, int]
"""(worker, run)."""


class LaneState(States):
    """Who makes a lane now."""

    FREE = "no run makes it"
    RUNNING = "a run makes it"
    RELEASING = "its run was dropped, and has still to answer for turns"
    PAUSED = "its run failed, and the next try has to wait"
    FAILED = "it cannot go on"


FREE, RUNNING, RELEASING, PAUSED, FAILED = LaneState

LANE_STATES: Table[LaneState] = {
    FREE: {
        RUNNING: "StartRun",
        RELEASING: "its run was dropped just now, and has not answered for all of its turns",
        PAUSED: "user code failed, or a worker died again",
        FAILED: "user code failed, or ended workers too often",
    },
    RUNNING: {
        FREE: "DropRun, as it moves or user code failed; or the worker died",
    },
    RELEASING: {
        FREE: "Made (last) for each of its turns, or the worker died",
        RUNNING: "likewise, and a run writes rows that the ended lane has left over",
        PAUSED: "a worker died again",
        FAILED: "it ended workers too often",
    },
    PAUSED: {
        FREE: "the pause is over",
        RUNNING: "likewise, and a run writes rows that the ended lane has left over",
        RELEASING: "likewise, and a dropped run has still to answer",
        FAILED: "it ended workers too often",
    },
    FAILED: {
        FREE: "of an indexable feed: the turn that was being made has failed in its place",
    },
}
"""From which state a lane goes to which other, and by what.

A lane that has ended may be RELEASING or PAUSED and have a run all the same, which writes its leftover rows.
"""


@dataclass(slots=True, eq=False)
class Lane:
    """How far a lane was made, and by whom. (Of an indexable feed: what one worker makes, whose number is the lane's.)

    Attributes:
        state: who makes it now, in one word.
        run: who makes it now, or None.
        dropped: the run that was told to drop it and has still to answer for turns.
        pause: the run after whose failure it waits.
        error: why it cannot go on.
        turns: visits to it that are not complete, in order.
        index, record: batches that were reported, and the restart record behind them.
        ahead: a later record, of the position from which the epoch goes on, by which it must come.
        border: whether another worker can go on from there without making anything again.
        ended: whether it has no further full batch.
        failures: how often in a row user code raised, or the worker died, since a batch was reported.
        unexplained: how often in a row the worker died outside of user code while it worked on the lane.
        deaths: how often each split (by its number within the lane) ended its worker.
        skip: splits to leave out from the record on.
        skipped: the latest splits that were left out.
        careful: how many batches from the record on are to be reported one by one.
    """

    state: LaneState = FREE
    run: Filler | None = None
    dropped: Filler | None = None
    pause: int | None = None
    error: PenstockError | None = None
    turns: deque[Turn] = field(default_factory=deque)
    index: int = 0
    record: bytes = b""
    ahead: bytes = b""
    border: bool = True
    ended: bool = False
    failures: int = 0
    unexplained: int = 0
    deaths: Counter[int] = field(default_factory=Counter)
    skip: tuple[int, ...] = ()
    skipped: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    careful: int = 0

    def become(self, state: LaneState) -> None:
        """Go to this state, unless it is there.

        Raises:
            ImpossibleTransition: the table has no such transition.
        """
        if state is not self.state:
            if state not in LANE_STATES[self.state]:
                raise impossible(self.state, state)
            self.state = state

    def start(self, run: Filler) -> None:
        """The run makes the lane from now on (or writes its leftover rows)."""
        self.run = run
        if self.state is FREE:
            self.become(RUNNING)

    def stop(self) -> Filler:
        """The lane's run makes it no longer; returns that run."""
        assert self.run is not None
        run, self.run = self.run, None
        if self.state is RUNNING:
            self.become(FREE)
        return run

    def release(self, run: Filler) -> None:
        """The run was dropped, and has still to answer for turns."""
        self.dropped = run
        self.become(RELEASING)

    def released(self) -> None:
        """The dropped run has answered for all of its turns, or is gone."""
        self.dropped = None
        if self.state is RELEASING:
            self.become(self._rest)

    def wait(self, run: int) -> None:
        """Wait before the next try, as this run has failed."""
        self.pause = run
        self.become(PAUSED)

    def waited(self) -> None:
        """The pause is over."""
        self.pause = None
        if self.state is PAUSED:
            self.become(self._rest)

    def fail(self, error: PenstockError) -> None:
        """The lane cannot go on."""
        self.error = error
        self.become(FAILED)

    def failed(self) -> PenstockError | None:
        """Take the error, if there is one: a turn fails with it, and the others can go on."""
        error, self.error = self.error, None
        if error is not None:
            self.become(FREE)
        return error

    @property
    def _rest(self) -> LaneState:
        if self.dropped is not None:
            return RELEASING
        return FREE if self.run is None else RUNNING

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
        """Whether no run may go on with it now."""
        return self.dropped is not None or self.pause is not None

    @property
    def busy(self) -> bool:
        """Whether a worker fills a turn of it."""
        return any(turn.fillers for turn in self.turns)


class LaneSets:
    """In fast order: the sets of lanes that are visited independently of each other, one for each worker.

    Counts how many turns of each set are being made, and says which set has fewest: of several, the one that has waited
    longest.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._filling = [0] * count
        self._by_filling: list[dict[int, None]] = [dict.fromkeys(range(count))]
        self._over: set[int] = set()

    def least(self, below: int) -> int | None:
        """The set that has fewest, if it has fewer than `below`."""
        return next((number for sets in self._by_filling[:below] for number in sets), None)

    def begins(self, number: int) -> None:
        """One more turn of the set is being made."""
        self._move(number, self._filling[number] + 1)

    def ends(self, number: int) -> None:
        """One turn of it is made."""
        self._move(number, self._filling[number] - 1)

    def over(self, number: int) -> None:
        """The set has no lanes left."""
        self._over.add(number)
        del self._by_filling[self._filling[number]][number]

    def _move(self, number: int, filling: int) -> None:
        before, self._filling[number] = self._filling[number], filling
        if number not in self._over:
            del self._by_filling[before][number]
            if filling == len(self._by_filling):
                self._by_filling.append({})
            self._by_filling[filling][number] = None
