"""Messages between the daemon (at the *head*) and a host that joins it, over ZMTP.

A host's connection begins with Join (client.py). After Joined, both sides send these. Messages from and to a worker
cross the connection unchanged, in Said and Say, except for memory: Payload and SplitsPart have a second frame, with
bytes that the receiver puts into place before it reads on.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from ..declarations import figure
from .base import Count, Index, Line, Message, clean
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
    """The head accepts the host's workers. The first has the number `first`, the others the numbers that follow. These
    numbers identify the workers from now on, and the head never reuses one."""

    first: Index


class Say(Message, frozen=True):
    """Give a worker this message. `process`: how many processes of this worker have ended, as far as the head knows.
    The host drops a message for a process that has ended.

    Fill and WriteRows name no memfd: the host finds memory of its own, and sends the bytes as Payload. With `keep` it
    keeps them until Release, so that consumers can fetch them. It then sends them only if the head asks (SendKept), if
    it needs the memory, or before it leaves.
    """

    worker: Index
    process: Count
    data: WorkerMessage
    keep: bool = False


class SendKept(Message, frozen=True):
    """Send the kept bytes of this ticket, as Payload, and then KeptNoLonger."""

    ticket: Count


class Release(Message, frozen=True):
    """Nobody needs the kept bytes of this ticket any longer."""

    ticket: Count


class SplitsPart(Message, frozen=True):
    """`size` bytes of list `splits` from byte `start` on; the list has `nbytes` bytes. The bytes are the second frame.
    The parts of a list come in order, one list after another, before the first StartRun that names it."""

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
    """The host must have `workers` workers from now on, and offers as many when it joins again. `more` of them are new,
    with the numbers from `first` on. Each surplus worker gets a Retire when it has no work left."""

    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
    first: Index
    more: Annotated[int, Meta(ge=0, le=MAX_WORKERS)]


class AdmitClients(Message, frozen=True):
    """Only clients with these public keys (Z85) may fetch from the host. `more`: another message continues the list."""

    keys: Annotated[tuple[Annotated[bytes, Meta(min_length=40, max_length=40)], ...], Meta(max_length=2048)]
    more: bool = False


class Retire(Message, frozen=True):
    """The worker has no work left and gets no more: end it. The last Retire ends the host."""

    worker: Index


class Kill(Message, frozen=True):
    """Kill the worker's process. Another process takes its place, as after any death."""

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
    """A message from a worker. File descriptors do not cross: a host's workers list no splits.

    `secret`: not empty if the host keeps the batches of a Made. Consumers that name it may fetch them."""

    worker: Index
    data: WorkerMessage
    secret: Annotated[bytes, Meta(max_length=16)] = b""


class KeptNoLonger(Message, frozen=True):
    """The host keeps nothing for this ticket any longer: it has sent all of it, as Payload, or Release has come. Sent
    once for each ticket for which the host kept something."""

    ticket: Count


class Payload(Message, frozen=True):
    """`nbytes` bytes that the worker has written in this run to the slot of `ticket`, from byte `start` on. They are
    the second frame, and come before the Made or RowsWritten that reports them."""

    worker: Index
    run: Count
    ticket: Count
    start: Count
    nbytes: Annotated[int, Meta(ge=1, le=4 * 1024 * 1024)]


class LastActivity(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's activity, as in penstock_server/worker_state/activity.py."""

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

    def __post_init__(self) -> None:
        clean(self, "split")


class WorkerEnded(Message, frozen=True):
    """A worker's process has ended: how, and its last activity. Another process takes its place."""

    worker: Index
    how: Line
    doing: LastActivity | None

    def __post_init__(self) -> None:
        clean(self, "how")


class GivenUp(Message, frozen=True):
    """No further process takes this worker's place."""

    worker: Index
    how: Line

    def __post_init__(self) -> None:
        clean(self, "how")


class Leaving(Message, frozen=True):
    """The host wants to leave: the head gives its workers no new lanes, and retires them one by one."""


class Doing(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's current work. This struct and the next two are also parts of the status: they declare its figures."""

    what: Annotated[Line, figure("The split, or a description of other work.")]
    split: Annotated[Line | None, figure("The split that it reads, if it reads one.")]
    samples: Annotated[Count, figure("Samples of the split so far.")]
    seconds: Annotated[float, figure("Seconds since its last progress.")]

    def __post_init__(self) -> None:
        clean(self, "what", "split")


class TimeSpent(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker's time went since it was ready."""

    seconds: Annotated[float, figure("Seconds in total.")]
    idle_seconds: Annotated[float, figure("Seconds without work.")]
    user_seconds: Annotated[float, figure("Seconds in user code, including the time without a CPU there.")]
    cpu_seconds: Annotated[float, figure("CPU time of the worker's process.", "penstock_worker_cpu_seconds_total")]
    cpu_wait_seconds: Annotated[
        float,
        figure(
            "Seconds in which the worker could have run, and no CPU was free.",
            "penstock_worker_cpu_wait_seconds_total",
        ),
    ]


class Machine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The CPUs of a host. Times are counted since the daemon, or the host, was started, and added up over CPUs."""

    count: Annotated[Count, figure("CPUs that Penstock may run on, without regard to quotas of its cgroups.")]
    idle_seconds: Annotated[float, figure("Seconds in which they were idle.")]
    free_seconds: Annotated[
        float, figure("CPU seconds that Penstock could have used in addition: idle ones that quotas allow.")
    ]
    stolen_seconds: Annotated[float, figure("Seconds that the hypervisor gave to other hosts.")]


class WorkerReport(Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of a worker that its own host knows. Those that the head adds are in status/worker_status.py."""

    number: Annotated[Index, figure("Its number.")]
    pid: Annotated[Index | None, figure("Its process. None if there is none at the moment.")]
    restarts: Annotated[Count, figure("How often the worker's process was replaced.", "penstock_worker_restarts_total")]
    ready: Annotated[
        bool, figure("Whether the worker has imported the feeds and can be given work.", "penstock_worker_ready")
    ]
    given_up: Annotated[bool, figure("Whether no further process is started for it: too many have died.")]
    stopped: Annotated[bool, figure("Whether a signal has stopped its process.")]
    doing: Annotated[Doing | None, figure("Its current work, if it has any.")]
    spent: Annotated[TimeSpent | None, figure("Where its time went since it was ready.")]


class HostReport(Message, frozen=True):
    """The state of a host, once a second, which is also its sign of life.

    `workers`: some of its workers, in turn if there are many. `memory`: bytes of its slots, out of `allowed` bytes.
    `unsent`: bytes that wait for the connection to the head. `unfetched`: bytes that consumers asked for, and that wait
    for their connections. `lent`: bytes that consumers on the host's machine have borrowed since it joined. `cpus`: how
    many CPUs its processes may use. `machine`: how busy its CPUs are.
    """

    workers: Annotated[tuple[WorkerReport, ...], Meta(max_length=64)]
    memory: Count
    allowed: Count
    unsent: Count
    cpus: Count
    unfetched: Count = 0
    lent: Count = 0
    machine: Machine | None = None


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
