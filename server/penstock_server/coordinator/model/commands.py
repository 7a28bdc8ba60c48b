"""Commands: the coordinator's output. The daemon carries them out in order."""

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
    LanePlace,
    MissingRanks,
    Opened,
    PoolBegun,
    SentElsewhere,
    Shapes,
)
from penstock_proto.spec import Spec


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
    """Forget this list of splits: nothing will refer to it again."""

    splits: int


class StartRun(Struct, frozen=True):
    """Start a run in `worker`: one lane of an epoch, or the epoch of an indexable feed (lane 0, splits 0).

    `record`, `skip`, `careful`, `ahead`, `sample_spec`: as in messages.StartRun.
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
    sample_spec: Spec | None = None


class FindSlot(Struct, frozen=True):
    """Find a slot of at least `nbytes` bytes for `ticket`; answered by `SlotFound` or `NoSlot`.

    The tickets of one stream get their slots in the order of these commands. If the ticket has a slot already (too
    small for the batch), the new slot replaces it.
    """

    ticket: int
    nbytes: int


class Fill(Struct, frozen=True):
    """Have `worker` make up to `batches` batches, from number `index` on, in the ticket's slot, from place `first` on.

    `stripe`: for a visit of a stripe, the ticket of the stripe's slot. The batches go there, each `step` places after
    the one before.
    `may_stay`: True if the worker's host may keep the bytes for consumers to fetch, instead of sending them to the
    slot. If that host is lost, the batches are made again (`BytesLost`). `reader`: the consumer that will probably
    receive the batches; None if it may be any.
    """

    worker: int
    run: int
    ticket: int
    index: int
    batches: int
    first: int
    may_stay: bool = False
    reader: int | None = None
    stripe: int | None = None
    step: int = 1
    most_ms: int = 0

    @property
    def slot(self) -> int:
        """The ticket of the slot."""
        return self.ticket if self.stripe is None else self.stripe


class Remade(Struct, frozen=True):
    """The bytes that were lost with a host are in the ticket's slot again. If not `whole`, nobody makes them again, and
    nobody may read them."""

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
    """Have `worker` write leftover rows of the run to the merged batch in the ticket's slot: `count` rows, from row
    `start` of the leftover rows on, to the batch's rows from `row` on. The batch has number `index` and `rows` rows.
    `shapes`, `before` and `sizes`: as in messages.WriteRows."""

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
    """Have `worker` make `batches` batches of a pool in the ticket's slot, from the pool's batch number `first` on, by
    copying rows of the pool's visits. Answered by RowsWritten or RunFailed.

    `sources`: the tickets of the pool's visits, by lane, each with the number of its batches. `visit` and `part` name
    the pool. `index`: the number of the first batch among the pooled batches of the epoch. `sample_spec`: as in
    messages.StartRun.
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
    sample_spec: Spec | None = None


class TransformRows(Struct, frozen=True):
    """Have `worker` transform the merged batch in the ticket's slot, whose rows are all written, with the feed's
    `batch_transform`. The batch has number `index` and `rows` rows; `shapes` and `sample_spec` as in messages.WriteRows
    and messages.StartRun. Answered by RowsWritten, NeedRoom or RunFailed."""

    worker: int
    run: int
    ticket: int
    feed: str
    epoch: int
    rows: int
    index: int
    shapes: Shapes
    sample_spec: Spec


class DropRun(Struct, frozen=True):
    """Have `worker` drop the run. For each turn that the run was to fill and has not filled, the worker answers Made
    (last) without batches, or RowsWritten without having written any."""

    worker: int
    run: int


class Free(Struct, frozen=True):
    """Free the ticket's slot: nobody reads or writes it any longer."""

    ticket: int


class SendSlab(Struct, frozen=True):
    """Send one slab to a consumer: `batches` batches from place `first` of the ticket's slot on, each `stride` places
    after the one before. Other fields as in messages.Slab."""

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
    lanes: tuple[int, ...] = ()
    places: tuple[LanePlace, ...] = ()
    shared: bool = False
    stride: int = 1


Said: TypeAlias = Begun | SentElsewhere | LaneEnded | PoolBegun | End | Opened | MissingRanks | Failed
"""The messages to a consumer other than slabs."""


class Tell(Struct, frozen=True):
    """Send a message to a consumer."""

    consumer: int
    message: Said


class Refuse(Struct, frozen=True):
    """End the consumer's session with this error: its last message was refused, and changed nothing. If the session was
    open, `Cut` or `Lost` follows."""

    consumer: int
    error: PenstockError


class SaveGroup(Struct, frozen=True):
    """Write the group's position to the state file, before carrying out the next command.

    `epoch` to `merged` are fields of the position. `fresh`: True if the epoch has just begun, so that the lanes and the
    batches beyond the position in the file belong to the epoch before. The other fields are changes. `places` (lane,
    index, record) and `ended` (lane, number, index, leftover, record) replace those of lanes. `beyond` (lane, index,
    batches) adds batches after the position that were handed over. `passed` (lane, index): the position has passed the
    batches of the lane before this index. `arrived` and `parted` name a consumer that has come or gone.
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
    passed: tuple[tuple[int, int], ...] = ()
    beyond: tuple[tuple[int, int, int], ...] = ()
    arrived: bytes = b""
    parted: bytes = b""


class ForgetGroup(Struct, frozen=True):
    """Delete the group from the state file."""

    feed: str
    group: str


class AcceptWorker(Struct, frozen=True):
    """Accept the worker: it serves the same feeds as the others, and gets work from now on."""

    worker: int


class RejectWorker(Struct, frozen=True):
    """End the worker: it has imported other feeds than those that are served."""

    worker: int


class KillWorker(Struct, frozen=True):
    """Kill the worker: it was to leave, and its time is over."""

    worker: int


class Retire(Struct, frozen=True):
    """End the worker: it was to leave, and has no work left."""

    worker: int


class FeedReady(Struct, frozen=True):
    """Announce that the feed can be read. `splits`: the number of its splits now (0 for an indexable feed)."""

    feed: str
    splits: int


class ReportSkipped(Struct, frozen=True):
    """Log that this run leaves out the rest of a split, after `samples` samples."""

    feed: str
    run: int
    split: str
    samples: int
    why: str
    traceback: str


class FailStart(Struct, frozen=True):
    """End the daemon with this error: a feed cannot be served at all."""

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
    | TransformRows
    | DropRun
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
