"""A turn: a visit to a lane, a merged batch, or batches of a pool. Its data, and its states from plan to delivery."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec import Struct

from penstock_proto import PenstockError
from penstock_proto.batches.columns import Sizes
from penstock_proto.batches.layout import POOL_LANE, TAIL_LANE
from penstock_proto.messages import LanePlace, Shapes

from .leases import NO_SLOT, Lease
from .transitions import States, Table, impossible


class Part(Struct, frozen=True):
    """Batches of a turn that are ready: `batches` of them, from place `first` of its slot on.

    `record`: the lane's restart record after the last of them. `skipped`: splits were skipped when that batch was made.
    Earlier records do not list them, so the part is not joined to the next one. `lanes` and `places`, for a part of a
    stripe or without its end, are as in messages.Slab.
    """

    first: int
    batches: int
    rows: int
    shapes: Shapes
    record: bytes = b""
    lanes: tuple[int, ...] = ()
    places: tuple[LanePlace, ...] = ()
    skipped: bool = False


class Leftover(Struct, frozen=True):
    """`count` of the rows that `lane` has left over, from row `start` on."""

    lane: int
    start: int
    count: int


class TurnState(States):
    """The progress of a turn."""

    PLANNED = "it has its place in the order, but no slot"
    WAITING = "a slot was asked for"
    IDLE = "its slot is there, and no run fills it"
    FILLING = "one run fills it, or several write the rows of a merged batch"
    COMPLETE = "no run fills it; its batches, error or end wait until the order comes to them"
    ABANDONED = "it has left the order, but a run still has to answer for it"
    DONE = "it has left the order, and no run fills it"


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
        IDLE: "its worker died or is lost, its run was dropped or failed, or RowsMeasured tells the last sizes",
        WAITING: "NeedRoom, or the last RowsMeasured: the slot is too small",
        COMPLETE: "Made (last), or the last RowsWritten, or a worker could not mix or transform rows",
        ABANDONED: "its epoch is closed",
    },
    COMPLETE: {
        DONE: "all of it was delivered, or all of its pool is mixed, or its epoch is closed",
    },
    ABANDONED: {
        DONE: "Made (last), or the run is gone",
    },
    DONE: {},
}
"""The states that a turn can go to from each state, and the reasons."""


_COMPLETE = frozenset({COMPLETE, DONE})
_LEFT_ORDER = frozenset({ABANDONED, DONE})


@dataclass(slots=True, eq=False)
class VisitPool:
    """Visits whose rows are mixed with each other: visit number `number` to each of the lanes of part `part`.

    Attributes:
        serial: larger for each pool of the epoch.
        visits: the visits, by lane.
        formed: whether all of them are made, so that the number of its batches is known.
        index: the number of its first batch among the pooled batches of the epoch.
        batches: how many it holds.
        turns: the turns into which its batches are put.
        told: whether consumers were told that it begins.
    """

    number: int
    part: int
    serial: int
    visits: list[Turn] = field(default_factory=list)
    formed: bool = False
    index: int = 0
    batches: int = 0
    turns: list[Turn] = field(default_factory=list)
    told: bool = False

    def let_go(self) -> None:
        """Forget the visits and turns of a pool that is over. They refer back to the pool. Without that cycle all of
        them are freed at once."""
        self.visits.clear()
        self.turns.clear()


@dataclass(slots=True, eq=False)
class Turn:
    """Up to `batches` batches in a row, made in one slot.

    Attributes:
        lane: the number of the lane; TAIL_LANE for a merged batch, POOL_LANE for batches with rows of a pool, 0 for any
            range of an indexable feed.
        key: the key of a visit's entry in `Epoch.lanes`: the lane, or for an indexable feed the worker that makes it.
        index: the number of its first batch in the lane (or among the merged batches).
        batches: the most batches that it may have.
        leftovers: for a merged batch: the rows that it is made of.
        pool: the pool that it is a visit of, or has rows of; else None.
        place, step: where its batches lie in its slot: the place of the first, and how many places the next is after
            it.
        striped: whether it is a visit of a stripe.
        ticket: the ticket for which its runs answer, from WAITING on.
        sizes: for a merged batch whose samples vary in size: the sizes of the leftovers that are measured.
        shapes: for such a batch: the shapes of its stored arrays, once all leftovers are measured.
        measuring: for such a batch: whether its fillers measure rows, and do not write them.
        transforming: for a merged batch: whether its rows are written, and its filler applies the `batch_transform`.
        failures: how often the filler of this batch, or of batches of a pool, has failed or died in user code.
        paused: for a merged batch: the leftovers that nobody writes before the pause of their lane is over.
        parts: batches that are made and not delivered.
        ended: whether it ended its lane.
        leftover: how many rows the lane has left over then. (`leftovers` are the rows of a merged batch.)
        error: why the stream fails when this turn is next, or None.
        number: for a turn that ended its lane: how many lanes ended before it in the stream; else -1.
        foreseen: for a visit in exact order: the number that its first batch is likely to have in the epoch.
        lane_set: in fast order: the set of lanes that it belongs to.
        slot: the lease of its slot, from WAITING on.
        complete: whether no run fills it, now or later: COMPLETE or DONE.
        left_order: whether it was delivered or its epoch is closed: ABANDONED or DONE.
        made: how many batches are made.
        base: how many of them were made before its current run.
        fillers: the (worker, run) pairs that fill it.
        queued: in fast order: whether it is in the queue of ready turns.
        merges: for a visit of a stripe: the merged batches that follow the end of its lane.
    """

    lane: int
    index: int
    batches: int
    key: int = -1
    leftovers: tuple[Leftover, ...] = ()
    state: TurnState = PLANNED
    parts: deque[Part] = field(default_factory=deque)
    ended: bool = False
    leftover: int = 0
    error: PenstockError | None = None
    number: int = -1
    foreseen: int = 0
    lane_set: int = 0
    slot: Lease = NO_SLOT
    complete: bool = False
    left_order: bool = False
    made: int = 0
    base: int = 0
    fillers: list[tuple[int, int]] = field(default_factory=list)
    queued: bool = False
    sizes: dict[Leftover, Sizes] = field(default_factory=dict)
    shapes: Shapes = ()
    measuring: bool = False
    transforming: bool = False
    failures: int = 0
    paused: set[Leftover] = field(default_factory=set)
    pool: VisitPool | None = None
    place: int = 0
    step: int = 1
    striped: bool = False
    ticket: int = -1
    merges: deque[Turn] = field(default_factory=deque)

    def become(self, state: TurnState) -> None:
        """Go to this state.

        Raises:
            ImpossibleTransition: the table has no such transition.
        """
        if state not in TURN_STATES[self.state]:
            raise impossible(self.state, state)
        self.state = state
        self.complete = state in _COMPLETE
        self.left_order = state in _LEFT_ORDER

    def lane_at(self, place: int) -> int:
        """Return the lane of the batch at this place of the slot."""
        return self.lane

    def index_at(self, place: int) -> int:
        """Return the number in its lane of the batch at this place of the slot."""
        return self.index + (place - self.place) // self.step

    @property
    def rows(self) -> int:
        """Rows of a merged batch."""
        return sum(leftover.count for leftover in self.leftovers)

    @property
    def merged(self) -> bool:
        """Whether it is a merged batch, not a visit."""
        return self.lane == TAIL_LANE

    @property
    def pooled(self) -> bool:
        """Whether its batches have rows of a pool."""
        return self.lane == POOL_LANE

    @property
    def shares(self) -> bool:
        """Whether its slot may have batches of other visits, too: it is a visit of a stripe, or a short range."""
        return self.ticket != self.slot.ticket

    @property
    def deliverable(self) -> bool:
        """Whether its parts are delivered as they are. Those of a visit of a pool are not: their rows are mixed."""
        return self.pool is None or self.pooled

    @property
    def shows(self) -> bool:
        """Whether something of it can be delivered: a part, its error or its end."""
        return bool(self.parts) or self.complete or self.error is not None
