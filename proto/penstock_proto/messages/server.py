"""Messages from the daemon to a client, over ZMTP or a unix connection."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta, Struct

from .base import (
    MAX_START,
    MAX_WORLD,
    Batches,
    Count,
    Digest,
    ErrorReport,
    Index,
    Lane,
    Line,
    Message,
    Record,
    Shapes,
    Token,
    UnixName,
    Version,
)
from .feeds import MAX_POOLED, FeedInfo
from .memory import Map, Unmap
from .watching import Samples


class Welcome(Message, frozen=True):
    """Answers Hello. `unix` is the daemon's abstract unix address for clients on the same host."""

    session: Token
    feed: FeedInfo
    unix: Line


class Greeting(Message, frozen=True):
    """The first message on a unix connection, sent at once, with the ledger's fd. See ledger.py."""

    version: Version


class Opened(Message, frozen=True):
    """The stream exists. The daemon grants `credit` and `quota`: at most those that Open asked for or, if several
    consumers share the stream, those that the first of them asked for.

    It comes again, with less, if slots had to grow and there is no memory for as many. From then on the client copies
    while it aliases `quota` slabs or more. `epoch` is the first that the client can begin. `position`: where the stream
    begins, encoded as for PositionPart, if the client has asked for another `start` and others read the stream;
    otherwise empty.
    """

    credit: Annotated[int, Meta(ge=1, le=4096)]
    quota: Annotated[int, Meta(ge=0, le=4096)]
    epoch: Count = 0
    position: Annotated[bytes, Meta(max_length=MAX_START)] = b""


class MissingRanks(Message, frozen=True):
    """The stream has not begun, because these ranks are missing or not ready. An empty list: it begins now."""

    ranks: Annotated[tuple[Index, ...], Meta(max_length=MAX_WORLD)]


class Begun(Message, frozen=True):
    """The epoch's splits are known: `digest` is the SHA-256 of their list. Comes before the epoch's first slab."""

    epoch: Count
    digest: Digest


class LaneEnded(Message, frozen=True):
    """All batches of a lane have been sent: `index` full ones. `leftover` rows remain after them.

    `number` counts the epoch's ended lanes from 0 in the order in which their leftovers are merged; in exact order that
    is the order of these messages. `record`: as in Slab, after the lane's last full batch. (Not sent for indexable
    feeds, which have no lanes.)
    """

    epoch: Count
    number: Count
    lane: Index
    index: Count
    leftover: Count
    record: Record


class HostAt(Message, frozen=True):
    """A host with this number may keep slabs, which the client can fetch there. If the client connects, it says so
    (Reaches). Otherwise all bytes come from the daemon. `key`: the host's public key (Z85), if keys are used. `unix`:
    the host's abstract unix address for clients on its machine, or "" if it has none."""

    host: Count
    endpoint: Line
    key: Annotated[bytes, Meta(max_length=40)] = b""
    unix: UnixName = ""


