"""A turn: one visit to a lane, or one merged batch. What is known of it, and its states from plan to delivery."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

from penstock_proto import PenstockError
from penstock_proto.columns import Sizes
from penstock_proto.layout import TAIL_LANE
from penstock_proto.messages import Shapes

from .slots import NO_SLOT, Lease
from .transitions import States, Table, impossible


class Part(Struct, frozen=True):
    """Batches of a turn that are ready: `batches` of them from position `first` of the turn.

    `record`: the lane's restart record behind the last of them.
    """

    first: int
    batches: int
    rows: int
    shapes: Shapes
    record: bytes = b""


class Leftover(Struct, frozen=True):
    """`count` rows from row `start` of what `lane` has left over."""

    lane: int
    start: int
    count: int


class TurnState(States):
    """Where a turn is on its way."""

    PLANNED = "it stands in the order, and has no slot"
    WAITING = "a slot was asked for"
    IDLE = "its slot is there, and no run fills it"
    FILLING = "one run fills it, or several write the rows of a merged batch"
    COMPLETE = "no run fills it; batches, an error or its end wait for their place in the order"
    ABANDONED = "the order has done with it, and a run has still to answer for it"
    DONE = "the order has done with it, and no run fills it"


PLANNED, WAITING, IDLE, FILLING, COMPLETE, ABANDONED, DONE = TurnState

TURN_STATES: Table[TurnState] = {
    PLANNED: {
        WAITING: "production grants it a slot",
    },
    WAITING: {
        IDLE: "SlotFound",
        COMPLETE: "its lane has failed",
        DONE: "its epoch is closed",
    },
    IDLE: {
        FILLING: "a run is told to fill it",
        COMPLETE: "its lane has ended or failed",
        DONE: "its epoch is closed",
    },
    FILLING: {
        IDLE: "the worker died, the run was dropped or failed, or RowsMeasured tells the last sizes",
        WAITING: "NeedRoom, or the last RowsMeasured: the slot is too small",
        COMPLETE: "Made (last), or the last RowsWritten",
        ABANDONED: "its epoch is closed",
    },
    COMPLETE: {
        DONE: "all of it was delivered, or its epoch is closed",
    },
    ABANDONED: {
        DONE: "Made (last), or the run is gone",
    },
    DONE: {},
}
"""From which state a turn goes to which other, and by what."""


_COMPLETE = frozenset({COMPLETE, DONE})
_SETTLED = frozenset({ABANDONED, DONE})


@dataclass(slots=True, eq=False)
class Turn:
    """See the file's head.

    Attributes:
        lane: the lane's number; TAIL_LANE for a merged batch, 0 for any range of an indexable feed.
        index: the number of its first batch in the lane (or among the merged ones).
        batches: how many it may have.
        leftovers: of a merged batch: what it is made of.
        sizes: of a merged batch whose samples vary in size: those of its leftovers that were measured.
        shapes: of the same: the shapes of its stored arrays, once all are measured.
        measuring: of the same: whether its fillers measure rows, and do not write them.
        parts: batches that were made and not delivered.
        ended: whether it ended its lane.
        leftover: rows that the lane has left over then.
        error: why the stream fails when this turn is next.
        number: of a turn that ended its lane: how many lanes had ended before it in the stream; else -1.
        lane_set: in fast order: the set of lanes of which it is a visit.
        worker: of an indexable feed: who makes it. (What others call its lane is then this worker.)
        slot: the lease of its slot, from WAITING on.
        complete: whether no run fills it, or will: COMPLETE or DONE.
        settled: whether the order has done with it: ABANDONED or DONE.
        made: how many batches are made.
        base: how many of them its present run found made.
        fillers: the (worker, run)s that fill it.
        queued: in fast order: whether it is among those that are ready.
    """

    lane: int
    index: int
    batches: int
    leftovers: tuple[Leftover, ...] = ()
    state: TurnState = PLANNED
    parts: deque[Part] = field(default_factory=deque)
    ended: bool = False
    leftover: int = 0
    error: PenstockError | None = None
    number: int = -1
    lane_set: int = 0
    worker: int = 0
    slot: Lease = NO_SLOT
    complete: bool = False
    settled: bool = False
    made: int = 0
    base: int = 0
    fillers: list[tuple[int, int]] = field(default_factory=list)
    queued: bool = False
    sizes: dict[Leftover, Sizes] = field(default_factory=dict)
    shapes: Shapes = ()
    measuring: bool = False

    def become(self, state: TurnState) -> None:
        """Go to this state.

        Raises:
            ImpossibleTransition: the table has no such transition.
        """
        if state not in TURN_STATES[self.state]:
            raise impossible(self.state, state)
        self.state = state
        self.complete = state in _COMPLETE
        self.settled = state in _SETTLED

    @property
    def rows(self) -> int:
        """Rows of a merged batch."""
        return sum(part.count for part in self.leftovers)

    @property
    def merged(self) -> bool:
        """Whether it is a merged batch, and no visit."""
        return self.lane == TAIL_LANE

    @property
    def shows(self) -> bool:
        """Whether something of it can be delivered: a part, its error or its end."""
        return bool(self.parts) or self.complete or self.error is not None


@dataclass(slots=True, eq=False)
class Repeat:
    """A copy of a batch in a slot of its own. It stands in no order.

    Attributes:
        original: the turn of the batch.
        part: the batch.
        slot: the copy's slot.
        copying: whether the batch is being copied; the copy holds both slots then.
        made: whether the batch has been copied.
    """

    original: Turn
    part: Part
    slot: Lease
    copying: bool = False
    made: bool = False

    @property
    def lane(self) -> int:
        """The lane of the original."""
        return self.original.lane

    @property
    def index(self) -> int:
        """The number in the lane of the original's first batch."""
        return self.original.index


Source: TypeAlias = Turn | Repeat
"""What a slab is sent from."""
