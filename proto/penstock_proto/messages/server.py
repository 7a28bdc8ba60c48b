"""Messages from the daemon to a client, over ZMTP or a unix connection."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from .base import (
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
    """First message on a unix connection, which the daemon sends at once, with the ledger's fd. See ledger.py."""

    version: Version


class Opened(Message, frozen=True):
    """The stream exists. `credit` and `quota` are what was granted: at most what Open asked for, or, if several
    consumers share the stream, what the first of them asked for.

    It comes again, with less, when slots had to grow and there is no memory for as many: from then on the client copies
    while it aliases `quota` slabs or more. `epoch` is the first that the client can begin.
    """

    credit: Annotated[int, Meta(ge=1, le=4096)]
    quota: Annotated[int, Meta(ge=0, le=4096)]
    epoch: Count = 0


class MissingRanks(Message, frozen=True):
    """The stream has not begun, because these ranks are missing or not ready. None: it begins now."""

    ranks: Annotated[tuple[Index, ...], Meta(max_length=MAX_WORLD)]


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


class HostAt(Message, frozen=True):
    """Slabs may be kept by a host, which has this number, and can be fetched there. The client may connect, and says so
    (Reaches). Otherwise all bytes come from the daemon. `key`: the host's public key (Z85), if keys are used. `unix`:
    the host's abstract unix address for clients on its machine, or "" if it has none."""

    host: Count
    endpoint: Line
    key: Annotated[bytes, Meta(max_length=40)] = b""
    unix: UnixName = ""


class Kept(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where the bytes of a slab are: at this host, in the slot of `ticket`. Fetch names the `secret`."""

    host: Count
    ticket: Count
    secret: Token


class Slab(Message, frozen=True):
    """One slab: `batches` consecutive batches of one turn, `nbytes` bytes in all.

    `seq` counts the session's slabs from 0. `lane` and `index` identify its first batch (`lane` -1 for merged
    leftovers). The batches begin at place `first` of a slot (layout.py). Over unix that slot is `memfd`; over ZeroMQ
    `memfd` is 0, and the bytes follow in Chunks, or are to be fetched where `kept` says. `shapes`: whole shapes of the
    leaves if the feed is not fixed (`batches` is 1 then), otherwise empty. `rows`: the number of rows in all its
    batches; if there are several, each is full. `record`: the lane's restart record behind its last batch (empty for
    merged batches and for indexable feeds).
    `repeat`: the batch repeats one that another rank gets, to fill up the last round. It is a slab like any other, but
    moves no position and does not count in End's `batches` and `rows`.
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


class SentElsewhere(Message, frozen=True):
    """Batches of the stream that are not sent to this consumer, for its position. Fields as in Slab.

    They lie within the position's `skip`, or another rank gets them. They count in End's `batches` and `rows`.
    """

    epoch: Count
    lane: Lane
    index: Count
    batches: Batches
    rows: Count
    record: Record = b""


class LaneInPool(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The place of a lane behind a pool: `index` batches of it lie before this place, and `record` is the restart
    record behind the last of them. If it has ended there, `number` and `leftover` are as in LaneEnded; else -1 and 0.
    """

    lane: Index
    index: Count
    record: Record
    number: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    leftover: Annotated[int, Meta(ge=0, le=2**31)] = 0


class PoolBegun(Message, frozen=True):
    """A pool begins: the next `batches` batches, `rows` rows, are those of these lanes, with their rows mixed.

    Their slabs have `lane` -2. They move no lane's place one by one: when the last of them was read, all these lanes
    have moved to their new places at once. `number`: larger for each pool of an epoch. `batches` may be
    0. `more`: another message continues the list of lanes.
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
    """The epoch's last batch has been sent: totals as the daemon counted them.

    `slabs`: of this session. `batches`, `rows`: of the whole epoch, with what came before the position at which the
    session began. The totals of each lane stand in its LaneEnded.
    """

    epoch: Count
    slabs: Count
    batches: Count
    rows: Count


class Failed(Message, frozen=True):
    """The session, or what was asked for, failed. An open session stays failed."""

    error: ErrorReport


class Pong(Message, frozen=True):
    """Answers Ping."""


class Scaled(Message, frozen=True):
    """Answers ScaleRequest, or ScaleHostsRequest: how many workers or hosts there were, and how many there will be."""

    before: Index
    after: Index


class WorkerStacks(Message, frozen=True):
    """A worker's process `pid`, with the fd of its stacks file. (unix only)"""

    worker: Index
    pid: Index


class StacksSent(Message, frozen=True):
    """All WorkerStacks that answer a StacksRequest were sent."""


class HostSampled(Message, frozen=True):
    """The workers of a host are sampled from now on; or, if `ended`, that is over: `how` the host was lost before its
    end, or empty. (unix only)"""

    host: Line
    ended: bool = False
    how: Line = ""


class WorkerSampled(Message, frozen=True):
    """Samples of a worker of a host, with its number and its name. (unix only)"""

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
