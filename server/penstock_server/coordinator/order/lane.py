"""A lane of an epoch: how far it was made, and which run makes it. Also, for fast order, the sets of lanes."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock_proto import PenstockError

from ..model.transitions import States, Table, impossible
from ..model.turn import Turn

REMEMBERED = 1024
"""How many of the latest splits that ended a worker, or were left out, a lane remembers. (A lane of an endless feed may
have any number of such splits.)"""

Filler: TypeAlias = tuple[int, int]
"""(worker, run)."""


class LaneState(States):
    """The states of a lane: which run makes it now, if any."""

    FREE = "no run makes it"
    RUNNING = "a run makes it"
    DROPPING = "its run was dropped, and still has turns to answer for"
    PAUSED = "its run failed, and the next attempt has to wait"
    FAILED = "it cannot go on"


FREE, RUNNING, DROPPING, PAUSED, FAILED = LaneState

LANE_STATES: Table[LaneState] = {
    FREE: {
        RUNNING: "StartRun",
        DROPPING: "right after DropRun, if the run still has turns to answer for",
        PAUSED: "user code failed, or a worker died again",
        FAILED: "user code failed, or ended workers too often",
    },
    RUNNING: {
        FREE: "DropRun, because the lane moves or user code failed; or the worker died",
    },
    DROPPING: {
        FREE: "Made (last) for each of its turns, or the worker died",
        RUNNING: "the same, while another run writes the leftover rows of the ended lane",
        PAUSED: "a worker died again, or user code failed in that other run",
        FAILED: "it ended workers too often, or user code failed in that other run",
    },
    PAUSED: {
        FREE: "the pause is over",
        RUNNING: "the pause is over, while another run writes the leftover rows of the ended lane",
        DROPPING: "the pause is over, and a dropped run still has turns to answer for",
        FAILED: "it ended workers too often, or user code failed in that other run",
    },
    FAILED: {
        FREE: "only for an indexable feed: the turn that was being made takes the error, and the others go on",
    },
}
"""The states that a lane can go to from each state, and the reasons.

A lane that has ended may be DROPPING or PAUSED and still have a run, which writes its leftover rows.
"""


@dataclass(slots=True, eq=False)
class Lane:
    """A lane. (For an indexable feed: everything that one worker makes. The lane then has the worker's number.)

    Attributes:
        number: its number.
        state: whether a run makes it.
        run: the run that makes it now, or None.
        dropped: the run that was told to drop it and still has turns to answer for.
        pause: the failed run after which the lane waits, or None.
        error: why it cannot go on, or None.
        turns: visits to it that are not complete, in order.
        index, record: how many batches were reported, and the restart record after them.
        ahead: a later record, from the position where the epoch goes on. The lane must reach it again.
        border: whether another worker can go on from `record` without making anything again.
        replay: about how many seconds another worker takes to get to `record`; None before the first report.
        ended: whether it has no further full batch.
        failures: how often user code raised or the worker died since the last batch was reported.
        unexplained: how often the worker died outside of user code since then, while it worked on the lane.
        deaths: how often each split (by its number within the lane) ended its worker.
        skip: the splits to leave out after the record.
        skipped: the latest splits that were left out.
        careful: how many batches after the record have to be reported one by one.
    """

    number: int
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
    replay: float | None = None
    ended: bool = False
    failures: int = 0
    unexplained: int = 0
    deaths: Counter[int] = field(default_factory=Counter)
    skip: tuple[int, ...] = ()
    skipped: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    careful: int = 0

    def become(self, state: LaneState) -> None:
        """Go to this state, unless it is the current one.

        Raises:
            ImpossibleTransition: the table has no such transition.
        """
        if state is not self.state:
            if state not in LANE_STATES[self.state]:
                raise impossible(self.state, state)
            self.state = state

    def start(self, run: Filler) -> None:
        """Let the run make the lane from now on (or write its leftover rows)."""
        self.run = run
        if self.state is FREE:
            self.become(RUNNING)

    def stop(self) -> Filler:
        """Take the lane from its run, and return that run."""
        assert self.run is not None
        run, self.run = self.run, None
        if self.state is RUNNING:
            self.become(FREE)
        return run

    def drop(self, run: Filler) -> None:
        """Note that the run was dropped, and still has turns to answer for."""
        self.dropped = run
        self.become(DROPPING)

    def on_answered(self) -> None:
        """Note that the dropped run has answered for all of its turns, or is gone."""
        self.dropped = None
        if self.state is DROPPING:
            self.become(self._rest)

    def wait(self, run: int) -> None:
        """Make the lane wait before the next attempt, because this run has failed."""
        self.pause = run
        self.become(PAUSED)

    def end_pause(self) -> None:
        """End the pause."""
        self.pause = None
        if self.state is PAUSED:
            self.become(self._rest)

    def fail(self, error: PenstockError) -> None:
        """Fail the lane: it cannot go on."""
        self.error = error
        self.become(FAILED)

    def take_error(self) -> PenstockError | None:
        """Take the error, and return it; None if there is none. One turn will fail with it, and the others can go
        on."""
        error, self.error = self.error, None
        if error is not None:
            self.become(FREE)
        return error

    @property
    def _rest(self) -> LaneState:
        if self.dropped is not None:
            return DROPPING
        return FREE if self.run is None else RUNNING

    def blame(self, split: int) -> int:
        """Count that the split has ended its worker, and return how often it has by now.

        `split` is -1 if the worker died outside of user code, while it worked on this lane.
        """
        if split < 0:
            self.unexplained += 1
            return self.unexplained
        self.deaths[split] += 1
        if len(self.deaths) > REMEMBERED:
            del self.deaths[next(iter(self.deaths))]
        return self.deaths[split]

    @property
    def waits(self) -> bool:
        """Whether no run may go on with it now: a dropped run still has to answer, or the lane is paused."""
        return self.dropped is not None or self.pause is not None

    @property
    def busy(self) -> bool:
        """Whether a worker fills a turn of it."""
        return any(turn.fillers for turn in self.turns)


class LaneSets:
    """In fast order: the sets of lanes that are visited independently of each other, one for each worker.

    Counts the turns of each set that are being made, and tells which set has the fewest. If several do, it is the one
    that has waited longest.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._filling = [0] * count
        self._by_filling: list[dict[int, None]] = [dict.fromkeys(range(count))]
        self._over: set[int] = set()

    def least(self, below: int) -> int | None:
        """Return the set with the fewest turns, if it has fewer than `below`."""
        return next((number for sets in self._by_filling[:below] for number in sets), None)

    def on_turn_begun(self, number: int) -> None:
        """Count one more turn of the set as being made."""
        self._move(number, self._filling[number] + 1)

    def on_turn_ended(self, number: int) -> None:
        """Count one turn of the set as made."""
        self._move(number, self._filling[number] - 1)

    def leave_out(self, number: int) -> None:
        """Leave the set out from now on: it has no lanes left."""
        self._over.add(number)
        del self._by_filling[self._filling[number]][number]

    def _move(self, number: int, filling: int) -> None:
        before, self._filling[number] = self._filling[number], filling
        if number not in self._over:
            del self._by_filling[before][number]
            if filling == len(self._by_filling):
                self._by_filling.append({})
            self._by_filling[filling][number] = None
