"""Messages between the daemon (at the *head*) and a host that joins it, over ZMTP.

A host's connection begins with Join (client.py). After Joined, both sides send these. What a worker says and hears
crosses the connection as it is, in Said and Say, but for memory: Payload and SplitsPart have a second frame, with bytes
that the receiver puts where they belong before it reads on.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from .base import Count, Index, Line, Message
from .server import Failed
from .watching import (
    ActivityShown,
    MeasureMemory,
    MemoryMeasured,
    SampleStacks,
    SamplingEnded,
    ShowActivity,
    StacksSampled,
)

MAX_WORKERS = 4096
"""Most workers of a host."""

WorkerMessage = Annotated[bytes, Meta(max_length=128 * 1024 - 1024)]
"""A message of the conversation between the daemon and a worker."""
Seconds = Annotated[float, Meta(ge=0)]

# --- from the head ---


class Joined(Message, frozen=True):
    """The head takes the host's workers: the first has the number `first`, the others those that follow. Workers of
    a host are named by these numbers. A number is used once."""

    first: Index


class Say(Message, frozen=True):
    """Give a worker this message. `process`: how many processes of this worker have ended, as far as the head knows. A
    message for one that has ended is dropped.

    Fill and WriteRows name no memfd: the host finds memory of its own, and sends the bytes as Payload. With `keep` it
    keeps them until Release, so that consumers can fetch them. It then sends them only if the head asks (SendKept), if
    it needs the memory, or before it leaves.
    """

    worker: Index
    process: Count
    data: WorkerMessage
    keep: bool = False


class SendKept(Message, frozen=True):
    """Send the bytes that are kept for this ticket, as Payload, and then KeptNoLonger."""

    ticket: Count


class Release(Message, frozen=True):
    """Nobody needs what is kept for this ticket any longer."""

    ticket: Count


class SplitsPart(Message, frozen=True):
    """`size` bytes of list `splits` from byte `start` on; the list has `nbytes`. The bytes are the second frame. The
    parts of a list come in order, one list after another, before the first StartRun that names it."""

    splits: Count
    start: Count
    size: Annotated[int, Meta(ge=1, le=4 * 1024 * 1024)]
    nbytes: Count


class SplitsGone(Message, frozen=True):
    """Nothing will refer to this list again."""

    splits: Count


class Accepted(Message, frozen=True):
    """The worker serves the same feeds as the others, and gets work."""

    worker: Index


class Scale(Message, frozen=True):
    """The host is to have `workers` workers from now on, and offers as many when it joins again. `more` of them are
    new, with the numbers from `first` on. Those that are too many get a Retire each when they have no work left."""

    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
    first: Index
    more: Annotated[int, Meta(ge=0, le=MAX_WORKERS)]


class AdmitClients(Message, frozen=True):
    """Only clients with these public keys (Z85) may fetch from the host. `more`: another message continues the list."""

    keys: Annotated[tuple[Annotated[bytes, Meta(min_length=40, max_length=40)], ...], Meta(max_length=2048)]
    more: bool = False


class Retire(Message, frozen=True):
    """The worker has no work left, and gets none: end it. The last one ends the host."""

    worker: Index


class Kill(Message, frozen=True):
    """Kill the worker's process. Another one takes its place, as after any death."""

    worker: Index


class Beat(Message, frozen=True):
    """A sign of life, once a second."""


FromHead: TypeAlias = (
    Joined
    | Say
    | SendKept
    | Release
    | AdmitClients
    | SplitsPart
    | SplitsGone
    | Accepted
    | Scale
    | Retire
    | Kill
    | Beat
    | MeasureMemory
    | ShowActivity
    | SampleStacks
    | Failed
)

# --- from the host ---


class Said(Message, frozen=True):
    """What a worker has said. File descriptors do not cross: a host's workers list no splits.

    `secret`: not empty if the host keeps the batches of a Made. Consumers that name it may fetch them."""

    worker: Index
    data: WorkerMessage
    secret: Annotated[bytes, Meta(max_length=16)] = b""


class KeptNoLonger(Message, frozen=True):
    """Nothing is kept for this ticket any longer: all of it was sent before, as Payload, or Release has come. Said once
    for each ticket of which something was kept."""

    ticket: Count


class Payload(Message, frozen=True):
    """`nbytes` bytes that the worker has written in this run to the slot of `ticket`, from byte `start` on. They are
    the second frame, and come before the Made or RowsWritten that is about them."""

    worker: Index
    run: Count
    ticket: Count
    start: Count
    nbytes: Annotated[int, Meta(ge=1, le=4 * 1024 * 1024)]


class LastActivity(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's activity, as in penstock_server/activity.py."""

    run: Annotated[int, Meta(ge=-1, le=2**62)]
    number: Annotated[int, Meta(ge=-1, le=2**62)]
    split: Line
    samples: Count
    since_seconds: float
    in_user_code: bool
    importing: bool
    waits: bool
    cut_off: bool
    works_on: Annotated[int, Meta(ge=-1, le=2**62)]


class WorkerEnded(Message, frozen=True):
    """A worker's process has ended: how, and what it did last. Another one takes its place."""

    worker: Index
    how: Line
    doing: LastActivity | None


class GivenUp(Message, frozen=True):
    """No further process takes this worker's place."""

    worker: Index
    how: Line


class Leaving(Message, frozen=True):
    """The host wants to leave: the head gives its workers no new lanes, and retires them one by one."""


class Doing(Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker works on, as in the status."""

    what: Line
    split: Line | None
    samples: Count
    seconds: float


class TimeSpent(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker's time went, in seconds, as in the status."""

    seconds: float
    idle_seconds: float
    user_seconds: float
    cpu_seconds: float
    cpu_wait_seconds: float


class WorkerReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker, as in the status."""

    number: Index
    pid: Index | None
    restarts: Count
    ready: bool
    given_up: bool
    stopped: bool
    doing: Doing | None
    spent: TimeSpent | None


class HostReport(Message, frozen=True):
    """The state of a host, once a second, which is also its sign of life.

    `workers`: some of its workers, in turn if there are many. `memory`: bytes of its slots, of the `allowed` ones.
    `unsent`: bytes that wait for the connection. `unfetched`: bytes that consumers fetch, and that wait for their
    connections. `lent`: bytes that consumers on the host's machine have borrowed since it joined. `cpus`: how many its
    processes may use.
    """

    workers: Annotated[tuple[WorkerReport, ...], Meta(max_length=64)]
    memory: Count
    allowed: Count
    unsent: Count
    cpus: Count
    unfetched: Count = 0
    lent: Count = 0


FromHost: TypeAlias = (
    Said
    | KeptNoLonger
    | Payload
    | WorkerEnded
    | GivenUp
    | Leaving
    | HostReport
    | MemoryMeasured
    | ActivityShown
    | StacksSampled
    | SamplingEnded
)
