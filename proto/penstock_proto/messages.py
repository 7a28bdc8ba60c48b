"""Every control message, as a typed record. PROTOCOL.md says who sends which, when, and what follows.

There are two conversations, and each has its own set of messages each way:

    client <-> daemon     over ZMTP (the client is a DEALER) or a unix SOCK_SEQPACKET connection
    worker <-> daemon     over the SOCK_SEQPACKET socketpair that the worker inherits

The bytes of a batch are never inside a message. Every text, list and number has a bound; unknown fields are refused.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from . import errors
from .spec import Spec, check_size, printable

VERSION = 6
"""The protocol's version. Both ends must have the same."""

IDS_PER_STREAM = 1 << 40
"""The daemon numbers runs and tickets of stream s from s * IDS_PER_STREAM, so that an id tells its stream. A stream
lives for as long as its trainer: at 10,000 turns a second that many last for three years, and a daemon has 4 million
streams."""

MAX_TEXT = 32 * 1024
MAX_SHAPES = 1024
MAX_WORLD = 1024
"""Most ranks that read one stream together."""

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Line = Annotated[str, Meta(max_length=1024)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Epoch = Annotated[int, Meta(ge=0, le=2**53)]
"""The number of an epoch that a client asks for: less than Count, as the daemon counts on from it."""
Progress = Annotated[int, Meta(ge=0, le=2**53)]
"""How many batches or rows a client says it has read: less than Count, as the daemon counts on from it."""
Seed = Annotated[int, Meta(ge=0, le=2**62)]
Index = Annotated[int, Meta(ge=0, lt=2**31)]
Version = Annotated[int, Meta(ge=0, le=2**31)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Record = Annotated[bytes, Meta(max_length=32 * 1024)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digests = Annotated[bytes, Meta(max_length=8 * MAX_SHAPES)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=16)]
Shapes = Annotated[tuple[Shape, ...], Meta(max_length=MAX_SHAPES)]


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    """Base of all messages: `type` is the class's name in lower case."""


class ErrorReport(Struct, frozen=True, forbid_unknown_fields=True):
    """An error on its way to where it is raised. `kind` is a name in `errors.BY_NAME`."""

    kind: Name
    message: Text
    feed: Line | None = None
    worker: Index | None = None
    split: Line | None = None
    remote_traceback: Text | None = None

    @classmethod
    def of(cls, error: errors.PenstockError) -> ErrorReport:
        """The report of `error`, its texts cut to what a message may hold (a traceback keeps its end)."""
        traceback = error.remote_traceback
        return cls(
            type(error).__name__,
            _cut(error.message, MAX_TEXT // 4),
            None if error.feed is None else _cut(error.feed, 1024),
            error.worker,
            None if error.split is None else _cut(error.split, 1024),
            None if traceback is None else printable(traceback[-MAX_TEXT // 4 :])[-MAX_TEXT // 4 :],
        )

    def error(self) -> errors.PenstockError:
        """The error to raise; an unknown kind becomes a plain PenstockError that names it."""
        cls = errors.BY_NAME.get(self.kind)
        message = self.message if cls else f"{self.kind}: {self.message}"
        return (cls or errors.PenstockError)(
            message, feed=self.feed, worker=self.worker, split=self.split, remote_traceback=self.remote_traceback
        )


def _cut(text: str, most: int) -> str:
    return printable(text[:most])[:most]


class FeedInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """What a consumer must know of a feed.

    `spec` describes one sample where `batch_size` is given, and one batch where it is None. `turn` is how many
    batches a slab holds at the most. `batches` and `samples` are those of an epoch, where known. `shuffle`,
    `interleave` and `segment` are as in FeedPlan.
    """

    name: Name
    spec: Spec
    batch_size: Annotated[int, Meta(ge=1, le=2**31)] | None
    turn: Annotated[int, Meta(ge=1, le=2**16)]
    drop_remainder: bool
    order: Annotated[str, Meta(pattern="^(exact|fast)$")]
    lanes: Annotated[int, Meta(ge=1, le=2**16)]
    seed: Seed
    epochs: Count | None
    batches: Count | None
    samples: Count | None
    shuffle: Count = 0
    interleave: Annotated[int, Meta(ge=1, le=2**16)] = 1
    segment: Annotated[int, Meta(ge=1, le=2**62)] | None = None

    def __post_init__(self) -> None:
        check_size(self.spec)

    @property
    def endless(self) -> bool:
        """Whether an epoch has no end."""
        return self.segment is not None and self.samples is None


# --- client to daemon -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a session: which feed, which version. `client` names the consumer in status and logs."""

    version: Version
    feed: Line
    client: Line = ""


class PositionPart(Message, frozen=True):
    """A piece of the position from which the session's stream shall begin, in order. Comes before Open, on the same
    transport. The pieces together are a packed `Position`; none at all means epoch 0."""

    session: Token
    data: Annotated[bytes, Meta(max_length=64 * 1024)]


class Had(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Batches of a slab that was handed over: `batches` of lane `lane` (-1: merged ones) from number `index` on."""

    epoch: Epoch
    lane: Annotated[int, Meta(ge=-1, lt=2**31)]
    index: Progress
    batches: Annotated[int, Meta(ge=1, le=2**16)]


class Open(Message, frozen=True):
    """Opens the session's stream on the transport that this message comes by, from the position that was sent.

    Over a unix connection it is the first message, and `proof` repeats the nonce in the ledger. Over ZeroMQ `proof` is
    empty. At most `credit` slabs and `credit_bytes` bytes (but always one slab) are under way, sent and not handed;
    the client keeps at most `quota` handed slabs aliased and copies beyond (0 over ZeroMQ).

    `consumer` is the same in all sessions of one consumer: a session takes the place of an older one of its own.
    `again`: the consumer read this stream before, and its position is where it was cut off.

    With a `group` alone the stream is shared by all consumers of that group, and each batch goes to one of them.
    If it comes `again`, `handed` says how many slabs of its session `last` were handed over, and `had` which slabs were
    last, as many as a daemon may not have been told of: another daemon counts them as handed.

    With a `world_size` the stream is that of all ranks 0 to `world_size` - 1 of the `group` together, and batch j of an
    epoch goes to rank j mod `world_size`. It begins when all of them are there. `pad`: the last round of an epoch is
    filled up with repeats where it has fewer batches than there are ranks; else it is left out.
    """

    session: Token
    proof: Annotated[bytes, Meta(max_length=16)]
    credit: Annotated[int, Meta(ge=1, le=4096)]
    credit_bytes: Count
    quota: Annotated[int, Meta(ge=0, le=4096)]
    consumer: Annotated[bytes, Meta(max_length=16)] = b""
    again: bool = False
    group: Annotated[str, Meta(max_length=128)] = ""
    rank: Annotated[int, Meta(ge=0, lt=MAX_WORLD)] = 0
    world_size: Annotated[int, Meta(ge=0, le=MAX_WORLD)] = 0
    last: Annotated[bytes, Meta(max_length=16)] = b""
    handed: Count = 0
    pad: bool = False
    had: Annotated[tuple[Had, ...], Meta(max_length=4096)] = ()


class Begin(Message, frozen=True):
    """The client wants this epoch from its first batch. Epochs only go up."""

    epoch: Epoch


class Ack(Message, frozen=True):
    """The first `handed` slabs of the session are done with: handed over (delivered), or void with their epoch.

    `released` (unix only) are sequence numbers of slabs over which no tensor lives any more. `ended` is the number of
    END messages received.
    """

    handed: Count
    released: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    ended: Count = 0


class Leave(Message, frozen=True):
    """The client leaves this epoch before its end; slabs of it that were sent and not handed are void.

    `handed`: of the slabs sent so far the first so many were handed over or are void since before.
    """

    epoch: Epoch
    handed: Count = 0


class Ping(Message, frozen=True):
    """A sign of life; answered with Pong."""


class Close(Message, frozen=True):
    """The client ends its session. `handed` as in Leave."""

    handed: Count = 0


class StatusRequest(Message, frozen=True):
    """Asks for the daemon's status; needs no session. `version` as in Hello."""

    version: Version


class StopRequest(Message, frozen=True):
    """Asks the daemon to stop: when the epochs that are being read have ended, or `now`.

    Only over the unix connection, from the daemon's own user or root.
    """

    now: bool = False


class ScaleRequest(Message, frozen=True):
    """Asks the daemon to run so many workers; answered with Scaled. Only over the unix connection, as StopRequest.

    With `now` workers that are too many end at once and their work is done again elsewhere; otherwise they first hand
    over what they do.
    """

    workers: Annotated[int, Meta(ge=1, le=4096)]
    now: bool = False


# --- daemon to client -------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to Hello. `unix` is the abstract unix address of the daemon for clients on the same host."""

    session: Token
    feed: FeedInfo
    unix: Line


class Greeting(Message, frozen=True):
    """First message on a unix connection, sent by the daemon at once, with the ledger's fd. See ledger.py."""

    version: Version


class Opened(Message, frozen=True):
    """The stream exists. `credit` and `quota` are what was granted, at most what Open asked for (where several share
    the stream, the first of them).

    It comes again, with less, where slots had to grow and there is no memory for as many: from then on the client
    copies while it aliases `quota` slabs or more. `epoch` is the first that the client can begin.
    """

    credit: Annotated[int, Meta(ge=1, le=4096)]
    quota: Annotated[int, Meta(ge=0, le=4096)]
    epoch: Count = 0


class MissingRanks(Message, frozen=True):
    """The stream has not begun, as these ranks are not there yet; none: it begins now."""

    ranks: Annotated[tuple[Index, ...], Meta(max_length=MAX_WORLD)]


class Map(Message, frozen=True):
    """A memfd of the arena, `nbytes` long, with its fd. Sent before the first message that names it. (unix only)"""

    memfd: Index
    nbytes: Count


class Unmap(Message, frozen=True):
    """Nothing will name this memfd again; unmap it when the last array over it is gone. (unix only)"""

    memfd: Index


class Begun(Message, frozen=True):
    """The epoch's splits are known: `digest` is the SHA-256 of their list. Comes before the epoch's first slab."""

    epoch: Count
    digest: Digest


class LaneEnded(Message, frozen=True):
    """All batches of a lane have been sent: `index` full ones, with `leftover` rows behind them.

    `number` counts the epoch's ended lanes from 0 in the order in which their leftovers are merged; in exact order
    that is the order of these messages. `record`: as in Slab, behind the lane's last full batch. (Not sent for
    indexable feeds, which have no lanes.)
    """

    epoch: Count
    number: Count
    lane: Index
    index: Count
    leftover: Count
    record: Record


class Slab(Message, frozen=True):
    """One slab: `batches` consecutive batches of one turn, `nbytes` bytes in all.

    `seq` counts the session's slabs from 0. `lane` and `index` identify its first batch (`lane` -1 for merged
    leftovers). It is the batches from place `first` of a slot on (layout.py): over unix that slot is `memfd`, over
    ZeroMQ `memfd` is 0 and the bytes follow in Chunks. `shapes`: whole shapes of the leaves where the feed is not
    fixed (then `batches` is 1), else empty. `rows` is the number of rows in all its batches; several are all full.
    `record`: the lane's restart record behind its last batch (empty for merged batches and for indexable feeds).
    `repeat`: it repeats a batch that another rank gets, to fill up the last round: it is a slab as any other, but moves
    no position and does not count in End's `batches` and `rows`.
    """

    seq: Count
    epoch: Count
    lane: Annotated[int, Meta(ge=-1, lt=2**31)]
    index: Count
    batches: Annotated[int, Meta(ge=1, le=2**16)]
    rows: Count
    nbytes: Count
    memfd: Index = 0
    first: Count = 0
    shapes: Shapes = ()
    record: Record = b""
    repeat: bool = False


class SentElsewhere(Message, frozen=True):
    """Batches of the stream that are not sent to this consumer, for its position: fields as in Slab.

    They lie within the position's `skip`, or are another rank's. They count in End's `batches` and `rows`.
    """

    epoch: Count
    lane: Annotated[int, Meta(ge=-1, lt=2**31)]
    index: Count
    batches: Annotated[int, Meta(ge=1, le=2**16)]
    rows: Count
    record: Record = b""


class Chunk(Message, frozen=True):
    """Header of one piece of slab `seq`, from byte `start` of its slot; the bytes are the next frame. (ZeroMQ only)"""

    seq: Count
    start: Count


class End(Message, frozen=True):
    """The epoch's last batch has been sent: totals as the daemon counted them.

    `slabs`: of this session. `batches`, `rows`: of the whole epoch, with what came before the position from which the
    session began. The totals of each lane stand in its LaneEnded.
    """

    epoch: Count
    slabs: Count
    batches: Count
    rows: Count


class Failed(Message, frozen=True):
    """The session, or what was asked for, failed. After a session exists its stream stays failed."""

    error: ErrorReport


class Pong(Message, frozen=True):
    """Answer to Ping."""


class Scaled(Message, frozen=True):
    """Answer to ScaleRequest: so many workers there were, so many there will be."""

    before: Index
    after: Index


class Status(Message, frozen=True):
    """The daemon's status as JSON text."""

    json: Annotated[str, Meta(max_length=1000 * 1024)]


# --- daemon to worker -------------------------------------------------------------------------------------------------


class ListSplits(Message, frozen=True):
    """Run the feed's `splits` and answer with SplitsListed (its fd holds the list) or RunFailed with `run`."""

    run: Count
    feed: Name
    epoch: Count


class Compare(Message, frozen=True):
    """Make the first sample of the split with this `index` again, which had these `digests` in another process, and
    answer with Compared. `splits` as in StartRun."""

    run: Count
    feed: Name
    splits: Count
    index: Count
    digests: Digests


class ShareSplits(Message, frozen=True):
    """A list of splits, `nbytes` long, with its fd; StartRun refers to it by `splits`."""

    splits: Count
    nbytes: Count


class ForgetSplits(Message, frozen=True):
    """No run will refer to this list again."""

    splits: Count


class StartRun(Message, frozen=True):
    """Open a run: one lane of one epoch of one stream (or, for an indexable feed, the epoch as a whole).

    `record` is empty for a fresh start, or a restart record to go on from. `spec` is the feed's where it is not
    declared: the one that was seen in the answer to its first ListSplits, which only that worker knows. `skip`: numbers
    (within the lane) of splits of which nothing more is read from the record on, or from the next block on where the
    record stands within one. `careful`: the first so many batches of the run are reported at once, as a worker died at
    this lane and the next death is to be found where it happens, or as they are dealt one by one. `ahead`: empty, or a
    later record of the lane; what lies between was consumed (see Position), and the run must come by there.
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

    def __post_init__(self) -> None:
        check_size(self.spec)


class Fill(Message, frozen=True):
    """Make the run's next turn: up to `batches` batches, the first being number `index` of the lane, from place `first`
    of a slot on, which is `memfd` with its `nbytes` bytes. Answered by Made messages, the last of which has `last`
    set."""

    run: Count
    ticket: Count
    index: Count
    batches: Annotated[int, Meta(ge=1, le=2**16)]
    memfd: Index
    nbytes: Count
    first: Count = 0


class WriteRows(Message, frozen=True):
    """Write `count` leftover rows of an ended run, from its row `start`, to row `row` of the first batch in a slot.

    `rows`, `index`: the merged batch's row count and its number among the epoch's merged batches, for its header.
    Answered by RowsWritten.
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


class DropRun(Message, frozen=True):
    """Forget the run. Fills of it that are not answered yet are answered with no batches."""

    run: Count


class Shutdown(Message, frozen=True):
    """End the process."""


# --- worker to daemon -------------------------------------------------------------------------------------------------


class Imported(Message, frozen=True):
    """The user's modules are imported; `feeds` are those named on the command line, in order."""

    feeds: Annotated[tuple[FeedPlan, ...], Meta(max_length=256)]
    imports_seconds: Annotated[float, Meta(ge=0)]
    tensorflow: bool


class FeedPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """What the daemon must know of a feed: its options after defaults that need no data.

    `spec` is the declared one or None; `turn` is None where the default depends on the spec. `length` is the number of
    samples of an indexable feed, else None. `static_splits` says that `splits` is no function: one list for all epochs.
    `lanes` is 1 where the generator cannot be divided. `on_error`: what becomes of a split in which user code raises,
    or that has ended its worker `attempts` times. `warnings` are for the log. `segment`: the most samples of one run of
    a generator that is run again and again, for segment 0, 1, ...; these are its splits. Without `samples` there is no
    last one.
    """

    name: Name
    spec: Spec | None
    batch_size: Annotated[int, Meta(ge=1, le=2**31)] | None
    turn: Annotated[int, Meta(ge=1, le=2**16)] | None
    lanes: Annotated[int, Meta(ge=1, le=2**16)]
    order: Annotated[str, Meta(pattern="^(exact|fast)$")]
    shuffle: Count
    interleave: Annotated[int, Meta(ge=1, le=2**16)]
    seed: Seed
    epochs: Count | None
    samples: Count | None
    length: Count | None
    drop_remainder: bool
    static_splits: bool
    on_error: Annotated[str, Meta(pattern="^(raise|skip|retry)$")] = "raise"
    attempts: Annotated[int, Meta(ge=1, le=1000)] = 3
    warnings: Annotated[tuple[Line, ...], Meta(max_length=16)] = ()
    segment: Annotated[int, Meta(ge=1, le=2**62)] | None = None

    def __post_init__(self) -> None:
        check_size(self.spec)

    @property
    def endless(self) -> bool:
        """Whether an epoch has no end."""
        return self.segment is not None and self.samples is None

    @property
    def piece(self) -> str:
        """What one of its splits is called."""
        return "split" if self.segment is None else "segment"


class StartFailed(Message, frozen=True):
    """The worker cannot serve what it was asked for, and ends."""

    error: ErrorReport


class FirstSample(Struct, frozen=True, forbid_unknown_fields=True):
    """The look at a feed's first sample: the `index` of its split, a digest of 8 bytes for each leaf (none where the
    sample is large), how many `seconds` it took to make, and `warnings` for the log."""

    index: Count
    digests: Digests
    seconds: Annotated[float, Meta(ge=0)]
    warnings: Annotated[tuple[Line, ...], Meta(max_length=16)] = ()


class SplitsListed(Message, frozen=True):
    """Answer to ListSplits; its fd holds the list. `digest` is the SHA-256 of it.

    Without an fd `nbytes` is 0: an indexable feed has no splits (`count` 0), and segments are numbers, of which there
    are 2**62 where they have no end.

    `spec` is that of the first sample of the first split and `sample_nbytes` the bytes of that sample (or ready batch),
    both only for the answer to the first listing of a feed (epoch 0 and no spec known), else None and 0. `first` says
    more of that sample, if one was made.
    """

    run: Count
    count: Count
    nbytes: Count
    digest: Digest
    spec: Spec | None = None
    sample_nbytes: Count = 0
    first: FirstSample | None = None

    def __post_init__(self) -> None:
        check_size(self.spec)


class Compared(Message, frozen=True):
    """Answer to Compare: what is wrong with the feed, for the log, or nothing."""

    run: Count
    warning: Line = ""


class Made(Message, frozen=True):
    """Batches of a turn are in the slot: `batches` of them, from position `first` in the turn (0, 1, ...).

    `last` closes the turn and the ticket; `ended` (only with `last`) says that the lane has no further full batch and
    holds `leftover` rows. A message may have 0 batches only with `last`. `rows`: rows in these batches. `record`: the
    restart record behind the last of them. `border`: who goes on from there reads next to nothing again (a split or a
    block has just begun), so the lane can move to another worker. `shapes` as in Slab.
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


class NeedRoom(Message, frozen=True):
    """The run's next batch needs `nbytes` bytes, more than the slot of `ticket` has. The worker keeps the batch and
    waits for a new Fill of the same ticket with a larger slot."""

    run: Count
    ticket: Count
    nbytes: Count


class RowsWritten(Message, frozen=True):
    """Answer to WriteRows."""

    run: Count
    ticket: Count


class SplitSkipped(Message, frozen=True):
    """The rest of a split is left out, as the feed says `on_error="skip"`: user code raised in it (`error`), or
    StartRun said so. `number`: of the split within the lane; `split` shows it; `samples` of it were read."""

    run: Count
    number: Count
    split: Line
    samples: Count
    error: ErrorReport | None = None


class RunFailed(Message, frozen=True):
    """User code raised, or what it yielded cannot be served. The run is closed, with all of its tickets."""

    run: Count
    error: ErrorReport


ClientMessage: TypeAlias = (
    Hello | PositionPart | Open | Begin | Ack | Leave | Ping | Close | StatusRequest | StopRequest | ScaleRequest
)
ServerMessage: TypeAlias = (
    Welcome
    | Greeting
    | Opened
    | MissingRanks
    | Map
    | Unmap
    | Begun
    | Slab
    | SentElsewhere
    | Chunk
    | LaneEnded
    | End
    | Failed
    | Pong
    | Scaled
    | Status
)
ToWorker: TypeAlias = (
    ListSplits | Compare | ShareSplits | ForgetSplits | StartRun | Fill | WriteRows | DropRun | Map | Unmap | Shutdown
)
FromWorker: TypeAlias = (
    Imported | StartFailed | SplitsListed | Compared | Made | NeedRoom | RowsWritten | SplitSkipped | RunFailed
)
