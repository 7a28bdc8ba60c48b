"""The coordinator: decides what is made, by whom, in which slots, and what is sent to whom. It does no I/O.

Theory of operation. The coordinator has one door: `handle(event, now)` takes something that has happened (events.py)
and returns what is to be done, in order (commands.py). Nothing else changes its state, and nothing in this package
knows a socket, a process or a clock: `now` comes with each event, and `next_tick` says when time alone matters. The
daemon drives it so, and so do the simulation and the tests.

An event is about a consumer, a run, a ticket, or a worker. A consumer reads one stream, and the runs and tickets of
stream s are numbered from s * IDS_PER_STREAM. So an event goes to its stream, and that stream is then settled once: it
sends what it can, and grants what it can (stream.py). What concerns all streams (a worker that died, the end of the
daemon) goes to each of them.

Life of a feed: `Imported` -> its splits and first sample are asked for -> `SplitsListed` -> it can be read, or the
start fails (starting.py). Life of a stream: `Open` (admission.py) -> `Begin`, `Acknowledge`, `Leave` ... -> `Close` or
`Lost` -> it is gone when its last slot has come back.

Failures. What a consumer says that cannot be is refused before anything has changed (`Refuse`). Any other PenstockError
fails the stream that the event is about. Any other exception is a bug, after which nobody knows where that stream
stands: it fails, and nothing is sent or made for it any longer. Its slots come back as workers and consumers let go of
them, and a worker that fills one is never told of another use of it before that. Other streams go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from penstock_proto import DaemonStopped, MemoryBound, PenstockError, ProtocolError, WorkerDied
from penstock_proto.messages import IDS_PER_STREAM, Made, NeedRoom, Opened, RowsMeasured, RowsWritten

from . import commands as do
from . import events as on
from .admission import Admission
from .ask import Ask
from .budget import Budget
from .consumer import Consumer
from .group_log import SavedGroup
from .groups import Groups
from .invariants import check
from .memory import MANY
from .starting import Starting
from .stream import Stream
from .timers import Timers
from .workers import Workers

LOOK_AROUND = 1.0
"""Seconds between two looks at groups that nobody reads, and at ranks that are missing."""

HAND_OVER = 60.0
"""Seconds that a worker which is to leave may go on until its lanes come to a border."""

HURRY = 10.0
"""Seconds that it then has for the batch that it is making, before it is killed."""


class Coordinator:
    """See the file's head.

    Args:
        workers: how many worker processes there are; they are numbered from 0.
        memory: bytes that slots and shuffle blocks may take in all.
        saved: what the state file has of groups, by feed and name; None without such a file.
        slots: how many slots there may be in all.
        patience: seconds for which a group waits for a consumer (default: groups.PATIENCE).

    Attributes:
        workers, budget, streams, consumers, starting, timers: to look at, not to change.
        stopping: why the daemon wants to stop, or None.
    """

    def __init__(
        self,
        *,
        workers: int,
        memory: int,
        saved: Mapping[tuple[str, str], SavedGroup] | None = None,
        slots: int = MANY,
        patience: float | None = None,
    ) -> None:
        self._commands: list[do.Command] = []
        self._do = self._commands.append
        self.workers = Workers(workers)
        self.streams: dict[int, Stream] = {}
        self.consumers: dict[int, Consumer] = {}
        self.stopping: DaemonStopped | None = None
        self.timers = Timers()
        self.budget = Budget(memory, slots, self.streams)
        self.starting = Starting(self.workers, self.budget, self.timers, self._do)
        self.feeds = self.starting.feeds
        self._read: dict[int, Stream] = {}
        """The stream that each consumer reads, also when that has ended."""
        self._touched: dict[Stream, None] = {}
        """The streams that the event in hand is about."""
        self._looks_around = False
        self._groups = Groups(saved, self._do, patience)
        self._admission = Admission(
            self.feeds,
            self.streams,
            workers=self.workers,
            budget=self.budget,
            groups=self._groups,
            later=self._retry_later,
            out=self._do,
        )
        self._handlers: dict[type[on.Event], Callable[..., None]] = {
            on.Open: self._open,
            on.Begin: self._begin,
            on.Acknowledge: self._acknowledge,
            on.Leave: self._leave,
            on.Close: self._close,
            on.Cut: self._cut,
            on.Lost: self._lost,
            Made: self._made,
            RowsMeasured: self._rows_measured,
            RowsWritten: self._rows_written,
            NeedRoom: self._need_room,
            on.SlotFound: self._slot_found,
            on.NoSlot: self._no_slot,
            on.Copied: self._copied,
            on.SplitsListed: self._splits_listed,
            on.RunFailed: self._run_failed,
            on.SplitSkipped: self._split_skipped,
            on.Imported: self._imported,
            on.WorkerDied: self._worker_died,
            on.WorkerAdded: self._worker_added,
            on.RetireWorker: self._retire_worker,
            on.WorkerGone: self._worker_gone,
            on.SlotsAllowed: self._slots_allowed,
            on.Stop: self._stop,
            on.NotSaved: self._not_saved,
            on.StreamFailed: self._stream_failed,
            on.Tick: self._tick,
        }

    # --- the door ---

    def handle(self, event: on.Event, now: float) -> list[do.Command]:
        """Take the event in. Returns what is to be done, in order.

        Args:
            event: what has happened.
            now: the time in seconds from anywhere; it never goes back.

        Raises:
            Exception: a bug showed that is about no stream. Nobody knows then where the coordinator stands.
        """
        self.timers.now = now
        try:
            self._handlers[type(event)](event)
        except Exception as error:
            self._failed(event, error)
        if self._touched:
            self._settle()
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    @property
    def next_tick(self) -> float | None:
        """When it wants to hear a Tick, unless another event comes first; None: not at all."""
        return self.timers.next

    def check(self) -> list[str]:
        """What is wrong with the state, in words: promises that a bug broke. It is slow: for tests and debugging."""
        return check(self.budget, self.streams)

    def _failed(self, event: on.Event, error: Exception) -> None:
        """Refuse what a consumer has said, or let the stream fail that the event is about."""
        if isinstance(error, PenstockError) and isinstance(event, on.Open | on.ConsumerEvent):
            self._do(do.Refuse(event.consumer, error))
            return
        if isinstance(event, on.ConsumerEvent):
            stream = self._read.get(event.consumer)
        elif isinstance(event, on.TicketEvent):
            stream = self.stream_of(event.ticket)
        elif isinstance(event, on.RunEvent) and event.run >= IDS_PER_STREAM:
            stream = self.stream_of(event.run)
        else:
            raise error
        if stream is not None:
            self._fail(stream, error)
        else:  # it has ended
            self._do(do.ReportBug(error))

    def _settle(self) -> None:
        """Let the streams that the event has touched send and grant what they can."""
        failed = None
        while self._touched:
            stream, _ = self._touched.popitem()
            try:
                stream.settle()
            except Exception as error:
                if stream is not failed:
                    failed = stream
                    self._fail(stream, error)
            if stream.done and self.streams.get(stream.number) is stream:
                del self.streams[stream.number]
            if self.workers.leaving:
                self._retire()

    # --- queries ---

    def unknown_feed(self, name: str) -> PenstockError:
        """The error for a feed that is not served; it names those that are."""
        return self._admission.unknown_feed(name)

    def stream_of(self, number: int) -> Stream | None:
        """The stream to which a run or a ticket belongs, if it still exists."""
        return self.streams.get(number // IDS_PER_STREAM)

    def readers_of_group(self, feed: str, group: str) -> list[int]:
        """The consumers that read a group's stream now, if that has not ended."""
        stream = self._groups.stream_of(feed, group)
        if stream is None or stream.closing or stream.error is not None:
            return []
        return [consumer.number for consumer in stream.consumers]

    def stream_read_by(self, consumer: Consumer) -> Stream:
        """The stream that the consumer reads, also if it has ended."""
        return self._read[consumer.number]

    @property
    def stopped(self) -> bool:
        """Whether every consumer has all that was promised to it."""
        return all(stream.error is not None or stream.delivered for stream in self.streams.values())

    # --- consumers ---

    def _open(self, event: on.Open) -> None:
        if event.feed not in self.feeds:
            raise self._admission.unknown_feed(event.feed)
        if self.stopping is not None:
            raise self.stopping
        before = set(self.streams)
        try:
            consumer = self._admission.open(event.consumer, event.feed, event.ask)
        except PenstockError:
            raise
        except Exception as error:
            self._open_broke(event, before, error)
            raise a_bug(error) from error
        finally:
            self._touch_new(before, event.feed, event.ask)
        self._watch()
        self.consumers[consumer.number] = consumer
        self._read[consumer.number] = self.streams[consumer.stream]
        share = consumer.share
        self._do(do.Tell(consumer.number, Opened(share.credit, share.quota, consumer.epoch)))
        self._touch(self.streams[consumer.stream])

    def _touch_new(self, before: set[int], feed: str, ask: Ask) -> None:
        """An attempt to open may have made a stream, and ended another."""
        shared = self._admission.shared(feed, ask)
        for stream in self.streams.values():
            if stream.number not in before or stream is shared:
                self._touch(stream)

    def _open_broke(self, event: on.Open, before: set[int], error: Exception) -> None:
        """A bug: the streams fail that were being opened or joined."""
        shared = self._admission.shared(event.feed, event.ask)
        for stream in self._each():
            new = stream.number not in before
            if new or stream is shared:
                self._fail(stream, error)
            if new:
                with contextlib.suppress(Exception):
                    stream.end()  # nobody reads it
        if shared is None and before.issuperset(self.streams):  # else a stream has told of it
            self._do(do.ReportBug(error))

    def _begin(self, event: on.Begin) -> None:
        consumer, stream = self._read_by(event.consumer)
        if stream.ends_before(event.epoch) and self._groups.of(stream) is not None:
            raise stream.end_of_stream()
        stream.begin(consumer, event.epoch)

    def _acknowledge(self, event: on.Acknowledge) -> None:
        consumer, stream = self._read_by(event.consumer)
        stream.acknowledge(consumer, event.handed, event.released, event.ended)

    def _leave(self, event: on.Leave) -> None:
        consumer, stream = self._read_by(event.consumer)
        stream.leave(consumer, event.epoch, event.handed)

    def _close(self, event: on.Close) -> None:
        consumer, stream = self._read_by(event.consumer)
        consumer.check(event.handed)
        self._admission.leave(consumer)
        stream.close(consumer, event.handed)
        self._groups.parted(consumer, stream)
        group = self._groups.of(stream)
        if group is not None and group.left:
            stream.end()

    def _cut(self, event: on.Cut) -> None:
        consumer, stream = self._read_by(event.consumer)
        handed = consumer.believed(event.handed)
        self._admission.leave(consumer)
        if (group := self._groups.of(stream)) is not None:
            group.lost(consumer)
        stream.cut(consumer, handed)

    def _lost(self, event: on.Lost) -> None:
        consumer, stream = self._read_by(event.consumer)
        with self._alone(stream):
            handed = consumer.believed(event.handed)
            self._admission.leave(consumer)
            group = self._groups.of(stream)
            if group is not None:
                group.lost(consumer)
            stream.lost(consumer, handed)
            self._groups.parted(consumer, stream)
            if group is not None:
                stream.part(consumer, self.budget.with_those_left(stream, len(stream.consumers) - 1))
        del self.consumers[event.consumer], self._read[event.consumer]

    # --- tickets and runs ---

    def _made(self, event: Made) -> None:
        if (stream := self._of(event.ticket)) is not None:
            stream.production.made(event)

    def _rows_measured(self, event: RowsMeasured) -> None:
        """Leftover rows were measured. A merged batch of which all are known may need a larger slot."""
        if (stream := self._of(event.ticket)) is not None:
            self._has_room(stream, stream.production.rows_measured(event))
            stream.production.rows_answered(event.ticket, event.run)

    def _rows_written(self, event: RowsWritten) -> None:
        if (stream := self._of(event.ticket)) is not None:
            stream.production.rows_answered(event.ticket, event.run)

    def _need_room(self, event: NeedRoom) -> None:
        """A batch does not fit into its slot: later slots are larger, if the memory allows it."""
        stream = self._of(event.ticket)
        if stream is None or not stream.production.needs(event.ticket, event.run):
            return
        if self._has_room(stream, event.nbytes):
            stream.production.enlarge(event.ticket)

    def _has_room(self, stream: Stream, nbytes: int) -> bool:
        """Let the stream's later slots have so many bytes. If the memory does not allow that, the stream fails."""
        missing = self.budget.grow(stream, nbytes) if nbytes > stream.production.slot_nbytes else None
        if missing is not None:
            stream.fail(missing)
        return missing is None

    def _slot_found(self, event: on.SlotFound) -> None:
        stream = self.stream_of(event.ticket)
        if stream is not None and stream.production.slot_found(event.ticket):
            self._touch(stream)  # else there is nothing to send, and as much being made as before

    def _no_slot(self, event: on.NoSlot) -> None:
        stream = self._of(event.ticket)
        if stream is not None and event.ticket in stream.slots:
            stream.fail(event.error)
            stream.production.no_slot(event.ticket)

    def _copied(self, event: on.Copied) -> None:
        if (stream := self._of(event.ticket)) is not None:
            stream.production.copied(event.ticket)

    def _splits_listed(self, event: on.SplitsListed) -> None:
        if self.starting.lists(event.run):
            self.starting.listed(event)
            self._retire()
        elif (stream := self._of(event.run)) is not None:
            stream.splits_listed(event.run, event.splits)
        else:
            self._do(do.ForgetSplits(event.splits.number))

    def _run_failed(self, event: on.RunFailed) -> None:
        if self.starting.lists(event.run):
            self.starting.failed(event.run, event.error)
            self._retire()
        elif (stream := self._of(event.run)) is not None:
            stream.run_failed(event.run, event.error)

    def _split_skipped(self, event: on.SplitSkipped) -> None:
        stream = self._of(event.run)
        if stream is not None and stream.production.split_skipped(event.run, event.number, event.skipped):
            skipped = event.skipped
            said = do.ReportSkipped(stream.feed.name, skipped.split, skipped.samples, skipped.why, skipped.traceback)
            self._do(said)

    def _retry_later(self, seconds: float, run: int) -> None:
        """A run has failed, and its work is tried again in this many seconds."""

        def retry() -> None:
            if (stream := self._of(run)) is not None:
                with self._alone(stream):
                    stream.retry(run)

        self.timers.later(seconds, retry)

    # --- workers ---

    def _imported(self, event: on.Imported) -> None:
        if not self.starting.imported(event.worker, event.feeds):
            self._do(do.RejectWorker(event.worker))
            return
        self._watch()  # for saved groups
        self._do(do.AcceptWorker(event.worker))
        if event.worker in self.workers.away:
            self.workers.is_ready(event.worker)
            self._workers_changed()

    def _worker_died(self, event: on.WorkerDied) -> None:
        self.starting.worker_died(event.worker, event.how)
        if event.worker in self.workers.numbers:
            self.workers.died(event.worker)
        for stream in self._each():
            with self._alone(stream):
                stream.worker_died(event.worker, event.how, event.blamed)
        self._retire()

    def _worker_added(self, event: on.WorkerAdded) -> None:
        self.workers.add(event.worker)

    def _retire_worker(self, event: on.RetireWorker) -> None:
        self.workers.leaves(event.worker)
        self._workers_changed()
        if event.now:
            self._end_leaving(event.worker)
        else:
            self.timers.later(HAND_OVER, lambda: self._hurry(event.worker))

    def _hurry(self, worker: int) -> None:
        """The worker is to leave now: its lanes are handed over wherever they are."""
        if worker not in self.workers.leaving:
            return
        for stream in self._each():
            with self._alone(stream):
                stream.production.move_all(worker)
        self._retire()
        self.timers.later(HURRY, lambda: self._end_leaving(worker))

    def _end_leaving(self, worker: int) -> None:
        if worker in self.workers.leaving:
            self._do(do.KillWorker(worker))

    def _worker_gone(self, event: on.WorkerGone) -> None:
        self.workers.gone(event.worker)
        if self.workers.leaving.issuperset(self.workers.numbers):
            self.workers.all_stay()
        if not self.workers.numbers:
            said = f"no worker process can start any more: the last one {event.how}; the daemon's log says more"
            for stream in self._each():
                with self._alone(stream):
                    stream.fail(WorkerDied(said))
        self._worker_died(on.WorkerDied(event.worker, event.how))

    def _workers_changed(self) -> None:
        for stream in self._each():
            with self._alone(stream):
                stream.production.workers_changed()
        self._retire()

    def _retire(self) -> None:
        """End the workers that are to leave and do nothing any more."""
        for worker in sorted(self.workers.leaving):
            uses = any(stream.uses(worker) for stream in self.streams.values()) or self.starting.uses(worker)
            if not uses:
                self.workers.gone(worker)
                self.starting.checks.worker_away(worker)
                self._do(do.Retire(worker))

    # --- the daemon ---

    def _slots_allowed(self, event: on.SlotsAllowed) -> None:
        self.budget.slots = event.slots

    def _stop(self, event: on.Stop) -> None:
        self.stopping = event.reason
        for stream in self._each():
            with self._alone(stream):
                stream.stop(event.reason)

    def _not_saved(self, event: on.NotSaved) -> None:
        stream = self._groups.not_saved(event.feed, event.group, event.saved)
        self._watch()
        if stream is not None:
            self._touch(stream)
            stream.fail(event.error)

    def _stream_failed(self, event: on.StreamFailed) -> None:
        stream = self.streams.get(event.stream)
        if stream is not None:
            self._fail(stream, event.error)
        elif not isinstance(event.error, PenstockError):
            self._do(do.ReportBug(event.error))

    # --- time ---

    def _tick(self, _: on.Tick) -> None:
        for call in self.timers.due():
            call()

    def _watch(self) -> None:
        """Look around from now on, as long as something waits for consumers."""
        if not self._looks_around and (self._groups.any or self._admission.waiting):
            self._looks_around = True
            self.timers.later(LOOK_AROUND, self._look_around)

    def _look_around(self) -> None:
        """Look at what waits for consumers: groups that nobody reads, and ranks that have not all come."""
        self._looks_around = False
        self._watch()
        now = self.timers.now
        if self.starting.done:
            for stream in self._groups.given_up(now):
                with self._alone(stream):
                    stream.give_up_waiting()
        for rendezvous in self._admission.waiting:
            with self._alone(rendezvous.stream):
                rendezvous.name_missing()
        for stream in self._groups.deserted(now):
            with self._alone(stream):
                stream.end()
        self._groups.tidy()

    # --- failures ---

    def _fail(self, stream: Stream, error: Exception) -> None:
        """The stream cannot go on. An error that is no PenstockError is a bug."""
        self._touch(stream)
        if isinstance(error, OSError | MemoryError):
            error = MemoryBound(
                f"the daemon has no memory or no file descriptors left ({error!r}): raise its limits (ulimit -n), or "
                "close other streams",
                feed=stream.feed.name,
            )
        if isinstance(error, PenstockError):
            stream.fail(error)
            return
        self._do(do.ReportBug(error))
        with contextlib.suppress(Exception):
            stream.fail(a_bug(error))

    @contextlib.contextmanager
    def _alone(self, stream: Stream) -> Iterator[None]:
        """What happens to the stream within happens to it alone, whatever is raised: others hear of an event too."""
        self._touch(stream)
        try:
            yield
        except Exception as error:
            self._fail(stream, error)

    # --- how ---

    def _of(self, number: int) -> Stream | None:
        """The stream of a run or a ticket, which is about to change."""
        stream = self.streams.get(number // IDS_PER_STREAM)
        if stream is not None:
            self._touched[stream] = None
        return stream

    def _read_by(self, number: int) -> tuple[Consumer, Stream]:
        """The consumer and its stream, which is about to change."""
        if number not in self.consumers:
            raise ProtocolError(f"consumer {number} reads no stream")
        stream = self._read[number]
        self._touch(stream)
        return self.consumers[number], stream

    def _each(self) -> Iterator[Stream]:
        """The streams that exist now; what is done to one may end it, and others."""
        return iter(list(self.streams.values()))

    def _touch(self, stream: Stream) -> None:
        self._touched[stream] = None


def a_bug(error: Exception) -> PenstockError:
    """What a consumer is told of an error that nobody expected."""
    return PenstockError(f"the daemon failed: {error!r}. This is a bug; its log has the traceback, please report it")
