"""Messages from the daemon to a worker, over the socketpair that the worker inherits."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from ..spec import Spec, check_size
from .base import Batches, Count, Digests, Index, Message, Name, Record, Shapes
from .feeds import MAX_POOLED
from .memory import Map, Unmap
from .spot_checks import SpotCheck


class ListSplits(Message, frozen=True):
    """Run the feed's `splits`. Answered by SplitsListed, whose fd holds the list, or by RunFailed with `run`."""

    run: Count
    feed: Name
    epoch: Count


class Compare(Message, frozen=True):
    """Make the first sample of the split with this `index` again; in another process it had these `digests`. Answered
    by Compared. `splits` as in StartRun."""

    run: Count
    feed: Name
    splits: Count
    index: Count
    digests: Digests


class ShareSplits(Message, frozen=True):
    """A list of splits, `nbytes` bytes long, with its fd. StartRun refers to it by `splits`."""

    splits: Count
    nbytes: Count


class ForgetSplits(Message, frozen=True):
    """No run will refer to this list again."""

    splits: Count


class StartRun(Message, frozen=True):
    """Open a run: one lane of one epoch of one stream, or, for an indexable feed, the whole epoch.

    `record` is empty for a fresh start, or the restart record after which to continue. `spec` is the feed's if it is
    not declared: otherwise only the worker that answered the feed's first ListSplits knows it. `skip`: numbers (within
    the lane) of splits that are not read beyond the record or, if it is within a block, not beyond that block.
    `careful`: report each of the first `careful` batches of the run at once. The reason is that a worker died at this
    lane, so that the next death can be located, or that batches are delivered one by one. `ahead`: empty, or a later
    record of the lane. The batches up to there were consumed (see Position), and the run must pass that record.
    `sample_spec`: that of a sample before the feed's `batch_transform`, if it has one and is read in lanes.
    """

    run: Count
    feed: Name
    epoch: Count
    lane: Annotated[int, Meta(ge=0, lt=2**31)]
    splits: Count
    record: Record = b""
    spec: Spec | None = None
    skip: Annotated[tuple[Count, ...], Meta(max_length=1024)] = ()
    careful: Count = 0
    ahead: Record = b""
    sample_spec: Spec | None = None

    def __post_init__(self) -> None:
        check_size(self.spec)
        check_size(self.sample_spec)


class Fill(Message, frozen=True):
    """Make the run's next turn: up to `batches` batches, from number `index` of the lane on. They go into the slot that
    is `memfd`, of `nbytes` bytes, from place `first` on, each `step` places after the one before. Answered by Made
    messages, the last one with `last`.

    `stripe`: the ticket of the slot, if several visits (to lanes, or ranges of an indexable feed) fill different places
    of it; 0 if the slot has the ticket `ticket`. Batches of lower tickets come first in the stream, and within a slot
    those of lower places. `most_ms`: stop after a batch when the run has worked on these for so many milliseconds; 0:
    make all of them."""

    run: Count
    ticket: Count
    index: Count
    batches: Batches
    memfd: Index
    nbytes: Count
    first: Count = 0
    stripe: Count = 0
    step: Batches = 1
    most_ms: Count = 0


class MeasureRows(Message, frozen=True):
    """Measure the sizes of `count` leftover rows of an ended run, from its row `start` on. Answered by RowsMeasured."""

    run: Count
    ticket: Count
    start: Count
    count: Count


class WriteRows(Message, frozen=True):
    """Write `count` leftover rows of an ended run, from its row `start` on, to row `row` of the first batch in a slot.

    `rows`, `index`: the merged batch's number of rows, and its number among the epoch's merged batches, for its header.
    If batches vary in size, `shapes` is as in Slab, `before` has the sizes of the rows before `row`, and `sizes` those
    that these rows had when they were measured. Answered by RowsWritten.
    """

    run: Count
    ticket: Count
    memfd: Index
    nbytes: Count
    start: Count
    count: Count
    row: Count
    rows: Count
    index: Count
    shapes: Shapes = ()
    before: Shapes = ()
    sizes: Shapes = ()


class PooledVisit(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The slot of a visit, with its number of batches."""

    memfd: Index
    batches: Batches


class PoolRows(Message, frozen=True):
    """Copy rows of a pool into `batches` batches of a slot, from number `first` of the pool's batches on, and transform
    these batches if the feed has a `batch_transform`.

    `visit` and `part` name the pool, and `sources` are its visits, by lane. `index` goes into the first header. `spec`
    and `sample_spec` as in StartRun. Answered by RowsWritten, or RunFailed.
    """

    run: Count
    ticket: Count
    memfd: Index
    nbytes: Count
    feed: Name
    epoch: Count
    visit: Count
    part: Index
    sources: Annotated[tuple[PooledVisit, ...], Meta(min_length=1, max_length=MAX_POOLED)]
    first: Count
    batches: Batches
    index: Count
    spec: Spec | None = None
    sample_spec: Spec | None = None

    def __post_init__(self) -> None:
        check_size(self.spec)
        check_size(self.sample_spec)


class TransformRows(Message, frozen=True):
    """Transform a merged batch with the feed's `batch_transform`. All of its rows are in the slot, where the result
    takes their place.

    `rows`, `index` and `shapes` as in WriteRows, `spec` and `sample_spec` as in StartRun. Answered by RowsWritten; by
    NeedRoom, if the result does not fit into the slot; or by RunFailed.
    """

    run: Count
    ticket: Count
    memfd: Index
    nbytes: Count
    feed: Name
    epoch: Count
    rows: Count
    index: Count
    shapes: Shapes = ()
    spec: Spec | None = None
    sample_spec: Spec | None = None

    def __post_init__(self) -> None:
        check_size(self.spec)
        check_size(self.sample_spec)


class DropRun(Message, frozen=True):
    """Forget the run. Answer its unanswered Fills with no batches, and its unanswered WriteRows, PoolRows and
    TransformRows with RowsWritten, but write nothing for them. This holds also for messages that were sent before, if
    the worker had not begun with them when this one came."""

    run: Count


class Shutdown(Message, frozen=True):
    """End the process."""


ToWorker: TypeAlias = (
    ListSplits
    | Compare
    | SpotCheck
    | ShareSplits
    | ForgetSplits
    | StartRun
    | Fill
    | MeasureRows
    | WriteRows
    | PoolRows
    | TransformRows
    | DropRun
    | Map
    | Unmap
    | Shutdown
)
