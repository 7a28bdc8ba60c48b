"""Messages from a client to the daemon, over ZMTP or a unix connection."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from .base import (
    GROUP,
    MAX_WORLD,
    Batches,
    Count,
    Digest,
    Epoch,
    Lane,
    Line,
    Message,
    Name,
    Progress,
    Token,
    UnixName,
    Version,
    clean,
)
from .watching import MAX_PROFILE_SECONDS

Start: TypeAlias = Literal["beginning", "latest", "next_epoch"]
"""Where a client without a position begins."""


class Hello(Message, frozen=True):
    """Begins a session that reads `feed`. `client` names the consumer in status and logs."""

    version: Version
    feed: Line
    client: Line = ""

    def __post_init__(self) -> None:
        clean(self, "client")


class PositionPart(Message, frozen=True):
    """A piece of the position at which the session's stream begins. All pieces come in order, before Open and on the
    same transport; together they are a packed `Position`. Without them the stream begins at epoch 0."""

    session: Token
    data: Annotated[bytes, Meta(max_length=64 * 1024)]


class Had(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Batches of a slab that was handed over: `batches` of lane `lane` (-1: merged ones), from number `index` on."""

    epoch: Epoch
    lane: Lane
    index: Progress
    batches: Batches


class Open(Message, frozen=True):
    """Opens the session's stream at the position that was sent, on the transport by which this message comes.

    Over a unix connection it is the first message, and `proof` repeats the nonce in the ledger. Over ZeroMQ `proof` is
    empty. At most `credit` slabs and `credit_bytes` bytes (but always one slab) are under way: sent, and not handed
    over. Of the slabs that were handed over, the client aliases at most `quota` (0 over ZeroMQ), and copies the others.

    `consumer` is the same in all sessions of one consumer: a session ends older ones with the same, of any feed.
    `again`: the consumer read this stream before, and its position is where it was cut off.

    With a `group` alone all consumers of that group share the stream, and each batch goes to one of them. If one comes
    `again`, `handed` says how many slabs of its session `last` were handed over. `had` names the newest of them, as
    many as a daemon may not have been told of: another daemon counts them as handed over.

    With a `world_size` ranks 0 to `world_size` - 1 of the `group` share the stream, and batch j of an epoch goes to
    rank j mod `world_size`. The stream begins when all ranks are there. `pad`: repeats fill up an epoch's last round if
    it has fewer batches than there are ranks; otherwise that round is left out.

    `fetches` (ZeroMQ only): the client can fetch slabs from other hosts, and HostAt tells it where these are.

    `shares`: the client may read one stream together with other jobs. (A job is a single client, or all ranks of a
    `world_size`.) Each job still gets all of it, at its own pace. The client must then obey `shared` in Slab, and
    connect again if the session fails with StreamMoved. `start`: where it begins without a position, if it can share
    the stream of other jobs: with the next batch that these are sent ("latest"), or with the next epoch that they begin
    ("next_epoch"). `Opened` says where.
    """

    session: Token
    proof: Annotated[bytes, Meta(max_length=16)]
    credit: Annotated[int, Meta(ge=1, le=4096)]
    credit_bytes: Count
    quota: Annotated[int, Meta(ge=0, le=4096)]
    consumer: Annotated[bytes, Meta(max_length=16)] = b""
    again: bool = False
    group: Annotated[str, Meta(max_length=128, pattern=rf"\A{GROUP}\Z")] = ""
    rank: Annotated[int, Meta(ge=0, lt=MAX_WORLD)] = 0
    world_size: Annotated[int, Meta(ge=0, le=MAX_WORLD)] = 0
    last: Annotated[bytes, Meta(max_length=16)] = b""
    handed: Count = 0
    pad: bool = False
    had: Annotated[tuple[Had, ...], Meta(max_length=4096)] = ()
    fetches: bool = False
    shares: bool = False
    start: Start = "beginning"


class Reaches(Message, frozen=True):
    """The client has a connection to this host (HostAt) or, if not `reached`, no longer has one."""

    host: Count
    reached: bool


class Resend(Message, frozen=True):
    """Asks for the bytes of slab `seq`, which the client could not fetch from their host. They come in Chunks, as soon
    as the daemon has them."""

    seq: Count


