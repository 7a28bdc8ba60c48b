"""What the coordinator wants done. The daemon carries these out in order; nothing here does anything by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock_proto import PenstockError
from penstock_proto.messages import Begun, End, Failed, LaneEnded, Opened, Passed, Shapes


@dataclass(frozen=True, slots=True)
class ListSplits:
    """Have `worker` list the splits of `feed` for `epoch`; the answer names `run`."""

    worker: int
    run: int
    feed: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ForgetSplits:
    """Nothing will refer to this list of splits again."""

    splits: int


@dataclass(frozen=True, slots=True)
class StartRun:
    """Open a run in `worker`: one lane of an epoch, or the epoch of an indexable feed (lane 0, splits 0).

    `record`, `skip`, `careful`: as in messages.StartRun.
    """

    worker: int
    run: int
    feed: str
    epoch: int
    lane: int
    splits: int
    record: bytes = b""
    skip: tuple[int, ...] = ()
    careful: bool = False


@dataclass(frozen=True, slots=True)
class FindSlot:
    """Give `ticket` a slot of at least `nbytes`; answered by `Coordinator.slot_found` or `no_slot`.

    Slots are found for the tickets of one stream in the order of these commands. A ticket that has a slot already (too
    small for the batch) loses it for the new one.
    """

    ticket: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Have `worker` fill the ticket's slot from place `first` on with up to `batches` batches, from number `index`."""

    worker: int
    run: int
    ticket: int
    index: int
    batches: int
    first: int


@dataclass(frozen=True, slots=True)
class WriteRows:
    """Have `worker` write `count` leftover rows of the run, from its row `start`, to row `row` of merged batch `index`
    of `rows` rows, in the ticket's slot."""

    worker: int
    run: int
    ticket: int
    start: int
    count: int
    row: int
    rows: int
    index: int


@dataclass(frozen=True, slots=True)
class DropRun:
    """The run is not needed any more. What it was to fill and did not, it answers with no batches."""

    worker: int
    run: int


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody reads or writes the ticket's slot any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send one slab to a reader: `batches` batches from place `first` of the ticket's slot on. Other fields as in
    messages.Slab."""

    reader: int
    ticket: int
    first: int
    nbytes: int
    seq: int
    epoch: int
    lane: int
    index: int
    batches: int
    rows: int
    shapes: Shapes
    record: bytes


Said: TypeAlias = Begun | Passed | LaneEnded | End | Opened | Failed
"""What a reader is told besides slabs."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to a reader."""

    reader: int
    message: Said


@dataclass(frozen=True, slots=True)
class Retry:
    """Call `Coordinator.retry(run)` in so many seconds."""

    seconds: float
    run: int


@dataclass(frozen=True, slots=True)
class Retire:
    """The worker was to leave, and has no work any more: end it."""

    worker: int


@dataclass(frozen=True, slots=True)
class FeedReady:
    """The feed can be consumed. `splits` is how many it has now (0 for an indexable feed)."""

    feed: str
    splits: int


@dataclass(frozen=True, slots=True)
class RefuseStart:
    """A feed cannot be served at all: the daemon ends with this error."""

    error: PenstockError


Command: TypeAlias = (
    ListSplits
    | ForgetSplits
    | StartRun
    | FindSlot
    | Fill
    | WriteRows
    | DropRun
    | Free
    | Deliver
    | Tell
    | Retry
    | Retire
    | FeedReady
    | RefuseStart
)
