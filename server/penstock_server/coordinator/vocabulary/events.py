"""Events: the coordinator's input. Only `Coordinator.handle` takes them, and nothing else changes its state.

A worker's message about a ticket is itself an event (`messages.Made`, `NeedRoom`, `RowsMeasured`, `RowsWritten`).
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from penstock_proto import DaemonStopped, PenstockError
from penstock_proto.messages import FeedPlan, FirstSample, Made, NeedRoom, RowsMeasured, RowsWritten
from penstock_proto.spec import Spec

from .ask import Ask
from .feeds import Skipped, SplitsInfo
from .group_log import SavedGroup

# --- consumers: each event names the consumer by the number that `Open` gave it ---


class Open(Struct, frozen=True):
    """A consumer wants to read a feed. The coordinator answers with `Tell` (an Opened), or `Refuse`. `consumer`: a new
    number."""

    consumer: int
    feed: str
    ask: Ask


class Begin(Struct, frozen=True):
    """The consumer wants to read this epoch."""

    consumer: int
    epoch: int


class Acknowledge(Struct, frozen=True):
    """The consumer has handed over `handed` slabs and seen `ended` epochs end, in all. It now releases the slabs
    `released`."""

    consumer: int
    handed: int
    released: tuple[int, ...]
    ended: int


class Leave(Struct, frozen=True):
    """The consumer leaves the epoch early. It hands over only the first `handed` slabs."""

    consumer: int
    epoch: int
    handed: int


class Close(Struct, frozen=True):
    """The consumer wants nothing more, but tensors may still live over its slots. `handed` as in Leave."""

    consumer: int
    handed: int


class Cut(Struct, frozen=True):
    """The daemon has ended a session over a unix connection, but tensors may still live over its slots. `Lost` follows
    when the connection ends. `handed` as in Leave."""

    consumer: int
    handed: int


class Lost(Struct, frozen=True):
    """The consumer's connection has ended, or its session over the network: none of its tensors lives over a slot now.
    `handed` as in Leave."""

    consumer: int
    handed: int


# --- workers ---


class Imported(Struct, frozen=True):
    """A worker has imported the user's modules, which declare these feeds. The coordinator answers with `AcceptWorker`
    or `RejectWorker`."""

    worker: int
    feeds: tuple[FeedPlan, ...]


class SplitsListed(Struct, frozen=True):
    """A worker has listed splits. A feed's first list comes with the feed's spec and the size of a sample."""

    run: int
    splits: SplitsInfo
    spec: Spec | None = None
    sample_nbytes: int = 0
    first: FirstSample | None = None


class RunFailed(Struct, frozen=True):
    """User code failed in the run. The worker has closed the run with all of its turns."""

    run: int
    error: PenstockError


class SplitSkipped(Struct, frozen=True):
    """The run leaves out the rest of a split, because user code raised (`on_error="skip"`) or `StartRun.skip` says so.
    `number`: the split's number within the lane."""

    run: int
    number: int
    skipped: Skipped


class WorkerDied(Struct, frozen=True):
    """A worker process has ended, and another takes its place.

    `blamed`: the run that it was working on, the number of the split within the lane (-1 if the worker was outside user
    code), and the name of the split; None if it was not working on anything.
    """

    worker: int
    how: str
    blamed: tuple[int, int, str] | None = None


class WorkerAdded(Struct, frozen=True):
    """Another worker was added. It gets work once it has imported the feeds. `machine`: as in `Ask`."""

    worker: int
    machine: str = ""


class RetireWorkers(Struct, frozen=True):
    """These workers are to leave. Each hands over its lanes at their next borders, and `Retire` then ends it. With
    `now`, those that still have work are killed at once. If no other worker can make batches, they go on until they are
    gone or lost."""

    workers: tuple[int, ...]
    now: bool = False


class WorkerGone(Struct, frozen=True):
    """The worker has ended for good: no other process takes its place."""

    worker: int
    how: str


class WorkerStands(Struct, frozen=True):
    """One of the daemon's own workers has been in one call of user code for `seconds`, for this run. Comes again and
    again as long as this goes on.

    It has been sent all commands so far, and reads all of them before its next step. So it begins no work of a run that
    it was told to drop, and writes nothing more for it.
    """

    worker: int
    run: int
    seconds: float


class WorkerGoesOn(Struct, frozen=True):
    """A worker that stood has not done so for a while. (If it has died or left, this event does not come.)"""

    worker: int


class WorkersLost(Struct, frozen=True):
    """A joined host is lost, with these workers. Their numbers are not used again. No split is to blame.

    If no other worker can make batches, streams wait for the next one.
    """

    workers: tuple[int, ...]
    how: str


# --- slots ---


class SlotFound(Struct, frozen=True):
    """The daemon has found a slot for the ticket."""

    ticket: int


class NoSlot(Struct, frozen=True):
    """The machine has had no memory for the ticket's slot for some time, or the copy into it failed."""

    ticket: int
    error: PenstockError


class Copied(Struct, frozen=True):
    """The daemon has made the copy that `Copy` asked for."""

    ticket: int


class BytesLost(Struct, frozen=True):
    """The batches of these tickets were reported, but their bytes had stayed at a host (`Fill.may_stay`), and that host
    is lost. Comes after WorkersLost."""

    tickets: tuple[int, ...]


class SlotsAllowed(Struct, frozen=True):
    """From now on all streams together may have `slots` slots: workers came or went, which use file descriptors, too.
    Streams keep the slots that they have."""

    slots: int


# --- the daemon ---


class Stop(Struct, frozen=True):
    """The daemon is to stop. Epochs that are being read go on to their ends, and no other epoch begins. Then each
    stream fails with this reason."""

    reason: DaemonStopped


class NotSaved(Struct, frozen=True):
    """The daemon could not write the state file, which still has `saved` for the group. The group's stream fails,
    unless it has ended."""

    feed: str
    group: str
    saved: SavedGroup | None
    error: DaemonStopped


class StreamFailed(Struct, frozen=True):
    """Something that concerns this stream failed. An error other than a PenstockError is a bug."""

    stream: int
    error: Exception


class CheckBegan(Struct, frozen=True):
    """A worker makes samples of this run again, to compare them. The end of the epoch waits for that."""

    run: int


class CheckEnded(Struct, frozen=True):
    """It has compared them, or nobody waits for it any longer."""

    run: int


class Tick(Struct, frozen=True):
    """Only time has passed."""


ConsumerEvent: TypeAlias = Begin | Acknowledge | Leave | Close | Cut | Lost
RunEvent: TypeAlias = RunFailed | SplitSkipped | SplitsListed
TicketEvent: TypeAlias = Made | NeedRoom | RowsMeasured | RowsWritten | SlotFound | NoSlot | Copied
Event: TypeAlias = (
    Open
    | ConsumerEvent
    | RunEvent
    | TicketEvent
    | Imported
    | WorkerDied
    | WorkerAdded
    | RetireWorkers
    | WorkerGone
    | WorkerStands
    | WorkerGoesOn
    | WorkersLost
    | BytesLost
    | SlotsAllowed
    | Stop
    | NotSaved
    | StreamFailed
    | CheckBegan
    | CheckEnded
    | Tick
)
