"""Events: the coordinator's input. Only `Coordinator.handle` takes them, and nothing else changes its state.

A worker's message about a ticket is itself an event (`messages.Made`, `NeedRoom`, `RowsMeasured`, `RowsWritten`). What
follows from it stands at its method in `routing.py`. docs/events.py makes a table of all of this.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from penstock_proto import DaemonStopped, PenstockError
from penstock_proto.messages import FeedPlan, FirstSample, Made, NeedRoom, RowsMeasured, RowsWritten
from penstock_proto.spec import Spec

from .feeds import Skipped
from .group_log import SavedGroup
from .known_lists import SplitsInfo
from .open_request import OpenRequest

# --- consumers: each event names the consumer by the number that `Open` gave it ---


class Open(Struct, frozen=True):
    """A consumer wants to read a feed. The coordinator checks its position and grants it memory. The consumer gets a
    stream of its own, joins that of its group, or waits for the other ranks. The answer is `Opened` (in a `Tell`) or
    `Refuse`.

    `consumer`: a new number.
    """

    consumer: int
    feed: str
    ask: OpenRequest


class Begin(Struct, frozen=True):
    """The consumer reads this epoch from now on. If the other ranks waited only for this one, their stream begins.
    Epochs that no consumer wants now are closed: their runs are dropped, and their turns leave the order."""

    consumer: int
    epoch: int


class Acknowledge(Struct, frozen=True):
    """The consumer gives back credit and slots. It has handed over `handed` slabs and seen `ended` epochs end, in all,
    and now releases the slabs `released`. Impossible counts change nothing but end the session (`Refuse`); the daemon
    then reports `Cut` or `Lost`."""

    consumer: int
    handed: int
    released: tuple[int, ...]
    ended: int


class Leave(Struct, frozen=True):
    """The consumer leaves the epoch early, and hands over only the first `handed` slabs. The epoch is closed if no
    other consumer wants it."""

    consumer: int
    epoch: int
    handed: int


class Close(Struct, frozen=True):
    """The consumer wants nothing more, but tensors may still live over its slots, which come back as it releases them.
    The stream closes with its last consumer. In a group, the batches that this member was not handed go to others, and
    the stream closes when all members have closed and none may come back. If it is a rank, the others get the batches
    already dealt to them, and then `StreamClosed`.

    `handed`: as in Leave.
    """

    consumer: int
    handed: int


class Cut(Struct, frozen=True):
    """The daemon has ended a session, but its unix connection still exists, so tensors may live over its slots (`Lost`
    follows when it ends). As `Close`, but the client may come back: a stream of ranks fails for all of them; a group's
    goes on, and closes if nobody reads it for a minute.

    `handed`: as in Leave.
    """

    consumer: int
    handed: int


class Lost(Struct, frozen=True):
    """The consumer's connection has ended, or its session over the network. As `Cut`, and all its slots come back at
    once: no tensor lives over them.

    `handed`: as in Leave.
    """

    consumer: int
    handed: int


# --- workers ---


class Imported(Struct, frozen=True):
    """A worker has imported the user's modules, which declare these feeds; the answer is `AcceptWorker` or
    `RejectWorker`. The first of the daemon's own workers lists the feeds' splits and makes a first sample of each
    (`ListSplits`). Later workers are accepted if they have imported the same feeds; remote workers never come first.
    An accepted worker takes over the work that waited for one, and lanes may move to it. With more workers than
    before, streams may hold more slots, until half of all memory is reserved."""

    worker: int
    feeds: tuple[FeedPlan, ...]


class SplitsListed(Struct, frozen=True):
    """A worker has listed splits. At the start of the daemon the feed is now ready (`FeedReady`). In a stream, the
    coordinator plans the order of the epoch, and its consumers get `Begun`. A feed's first list comes with the feed's
    spec and the size of a sample. `sample_spec`: as in messages.SplitsListed."""

    run: int
    splits: SplitsInfo
    spec: Spec | None = None
    sample_nbytes: int = 0
    first: FirstSample | None = None
    sample_spec: Spec | None = None


class RunFailed(Struct, frozen=True):
    """User code failed in the run. The worker has closed the run with all of its turns. With `on_error="retry"` the
    lane pauses, and then another run begins at its record; slots that are found meanwhile wait (IDLE), and so do
    merged batches with rows of the lane. Otherwise the lane has failed: its turns take the error, and the stream fails
    when the order reaches one of them. The same rule holds for a list of splits: it is tried again, or fails the
    stream."""

    run: int
    error: PenstockError


class SplitSkipped(Struct, frozen=True):
    """The run leaves out the rest of a split: user code raised (`on_error="skip"`), or `StartRun.skip` says so, after
    deaths. The coordinator counts it for the status and has it logged (`ReportSkipped`). Consumers are not told.

    `number`: the split's number within the lane.
    """

    run: int
    number: int
    skipped: Skipped


class WorkerDied(Struct, frozen=True):
    """A worker process has ended, and another takes its place. All its runs are gone. Other workers continue its lanes
    from their records, and fill its unfinished turns, also those of pools. If a split is blamed, its lane may first
    pause, leave out the split, or fail. If there are several streams, it goes on in a worker that is *set apart*: one
    that makes only such lanes for a minute, and hands over all others first.

    `blamed`: the run that it was working on, the number of the split within the lane (-1 if the worker was outside
    user code), and the name of the split; None if it was not working on anything.
    """

    worker: int
    how: str
    blamed: tuple[int, int, str] | None = None


class WorkerAdded(Struct, frozen=True):
    """There is one worker more. It gets work once it has imported the feeds.

    `machine`: as in `OpenRequest`.
    """

    worker: int
    machine: str = ""


class RetireWorkers(Struct, frozen=True):
    """These workers are to leave. Their lanes move at their next borders; lanes that have ended stay until their
    leftover rows are written. After 60 s lanes move wherever they are, and 10 s later the workers are killed; with
    `now`, those that still have work are killed at once. A worker without work for any stream is ended (`Retire`). If
    no other worker can make batches, they go on until they are gone or lost."""

    workers: tuple[int, ...]
    now: bool = False


class WorkerGone(Struct, frozen=True):
    """The worker has ended for good: no other process takes its place. If none is left, all streams fail. If the
    daemon has none of its own left, the streams that need one for lists of splits or pools fail."""

    worker: int
    how: str


class WorkerStands(Struct, frozen=True):
    """One of the daemon's own workers has been in one call of user code for `seconds`, for this run. It gets no new
    work while others do not stand. What it has not begun for other streams goes to others: its runs are dropped, and
    at the next such event their turns are taken from them. A lane stays if others would take longer to read it again
    than the call has lasted; so does one whose leftover rows the worker may be writing.

    Comes again and again as long as the call goes on. The worker has been sent all commands so far, and reads all of
    them before its next step. So it begins no work of a run that it was told to drop, and writes nothing more for it.
    """

    worker: int
    run: int
    seconds: float


class WorkerGoesOn(Struct, frozen=True):
    """A worker that stood has not done so for a while. It gets work of all streams again, and lanes move to it at
    their next borders. (If it has died or left, this event does not come.)"""

    worker: int


class WorkersLost(Struct, frozen=True):
    """A joined host is lost, with these workers. Others continue their lanes as after a death, but no split is blamed.
    If no worker is left that makes batches, the work waits for the next one. The numbers are not used again."""

    workers: tuple[int, ...]
    how: str


# --- slots ---


class SlotFound(Struct, frozen=True):
    """The daemon has found a slot for the ticket. Its turn becomes IDLE, and the lane's run is told to fill it. If the
    lane has ended or failed meanwhile, the turn is complete at once. For a merged batch, each lane's run is told to
    write its rows (`WriteRows`); for a turn of a pool, one of the daemon's own workers is told to copy rows of the
    pool's visits (`PoolRows`); for a copy, the command is `Copy`."""

    ticket: int