class Kept(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where the bytes of a slab are: at this host, in the slot of `ticket`. Fetch must repeat the `secret`."""

    host: Count
    ticket: Count
    secret: Token


class LanePlace(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The restart record of a lane after its first `index` batches."""

    lane: Index
    index: Count
    record: Record


Lanes = Annotated[tuple[Index, ...], Meta(max_length=2**16)]
LanePlaces = Annotated[tuple[LanePlace, ...], Meta(max_length=2**16)]


class Slab(Message, frozen=True):
    """One slab: `batches` consecutive batches of one turn or stripe, `nbytes` bytes in all.

    `seq` counts the session's slabs from 0. `lane` and `index` identify its first batch (`lane` -1 for merged
    leftovers). The batches begin at place `first` of a slot (layout.py). Over unix that slot is `memfd`; over ZeroMQ
    `memfd` is 0, and the bytes follow in Chunks, or the client fetches them from the host in `kept`. `shapes`: whole
    shapes of the leaves if the feed is not fixed (`batches` is 1 then), otherwise empty. `rows`: the number of rows in
    all its batches; if there are several, each is full. `record`: the lane's restart record after its last batch (empty
    for merged batches and for indexable feeds). `repeat`: the batch repeats one that another rank gets, to fill up the
    last round. It is a slab like any other, but moves no position and does not count in End's `batches` and `rows`.

    `lanes`: in a slab of a stripe or of a rank, and in the first of several that a worker reported together, the lanes
    that its batches come from, in order: batch j is the next one of lane `lanes[j % len(lanes)]`. Then `record` is
    empty, and `places` has records of these lanes that are new, perhaps several of a lane, in order: each was taken at
    this lane's last batch in the stream so far, or before it. Otherwise both are empty.

    `shared`: other consumers may have the slab, too. A client that reads it in shared memory maps that for itself alone
    (copy on write), so that nobody else sees what is written to its arrays.

    `stride`: more than 1 only for one of n ranks, and then n. The slab is for whole rounds, n * `batches` consecutive
    batches. It has those of this rank, at places `first`, `first` + n, and so on; other ranks get those between them.
    `lane`, `index`, `rows` and `nbytes` are those of its own batches. But it moves the position past all of them, and
    `lanes` and `places` are theirs. `record` is empty.
    """

    seq: Count
    epoch: Count
    lane: Lane
    index: Count
    batches: Batches
    rows: Count
    nbytes: Count
    memfd: Index = 0
    first: Count = 0
    shapes: Shapes = ()
    record: Record = b""
    repeat: bool = False
    kept: Kept | None = None
    lanes: Lanes = ()
    places: LanePlaces = ()
    shared: bool = False
    stride: Batches = 1

    @property
    def scattered(self) -> bool:
        """Whether other batches lie between its own."""
        return self.stride > 1 and self.batches > 1


class SentElsewhere(Message, frozen=True):
    """Batches of the stream that are not sent to this consumer, but move its position. Fields as in Slab.

    They are within the position's `skip`, or another rank gets them. They count in End's `batches` and `rows`.
    """

    epoch: Count
    lane: Lane
    index: Count
    batches: Batches
    rows: Count
    record: Record = b""
    lanes: Lanes = ()
    places: LanePlaces = ()
    stride: ClassVar[int] = 1


class LaneInPool(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The place of a lane after a pool: `index` batches of it come before this place, and `record` is the restart
    record after the last of them. If the lane has ended there, `number` and `leftover` are as in LaneEnded; else -1 and
    0.
    """

    lane: Index
    index: Count
    record: Record
    number: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    leftover: Annotated[int, Meta(ge=0, le=2**31)] = 0


class PoolBegun(Message, frozen=True):
    """A pool begins: the next `batches` batches, `rows` rows, are those of these lanes, with their rows mixed.

    Their slabs have `lane` -2, and do not move a lane's place one by one: when the last of them was read, all these
    lanes move to their new places at once. `number` grows with each pool of an epoch. `batches` may be 0. `more`:
    another message continues the list of lanes.
    """

    epoch: Count
    number: Count
    batches: Count
    rows: Count
    lanes: Annotated[tuple[LaneInPool, ...], Meta(max_length=MAX_POOLED)]
    more: bool = False


class Chunk(Message, frozen=True):
    """Announces a piece of slab `seq`, from byte `start` of its slot on. The bytes are the next frame. (ZeroMQ only)"""

    seq: Count
    start: Count


class End(Message, frozen=True):
    """The epoch's last batch has been sent. Has the totals that the daemon counted.

    `slabs`: those of this session. `batches`, `rows`: those of the whole epoch, including what came before the position
    at which the session began. The totals of each lane are in its LaneEnded.
    """

    epoch: Count
    slabs: Count
    batches: Count
    rows: Count


class Failed(Message, frozen=True):
    """The session or a request failed. An open session stays failed."""

    error: ErrorReport


class Pong(Message, frozen=True):
    """Answers Ping."""


class Scaled(Message, frozen=True):
    """Answers ScaleRequest, or ScaleHostsRequest: how many workers or hosts there were, and how many there will be."""

    before: Index
    after: Index


class WorkerStacks(Message, frozen=True):
    """A worker and its process `pid`, with the fd of its stacks file. (unix only)"""

    worker: Index
    pid: Index


class StacksSent(Message, frozen=True):
    """All WorkerStacks that answer a StacksRequest were sent."""


class HostSampled(Message, frozen=True):
    """The workers of a host are sampled from now on or, if `ended`, no longer. `how`: how the host was lost before the
    end of sampling, or empty. (unix only)"""

    host: Line
    ended: bool = False
    how: Line = ""


class WorkerSampled(Message, frozen=True):
    """Samples of a host's worker, with its number and name. (unix only)"""

    worker: Index
    name: Line
    samples: Samples


class Status(Message, frozen=True):
    """The daemon's status as JSON text."""

    json: Annotated[str, Meta(max_length=1000 * 1024)]


ServerMessage: TypeAlias = (
    Welcome
    | Greeting
    | Opened
    | MissingRanks
    | Map
    | Unmap
    | HostAt
    | Begun
    | Slab
    | SentElsewhere
    | PoolBegun
    | Chunk
    | LaneEnded
    | End
    | Failed
    | Pong
    | Scaled
    | WorkerStacks
    | StacksSent
    | HostSampled
    | WorkerSampled
    | Status
)
