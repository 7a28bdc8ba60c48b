"""Commands: what the coordinator wants done. The daemon carries them out in order."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from penstock_proto import PenstockError
from penstock_proto.messages import (
    Begun,
    End,
    Failed,
    FeedInfo,
    LaneEnded,
    MissingRanks,
    Opened,
    PoolBegun,
    SentElsewhere,
    Shapes,
)


class ListSplits(Struct, frozen=True):
    """Have `worker` list the splits of `feed` for `epoch`; the answer names `run`."""

    worker: int
    run: int
    feed: str
    epoch: int


class Compare(Struct, frozen=True):
    """Have `worker` make a feed's first sample again and compare it; fields as in messages.Compare."""

    worker: int
    run: int
    feed: str
    splits: int
    index: int
    digests: bytes


class ForgetSplits(Struct, frozen=True):
    """Nothing will refer to this list of splits again."""

    splits: int


class StartRun(Struct, frozen=True):
    """Open a run in `worker`: one lane of an epoch, or the epoch of an indexable feed (lane 0, splits 0).

    `record`, `skip`, `careful`, `ahead`: as in messages.StartRun.
    """

    worker: int
    run: int
    feed: str
    epoch: int
    lane: int
    splits: int
    record: bytes = b""
    skip: tuple[int, ...] = ()
    careful: int = 0
    ahead: bytes = b""


class FindSlot(Struct, frozen=True):
    """Give `ticket` a slot of at least `nbytes`; answered by `SlotFound` or `NoSlot`.

    Slots are found for the tickets of one stream in the order of these commands. A ticket that has a slot already (too
    small for the batch) loses it for the new one.
    """

    ticket: int
    nbytes: int


class Fill(Struct, frozen=True):
    """Have `worker` fill the ticket's slot from place `first` on with up to `batches` batches, from number `index`.

    `may_stay`: the worker's host may keep the bytes for consumers to fetch, and not send them to the slot. If that host
    is lost, they are made again (`BytesLost`). `reader`: the consumer that is likely to get them; None: each may.
    """

    worker: int
    run: int
    ticket: int
    index: int
    batches: int
    first: int
    may_stay: bool = False
    reader: int | None = None


class Remade(Struct, frozen=True):
    """The bytes that were lost with a host are in the ticket's slot; or, if not `whole`, they are not made again, and
    nobody is to read them."""

    ticket: int
    whole: bool = True


class MeasureRows(Struct, frozen=True):
    """Have `worker` measure leftover rows of the run for the ticket's merged batch: `count` rows, from row `start`."""

    worker: int
    run: int
    ticket: int
    start: int
    count: int


class WriteRows(Struct, frozen=True):
    """Have `worker` write leftover rows of the run to a merged batch in the ticket's slot: `count` rows, from row
    `start` of the run's leftover rows to row `row` of the batch. The batch is number `index`, and has `rows` rows.
    `shapes`, `before` and `sizes` as in messages.WriteRows."""

    worker: int
    run: int
    ticket: int
    start: int
    count: int
    row: int
    rows: int
    index: int
    shapes: Shapes = ()
    before: Shapes = ()
    sizes: Shapes = ()


class PoolRows(Struct, frozen=True):
    """Have `worker` copy rows of a pool into `batches` batches of the ticket's slot, from number `first` of the pool's
    batches on; answered by RowsWritten, or RunFailed.

    `sources`: the tickets of the pool's visits, by lane, each with the number of its batches. `visit` and `part` name
    the pool. `index`: the number of the first batch among the pooled batches of the epoch.
    """

    worker: int
    run: int
    ticket: int
    feed: str
    epoch: int
    visit: int
    part: int
    sources: tuple[tuple[int, int], ...]
    first: int
    batches: int
    index: int


class DropRun(Struct, frozen=True):
    """Drop the run. For each turn that it was to fill and has not filled, it answers Made (last) without batches."""

    worker: int
    run: int


