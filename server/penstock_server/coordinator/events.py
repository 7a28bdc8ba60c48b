"""Events: what the coordinator is told. Only `Coordinator.handle` takes them, and nothing else changes its state.

What a worker says about a run or a ticket comes as the message itself (`messages.Made`, `NeedRoom`, `RowsMeasured`,
`RowsWritten`).
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
    """A consumer wants to read a feed. Answered by `Tell` of an Opened, or by `Refuse`. `consumer`: a new number."""

    consumer: int
    feed: str
    ask: Ask


class Begin(Struct, frozen=True):
    """The consumer wants this epoch."""

    consumer: int
    epoch: int


class Acknowledge(Struct, frozen=True):
    """The consumer was handed `handed` slabs in all, released those in `released`, and saw `ended` epochs end."""

    consumer: int
    handed: int
    released: tuple[int, ...]
    ended: int


class Leave(Struct, frozen=True):
    """The consumer leaves the epoch early, and hands over only the first `handed` slabs."""

    consumer: int
    epoch: int
    handed: int


class Close(Struct, frozen=True):
    """The consumer wants nothing more, but tensors may still live over its slots. `handed` as in Leave."""

    consumer: int
    handed: int


class Cut(Struct, frozen=True):
    """The consumer is cut off, but tensors may still live over its slots. `handed` as in Leave."""

    consumer: int
    handed: int


class Lost(Struct, frozen=True):
    """The consumer is gone, with all of its tensors. `handed` as in Leave."""

    consumer: int
    handed: int


# --- workers ---


class Imported(Struct, frozen=True):
    """A worker has imported the user's modules, which declare these feeds. Answered by `AcceptWorker` or
    `RejectWorker`."""

    worker: int
    feeds: tuple[FeedPlan, ...]


class SplitsListed(Struct, frozen=True):
    """A list of splits was made. The first one of a feed comes with the feed's spec, and the size of a sample."""

    run: int
    splits: SplitsInfo
    spec: Spec | None = None
    sample_nbytes: int = 0
    first: FirstSample | None = None


class RunFailed(Struct, frozen=True):
    """User code failed in the run. The worker has closed it with all of its turns."""

    run: int
    error: PenstockError


class SplitSkipped(Struct, frozen=True):
    """A worker leaves out the rest of the split that has this number within its lane."""

    run: int
    number: int
    skipped: Skipped


class WorkerDied(Struct, frozen=True):
    """A worker process has ended, and another takes its place.

    `blamed`: the run that it worked on, the number of the split within it (-1: it was outside user code) and the name
    of the split; None if it worked on nothing.
    """

    worker: int
    how: str
    blamed: tuple[int, int, str] | None = None


class WorkerAdded(Struct, frozen=True):
    """Another worker was added. It gets work once it has imported the feeds. `machine`: as in `Ask`."""

    worker: int
    machine: str = ""


class RetireWorkers(Struct, frozen=True):
    """These workers are to leave. They hand over their lanes when these come to borders, or at once if `now`. `Retire`
    ends each. If no other worker can make batches they go on, until they are gone or lost."""

    workers: tuple[int, ...]
    now: bool = False


class WorkerGone(Struct, frozen=True):
    """The worker has ended for good: no other process takes its place."""

    worker: int
    how: str


class WorkersLost(Struct, frozen=True):
    """A host that had joined is gone, with these workers of it. Their numbers are not used again. No split is to blame.

    If no other worker can make batches, streams wait for the next one.
    """

    workers: tuple[int, ...]
    how: str


# --- the host ---


class SlotFound(Struct, frozen=True):
    """The ticket has its slot."""

    ticket: int


class NoSlot(Struct, frozen=True):
    """The machine has no memory for the ticket's slot, or the copy into it failed."""

    ticket: int
    error: PenstockError


class Copied(Struct, frozen=True):
    """The copy that `Copy` asked for is made."""

    ticket: int


class BytesLost(Struct, frozen=True):
    """Batches were reported whose bytes had stayed at a host (`Fill.may_stay`), and that host is lost: those in the
    slots of these tickets. Comes after WorkersLost."""

    tickets: tuple[int, ...]


class SlotsAllowed(Struct, frozen=True):
    """From now on there may be this many slots. Streams keep the slots that they have."""

    slots: int


# --- the daemon ---


class Stop(Struct, frozen=True):
    """The daemon is to stop. Epochs that are being read go on to their ends, and none begins. Then each stream fails
    with this reason."""

    reason: DaemonStopped


class NotSaved(Struct, frozen=True):
    """The state file could not be written, and still has `saved` for the group. The group's stream fails, unless it has
    ended."""

    feed: str
    group: str
    saved: SavedGroup | None
    error: DaemonStopped


class StreamFailed(Struct, frozen=True):
    """Something that concerns this stream failed. Any error but a PenstockError is a bug."""

    stream: int
    error: Exception


class Tick(Struct, frozen=True):
    """Nothing but time has passed."""


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
    | WorkersLost
    | BytesLost
    | SlotsAllowed
    | Stop
    | NotSaved
    | StreamFailed
    | Tick
)
