"""Messages from a worker to the daemon, over the socketpair that the worker inherits."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from ..spec import Spec, check_size
from .base import Count, Digest, Digests, ErrorReport, Line, Message, Name, Record, Shapes, clean
from .feeds import Environment, FeedPlan
from .spot_checks import SpotCheck, SpotChecked


class Imported(Message, frozen=True):
    """The user's modules are imported. `feeds` are those of the command line, in order. `tensorflow`: this worker has
    imported TensorFlow on its own. `shared_until`: the place of the statement, FILE:LINE, before which imports were
    done once for all workers; "" if that is unknown."""

    feeds: Annotated[tuple[FeedPlan, ...], Meta(max_length=256)]
    imports_seconds: Annotated[float, Meta(ge=0)]
    tensorflow: bool
    shared_until: str = ""

    def __post_init__(self) -> None:
        clean(self, "shared_until")


class EnvironmentWanted(Message, frozen=True):
    """The feeds want other environment variables than the worker was started with. Sent instead of Imported; the worker
    then ends. None removes a variable."""

    variables: Environment


class StartFailed(Message, frozen=True):
    """The worker cannot serve the requested feeds, and ends."""

    error: ErrorReport


class FirstSample(Struct, frozen=True, forbid_unknown_fields=True):
    """A feed's first sample: the `index` of its split, a digest of 8 bytes for each leaf and, with `batch_transform=`,
    for each leaf of a batch that it has made of this sample (none if these are large), how many `seconds` it took to
    make, and `warnings` for the log."""

    index: Count
    digests: Digests
    seconds: Annotated[float, Meta(ge=0)]
    warnings: Annotated[tuple[Line, ...], Meta(max_length=16)] = ()


class SplitsListed(Message, frozen=True):
    """Answers ListSplits; its fd holds the list. `digest` is the SHA-256 of the list, in which Penstock's own classes
    have the names that they have on disk.

    Without an fd `nbytes` is 0: an indexable feed has no splits (`count` 0), and segments are numbers (`count` is 2**62
    if they have no end). The list of a mix holds the splits of all of its feeds; `count` is at least `lanes`, or the
    fewest splits that one of them has.

    `spec` is that of the first sample of the first split, and `sample_nbytes` the size of that sample (or ready batch).
    Both come only with the answer to the first listing of a feed (epoch 0 and no spec known); otherwise they are None
    and 0. `first` says more about that sample, if one was made. `warnings` about the list are for the log. If the feed
    has a `batch_transform` and is read in lanes, `spec` is that of a row of a transformed batch, and `sample_spec` that
    of a sample before.
    """

    run: Count
    count: Count
    nbytes: Count
    digest: Digest
    spec: Spec | None = None
    sample_nbytes: Count = 0
    first: FirstSample | None = None
    warnings: Annotated[tuple[Line, ...], Meta(max_length=16)] = ()
    sample_spec: Spec | None = None

    def __post_init__(self) -> None:
        check_size(self.spec)
        check_size(self.sample_spec)


class Compared(Message, frozen=True):
    """Answers Compare. `warning`: what is wrong with the feed, for the log, or empty. `unfit`: why the host that made
    the sample again cannot serve the feed, if it is another host."""

    run: Count
    warning: Line = ""
    unfit: Line = ""


class Made(Message, frozen=True):
    """`batches` batches of a turn are in the slot, from number `first` of those that Fill asked for (0, 1, ...).

    `last` closes the turn and the ticket. `ended` (only with `last`): the lane has no further full batch and holds
    `leftover` rows. A message can have 0 batches only with `last`. `rows`: rows in these batches. `record`: the restart
    record after the last of them. `border`: a run that continues from there replays next to nothing (a split or a block
    has just begun), so the lane can move to another worker. `replay_ms`: about how many milliseconds it takes to read
    again what such a run needs. `work_ms`: how many milliseconds the run has worked on the turn so far. `shapes` as in
    Slab. `dropped`: how many samples the feed has dropped in this lane up to the record, in the whole epoch. `skipped`:
    splits were skipped while the last batch was made. Earlier records do not list them.
    """

    run: Count
    ticket: Count
    first: Count
    batches: Count
    rows: Count
    last: bool
    ended: bool = False
    leftover: Count = 0
    shapes: Shapes = ()
    record: Record = b""
    border: bool = False
    replay_ms: Count = 0
    work_ms: Count = 0
    dropped: Count = 0
    skipped: bool = False


class NeedRoom(Message, frozen=True):
    """The run's next batch needs `nbytes` bytes, more than the slot of `ticket` has. The worker keeps the batch and
    waits for a new Fill of the same ticket with a larger slot."""

    run: Count
    ticket: Count
    nbytes: Count


class RowsMeasured(Message, frozen=True):
    """Answers MeasureRows: the sizes of these rows, for each leaf (columns.Sizes)."""

    run: Count
    ticket: Count
    sizes: Shapes


class RowsWritten(Message, frozen=True):
    """Answers WriteRows, PoolRows and TransformRows. `shapes`, after TransformRows, are as in Slab."""

    run: Count
    ticket: Count
    shapes: Shapes = ()


class SplitSkipped(Message, frozen=True):
    """The rest of a split is left out. With `on_error="skip"`: user code raised in it (`error`), or StartRun asked for
    it. In a zipped feed: a part has no more samples, and another one has (`error` says which). `number`: the split's
    within the lane. `split`: a text that shows it. `samples` of it were read."""

    run: Count
    number: Count
    split: Line
    samples: Count
    error: ErrorReport | None = None

    def __post_init__(self) -> None:
        clean(self, "split")


class TransformDiffers(Message, frozen=True):
    """A feed's `batch_transform=` made another batch when it was called once more with the same samples. `warning` says
    so, for the log."""

    feed: Name
    warning: Line

    def __post_init__(self) -> None:
        clean(self, "warning")


class CacheUsed(Message, frozen=True):
    """How a feed's cache was used since this worker's last such message. `hits` splits were read from the cache, and
    for `misses` the generator ran. `written` were written, with `nbytes` bytes in all. `stored`: the bytes in the
    directory, if the worker has counted them. `problem` says that a split was not written or not read, and why. `part`:
    which of the feeds of a mix has this cache."""

    feed: Name
    hits: Count = 0
    misses: Count = 0
    written: Count = 0
    nbytes: Count = 0
    stored: Count | None = None
    problem: Line = ""
    part: Line = ""


class RunFailed(Message, frozen=True):
    """User code raised, or yielded values that cannot be served. The run is closed, with all of its tickets."""

    run: Count
    error: ErrorReport


FromWorker: TypeAlias = (
    Imported
    | EnvironmentWanted
    | StartFailed
    | SplitsListed
    | Compared
    | SpotCheck
    | SpotChecked
    | Made
    | NeedRoom
    | RowsMeasured
    | RowsWritten
    | SplitSkipped
    | TransformDiffers
    | CacheUsed
    | RunFailed
)