class Begin(Message, frozen=True):
    """The client wants this epoch from its first batch on. Epochs only go up."""

    epoch: Epoch


class Ack(Message, frozen=True):
    """The first `handed` slabs of the session were handed over, or are void with their epoch.

    `released` (unix only): sequence numbers of slabs over which no tensor lives any longer. `ended`: how many End
    messages came.
    """

    handed: Count
    released: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    ended: Count = 0


class Leave(Message, frozen=True):
    """The client leaves this epoch before its end. Slabs of it that were sent and not handed over are void.

    `handed`: how many of the slabs sent so far were handed over, or were void before this.
    """

    epoch: Epoch
    handed: Count = 0


class Ping(Message, frozen=True):
    """A sign of life. Answered by Pong."""


class Close(Message, frozen=True):
    """Ends the session. `handed` as in Leave."""

    handed: Count = 0


class StatusRequest(Message, frozen=True):
    """Asks for the daemon's status. Needs no session. `version` as in Hello."""

    version: Version


class StopRequest(Message, frozen=True):
    """Asks the daemon to stop when the epochs that are being read have ended, or `now`.

    Only over a unix connection, from the daemon's own user or root.
    """

    now: bool = False


class ScaleRequest(Message, frozen=True):
    """Asks for this number of workers: of the daemon's own, or of those of the joined host of this name. Answered by
    Scaled. Only over a unix connection, as StopRequest.

    With `now`, surplus workers end at once, and other workers do their work again. Otherwise they first give up their
    lanes at borders.
    """

    workers: Annotated[int, Meta(ge=1, le=4096)]
    now: bool = False
    host: Line = ""


class ScaleHostsRequest(Message, frozen=True):
    """Asks for this number of hosts, of a daemon whose engine runs hosts (`serve --on`). Answered by Scaled. Only over
    a unix connection, as StopRequest."""

    hosts: Annotated[int, Meta(ge=1, le=4096)]


class StacksRequest(Message, frozen=True):
    """Asks for the stacks files of the workers, to profile them. Answered by a WorkerStacks for each worker that is
    ready, and then StacksSent. Only over a unix connection, as StopRequest.
    """


class ProfileHosts(Message, frozen=True):
    """Asks for samples of the stacks of the workers of joined hosts, `rate` a second for `seconds`. Answered by a
    HostSampled for each host, and then by WorkerSampled and further HostSampled until all hosts have ended. The end of
    the connection ends the profile. Only over a unix connection, as StopRequest, and once.
    """

    seconds: Annotated[float, Meta(ge=0, le=MAX_PROFILE_SECONDS)]
    rate: Annotated[float, Meta(ge=0.1, le=1000)]


class Source(Struct, frozen=True, forbid_unknown_fields=True):
    """A feed that a joining host serves: MODULE:ATTR as typed there, and the SHA-256 of the module's file."""

    feed: Line
    digest: Digest


class Join(Message, frozen=True):
    """A host offers its `workers` for the feeds that the daemon serves. Answered by Joined, or Failed. What follows is
    another conversation (hosts.py).

    `host` names it in status and logs. `process` is random, and stays the same when this process joins again.
    `penstock`, `python` and `numpy` are versions; they and the feeds' sources must be those of the daemon. `memory`:
    bytes that the host allows for slots. `fetch_port`: the port where consumers can fetch slabs, at the address from
    which the host joins; 0: none. `unix`: the address for consumers on the host's machine.
    """

    version: Version
    host: Name
    process: Token
    workers: Annotated[int, Meta(ge=1, le=4096)]
    memory: Count
    penstock: Line
    python: Line
    numpy: Line
    sources: Annotated[tuple[Source, ...], Meta(max_length=256)]
    fetch_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    unix: UnixName = ""

    def __post_init__(self) -> None:
        clean(self, "host", most=128)


ClientMessage: TypeAlias = (
    Hello
    | Join
    | PositionPart
    | Open
    | Reaches
    | Resend
    | Begin
    | Ack
    | Leave
    | Ping
    | Close
    | StatusRequest
    | StopRequest
    | ScaleRequest
    | ScaleHostsRequest
    | StacksRequest
    | ProfileHosts
)
