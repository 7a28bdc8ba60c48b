"""What the coordinator wants done. The daemon carries these out in order; nothing here does anything by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from penstock_proto import PenstockError
from penstock_proto.messages import Shapes


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
    """Open a run in `worker`: one lane of an epoch, or the epoch of an indexable feed (lane 0, splits 0)."""

    worker: int
    run: int
    feed: str
    epoch: int
    lane: int
    splits: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Give `ticket` a slot of at least `nbytes` and have `worker` fill it with the run's next turn.

    A ticket that has a slot already (too small for the batch) loses it for the new one.
    """

    worker: int
    run: int
    ticket: int
    index: int
    batches: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Some leftover rows of one run: `count` from its row `start`, to row `row` of the merged batch."""

    worker: int
    run: int
    start: int
    count: int
    row: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Give `ticket` a slot of `nbytes` and have the workers write the parts of merged batch `index` into it."""

    ticket: int
    nbytes: int
    parts: tuple[Rows, ...]
    rows: int
    index: int


@dataclass(frozen=True, slots=True)
class DropRun:
    """The run is not needed any more."""

    worker: int
    run: int


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody reads or writes the ticket's slot any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send one slab: `nbytes` bytes from byte `start` of the ticket's slot. Other fields as in messages.Slab."""

    stream: int
    ticket: int
    start: int
    nbytes: int
    seq: int
    epoch: int
    lane: int
    index: int
    batches: int
    rows: int
    shapes: Shapes


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """Tell the consumer that the epoch is complete, with its totals."""

    stream: int
    epoch: int
    slabs: int
    batches: int
    rows: int


@dataclass(frozen=True, slots=True)
class Limit:
    """Tell the consumer its new credit and alias quota."""

    stream: int
    credit: int
    quota: int


@dataclass(frozen=True, slots=True)
class FailStream:
    """Tell the consumer that its stream failed."""

    stream: int
    error: PenstockError


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
    | Grant
    | Merge
    | DropRun
    | Free
    | Deliver
    | EndEpoch
    | Limit
    | FailStream
    | FeedReady
    | RefuseStart
)