class Copy(Struct, frozen=True):
    """Copy these regions of the slot of ticket `source` to the same places of the ticket's own; answered by
    `Copied`."""

    ticket: int
    source: int
    first: int
    regions: tuple[tuple[int, int], ...]


class Free(Struct, frozen=True):
    """Free the ticket's slot: nobody reads or writes it any longer."""

    ticket: int


class SendSlab(Struct, frozen=True):
    """Send one slab to a consumer: `batches` batches from place `first` of the ticket's slot on. Other fields as in
    messages.Slab."""

    consumer: int
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
    repeat: bool = False


Said: TypeAlias = Begun | SentElsewhere | LaneEnded | PoolBegun | End | Opened | MissingRanks | Failed
"""The messages to a consumer other than slabs."""


class Tell(Struct, frozen=True):
    """Send a message to a consumer."""

    consumer: int
    message: Said


class Refuse(Struct, frozen=True):
    """The consumer's last message was impossible, and changed nothing: end its session with this error."""

    consumer: int
    error: PenstockError


class SaveGroup(Struct, frozen=True):
    """Write to the state file where the group stands, before the next command is carried out.

    `epoch` to `merged` are fields of its position. `fresh` says that the epoch has just begun, so the lanes and the
    `ahead` in the file belong to the epoch before. The rest are changes: `places` (lane, index, record) and `ended`
    (lane, number, index, leftover, record) of lanes; `ahead` (lane, index, batches), which were handed over beyond the
    position; `behind` (lane, index): batches of this lane before this index are no longer ahead; a consumer that has
    `arrived` or `parted`.
    """

    feed: FeedInfo
    group: str
    epoch: int
    batches: int
    rows: int
    digest: bytes
    merged: int
    fresh: bool = False
    places: tuple[tuple[int, int, bytes], ...] = ()
    ended: tuple[tuple[int, int, int, int, bytes], ...] = ()
    behind: tuple[tuple[int, int], ...] = ()
    ahead: tuple[tuple[int, int, int], ...] = ()
    arrived: bytes = b""
    parted: bytes = b""


class ForgetGroup(Struct, frozen=True):
    """Delete the group from the state file."""

    feed: str
    group: str


class AcceptWorker(Struct, frozen=True):
    """The worker serves the same feeds as the others, and gets work."""

    worker: int


class RejectWorker(Struct, frozen=True):
    """The worker has imported other feeds than those that are served: end it."""

    worker: int


class KillWorker(Struct, frozen=True):
    """The worker was to leave, and its time is over: kill it."""

    worker: int


class Retire(Struct, frozen=True):
    """The worker was to leave, and has no work left: end it."""

    worker: int


class FeedReady(Struct, frozen=True):
    """The feed can be consumed. `splits` is how many it has now (0 for an indexable feed)."""

    feed: str
    splits: int


class ReportSkipped(Struct, frozen=True):
    """Log that the rest of a split of this feed is left out, after `samples` samples, in this run."""

    feed: str
    run: int
    split: str
    samples: int
    why: str
    traceback: str


class FailStart(Struct, frozen=True):
    """A feed cannot be served at all: the daemon ends with this error."""

    error: PenstockError


class ReportBug(Struct, frozen=True):
    """Log an unexpected error in the coordinator or its caller: a bug. The stream has failed."""

    error: Exception


Command: TypeAlias = (
    ListSplits
    | Compare
    | ForgetSplits
    | StartRun
    | FindSlot
    | Fill
    | Remade
    | MeasureRows
    | WriteRows
    | PoolRows
    | DropRun
    | Copy
    | Free
    | SendSlab
    | Tell
    | SaveGroup
    | ForgetGroup
    | AcceptWorker
    | RejectWorker
    | KillWorker
    | Refuse
    | ReportSkipped
    | Retire
    | FeedReady
    | FailStart
    | ReportBug
)