class NoSlot(Struct, frozen=True):
    """The machine has had no memory for the ticket's slot (for 10 s, if slots of the stream may come free). The
    stream fails with `MemoryBound`."""

    ticket: int
    error: PenstockError


class BytesLost(Struct, frozen=True):
    """The batches of these tickets were reported, but their bytes had stayed at a host (`Fill.may_stay`) that is now
    lost. Each slot is made again by a run of its own (`StartRun`, `Fill`, and in the end `Remade`), once its turn is
    complete. Slots that nobody holds are skipped. Comes after WorkersLost."""

    tickets: tuple[int, ...]


class SlotsAllowed(Struct, frozen=True):
    """From now on all streams together may have `slots` slots: workers came or went, which use file descriptors, too.
    Streams keep the slots that they have."""

    slots: int


# --- the daemon ---


class Stop(Struct, frozen=True):
    """The daemon is to stop. No epoch begins, and no consumer is admitted, not even one that comes back, except those
    of the state file for which a group waits. A stream fails with this reason when its consumers have acknowledged
    everything up to the ends of their epochs (in an endless epoch: everything that was sent). Its group stays in the
    file. The daemon ends when all streams have failed or closed."""

    reason: DaemonStopped


class NotSaved(Struct, frozen=True):
    """The daemon could not write the state file, which still has `saved` for the group. The group's stream fails,
    unless it has ended. When its members come back, the group continues from the position in the file."""

    feed: str
    group: str
    saved: SavedGroup | None
    error: DaemonStopped


class StreamFailed(Struct, frozen=True):
    """The daemon failed at something for this stream, mostly a command. The stream fails. An error other than a
    PenstockError is a bug."""

    stream: int
    error: Exception


class CheckBegan(Struct, frozen=True):
    """Another worker makes samples of this run again, to compare them. The end of the epoch waits for that, so lost
    rows are an error of that epoch."""

    run: int


class CheckEnded(Struct, frozen=True):
    """It has compared them, or nobody waits for it any longer."""

    run: int


class Tick(Struct, frozen=True):
    """Only time has passed. Due timers fire: a lane's pause is over, a leaving worker's time is up, or it is time to
    look for groups that nobody reads, for consumers of a state file that do not come, and for missing ranks."""


ConsumerEvent: TypeAlias = Begin | Acknowledge | Leave | Close | Cut | Lost
RunEvent: TypeAlias = RunFailed | SplitSkipped | SplitsListed
TicketEvent: TypeAlias = Made | NeedRoom | RowsMeasured | RowsWritten | SlotFound | NoSlot
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
