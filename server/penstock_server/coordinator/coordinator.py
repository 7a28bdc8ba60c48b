"""The coordinator: decides which worker makes which batches in which slots, and which consumer gets them. No I/O.

Theory of operation. The coordinator has one door: `handle(event, now)` takes an event (events.py) and returns the
commands to carry out, in order (commands.py). Nothing else changes its state. Nothing in this package knows a socket, a
process or a clock: the time `now` comes with each event, and `next_tick` is the time at which the caller must send a
`Tick` if no other event comes first. The daemon drives the coordinator in this way, and so do the simulation and the
tests.

Most events are about one stream. They name a consumer, which reads one stream, or a run or a ticket: those of stream s
are numbered from s * IDS_PER_STREAM. The coordinator passes the event to that stream. The stream then *proceeds* once:
it sends what it can, and then grants slots to turns as far as it can (stream.py). An event that concerns all streams (a
worker died, the daemon stops) goes to each of them.

Life of a feed: `Imported` -> a worker lists its splits and makes a first sample -> `SplitsListed` -> consumers can read
it, or the start fails (starting.py). Life of a stream: `Open` (admission.py) -> `Begin`, `Acknowledge`, `Leave` ... ->
`Close` or `Lost` -> the stream is removed when its last slot is free.

Failures. The coordinator refuses a message from a consumer that is impossible, or asks for what cannot be had now,
before it changes anything (`Refuse`). Any other PenstockError fails the stream that the event is about. Any other
exception is a bug, and the state of that stream is then unknown. So the stream fails: nothing more is sent or made for
it, and its slots become free as workers and consumers release them. A slot is not used again until its worker has
answered for it. Other streams go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from penstock_proto import DaemonStopped, PenstockError, ProtocolError
from penstock_proto.batches.position import pack
from penstock_proto.messages import IDS_PER_STREAM, Made, NeedRoom, Opened, RowsMeasured, RowsWritten

from .admission.admission import Admission
from .admission.groups import Groups
from .model import commands as do
from .model import events as on
from .model.consumer import Consumer
from .model.group_log import SavedGroup
from .model.memory import MANY
from .model.open_request import OpenRequest
from .model.timers import Timers
from .model.workers import VACANT, Workers
from .periodic_checks import PeriodicChecks
from .routing import Routing
from .staffing import Staffing
from .starting import Starting
from .stream.affected import AffectedStreams, a_bug
from .stream.budget import Budget
from .stream.invariants import check
from .stream.stream import Stream


class Coordinator:
    """A state machine: `handle` takes an event and returns the commands that follow from it.

    Args:
        workers: the number of the daemon's worker processes; they are numbered from 0.
        idle: True if these workers make no batches, so that only the workers of joined hosts do.
        memory: the most bytes that slots and shuffle blocks may take in all.
        saved: the groups in the state file, by feed and name; None without such a file.
        slots: the most slots that all streams may have in all.
        patience: seconds for which a group waits for a consumer (default: groups.PATIENCE).

    Attributes:
        workers, budget, streams, consumers, starting, timers, periodic_checks: for reading only.
        stopping: why the daemon is stopping, or None.
    """

    def __init__(
        self,
        *,
        workers: int,
        idle: bool = False,
        memory: int,
        saved: Mapping[tuple[str, str], SavedGroup] | None = None,
        slots: int = MANY,
        patience: float | None = None,
    ) -> None:
        self._commands: list[do.Command] = []
        self._do = self._commands.append
        self.workers = Workers(workers, idle)
        self.streams: dict[int, Stream] = {}
        self.consumers: dict[int, Consumer] = {}
        self.stopping: DaemonStopped | None = None
        self.timers = Timers()
        self.budget = Budget(memory, slots, self.streams)
        self.starting = Starting(self.workers, self.budget, self.timers, self._do)
        self.feeds = self.starting.feeds
        self._read: dict[int, Stream] = {}
        """The stream that each consumer reads, even if it has ended."""
        self._affected = AffectedStreams(self.streams, self._do)
        self._staffing = Staffing(self.workers, self._affected, self.starting, self.budget, self.timers, self._do)
        self._routing = Routing(self._affected, self._staffing, self.starting, self.budget, self.timers, self._do)
        self._groups = Groups(saved, self._do, patience)
        self._admission = Admission(
            self.feeds,
            self.streams,
            workers=self.workers,
            budget=self.budget,
            groups=self._groups,
            later=self._routing.retry_later,
            clock=lambda: self.timers.now,
            after=self.timers.later,
            on_joined=self._on_joined,
            out=self._do,
        )
        self.periodic_checks = PeriodicChecks(self._groups, self._admission, self.starting, self._affected, self.timers)
        self._handlers: dict[type[on.Event], Callable[..., None]] = {
            on.Open: self._open,
            on.Begin: self._begin,
            on.Acknowledge: self._acknowledge,
            on.Leave: self._leave,
            on.Close: self._close,
            on.Cut: self._on_cut,
            on.Lost: self._on_lost,
            Made: self._routing.on_made,
            RowsMeasured: self._routing.on_rows_measured,
            RowsWritten: self._routing.on_rows_written,
            NeedRoom: self._routing.on_need_room,
            on.BytesLost: self._routing.on_bytes_lost,
            on.SlotFound: self._routing.on_slot_found,
            on.NoSlot: self._routing.on_no_slot,
            on.SplitsListed: self._routing.on_splits_listed,
            on.RunFailed: self._routing.on_run_failed,
            on.SplitSkipped: self._routing.on_split_skipped,
            on.Imported: self._on_imported,
            on.WorkerDied: self._staffing.on_worker_died,
            on.WorkerAdded: self._staffing.on_worker_added,
            on.RetireWorkers: self._staffing.let_leave,
            on.WorkerGone: self._staffing.on_worker_gone,
            on.WorkerStands: self._staffing.on_worker_stands,
            on.WorkerGoesOn: self._staffing.on_worker_goes_on,
            on.WorkersLost: self._staffing.on_workers_lost,
            on.SlotsAllowed: self._on_slots_allowed,
            on.Stop: self._stop,
            on.NotSaved: self._on_not_saved,
            on.StreamFailed: self._on_stream_failed,
            on.CheckBegan: self._routing.on_check_began,
            on.CheckEnded: self._routing.on_check_ended,
            on.Tick: self._on_tick,
        }

    # --- the door ---

    def handle(self, event: on.Event, now: float) -> list[do.Command]:
        """Process an event, and return the commands to carry out, in order.

        Args:
            event: see events.py.
            now: the time in seconds, from an arbitrary start; it never goes back.

        Raises:
            Exception: a bug that does not concern a single stream. The coordinator's state is then unknown.
        """
        self.timers.now = now
        try:
            self._handlers[type(event)](event)
        except Exception as error:
            self._handle_error(event, error)
        if self._affected.current:
            self._affected.proceed()
            if self.workers.leaving:
                self._staffing.retire()
        commands = self._commands.copy()
        self._commands.clear()
        if self.workers.vacant:  # nobody carries out commands to a vacant place
            return [command for command in commands if getattr(command, "worker", None) != VACANT]
        return commands

    @property
    def next_tick(self) -> float | None:
        """The time at which the coordinator needs a Tick, unless another event comes first; None if it needs none."""
        return self.timers.next

    def check(self) -> list[str]:
        """Return the broken invariants of the state, in words. Slow: for tests and debugging."""
        return check(self.budget, self.streams, self.workers)

    def _handle_error(self, event: on.Event, error: Exception) -> None:
        """Refuse the consumer that sent the event, or fail the stream that the event is about."""
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
            self._affected.fail(stream, error)
        else:  # the stream has ended
            self._do(do.ReportBug(error))

    # --- queries ---

    def unknown_feed(self, name: str) -> PenstockError:
        """Return the error for a feed that is not served. The error names the feeds that are."""
        return self._admission.unknown_feed(name)

    def stream_of(self, number: int) -> Stream | None:
        """Return the stream of a run or a ticket; None if it no longer exists."""
        return self._affected.find(number)

    def readers_of_group(self, feed: str, group: str) -> list[int]:
        """Return the numbers of the consumers that read a group's stream now; empty if the stream has ended."""
        stream = self._groups.stream_of(feed, group)
        if stream is None or stream.closed or stream.error is not None:
            return []
        return [consumer.number for consumer in stream.consumers]

    def stream_read_by(self, consumer: Consumer) -> Stream:
        """Return the stream that the consumer reads, even if it has ended."""
        return self._read[consumer.number]

    def apart_because(self, consumer: Consumer) -> str:
        """Return why the consumer shares its stream with no other job of the feed; "" if it does, or there is none."""
        return self._admission.sharing.apart_because(self._read[consumer.number])

    @property
    def stopped(self) -> bool:
        """Whether every consumer has received everything that it was promised."""
        return all(stream.error is not None or stream.delivered for stream in self.streams.values())

    # --- consumers ---

    def _open(self, event: on.Open) -> None:
        if event.feed not in self.feeds:
            raise self._admission.unknown_feed(event.feed)
        if self.stopping is not None and not self._groups.awaits(event.feed, event.ask):
            raise self.stopping
        before = set(self.streams)
        try:
            consumer = self._admission.open(event.consumer, event.feed, event.ask)
        except PenstockError:
            raise
        except Exception as error:
            self._handle_bug_in_open(event, before, error)
            raise a_bug(error) from error
        finally:
            self._add_new(before, event.feed, event.ask)
        self.periodic_checks.begin()
        self.consumers[consumer.number] = consumer
        self._read[consumer.number] = self.streams[consumer.stream]
        share = consumer.share
        start = b"" if consumer.start is None else pack(consumer.start)
        self._do(do.Tell(consumer.number, Opened(share.credit, share.quota, consumer.epoch, start)))
        self._affected.add(self.streams[consumer.stream])

    def _on_joined(self, consumer: Consumer, stream: Stream) -> None:
        """Note that a consumer that has waited for other ranks reads another stream than the one in which it waited."""
        if (before := self._read.get(consumer.number)) is not None:
            self._affected.add(before)
        self._read[consumer.number] = stream
        self._affected.add(stream)

    def _add_new(self, before: set[int], feed: str, ask: OpenRequest) -> None:
        """Note that an Open affects the streams that it has made, joined or ended."""
        shared = self._admission.shared(feed, ask)
        for stream in self.streams.values():
            if stream.number not in before or stream is shared:
                self._affected.add(stream)

    def _handle_bug_in_open(self, event: on.Open, before: set[int], error: Exception) -> None:
        """Handle a bug in `_open`: fail the streams that were being opened or joined."""
        shared = self._admission.shared(event.feed, event.ask)
        for stream in self._affected.all():
            new = stream.number not in before
            if new or stream is shared:
                self._affected.fail(stream, error)
            if new:
                with contextlib.suppress(Exception):
                    stream.end()  # nobody reads it
        if shared is None and before.issuperset(self.streams):  # otherwise it was reported with a stream
            self._do(do.ReportBug(error))

    def _begin(self, event: on.Begin) -> None:
        consumer, stream = self._read_by(event.consumer)
        if stream.feed.ends_before(event.epoch) and self._groups.of(stream) is not None:
            raise stream.feed.end_of_stream()
        self._admission.check_begin(consumer)
        stream.begin(consumer, event.epoch)
        self._admission.on_begun(consumer)

    def _acknowledge(self, event: on.Acknowledge) -> None:
        consumer, stream = self._read_by(event.consumer)
        stream.acknowledge(consumer, event.handed, event.released, event.ended)

    def _leave(self, event: on.Leave) -> None:
        consumer, stream = self._read_by(event.consumer)
        stream.leave(consumer, event.epoch, event.handed)

    def _close(self, event: on.Close) -> None:
        consumer, stream = self._read_by(event.consumer)
        consumer.check(event.handed)
        self._admission.on_consumer_gone(consumer)
        stream.close(consumer, event.handed)
        self._groups.on_parted(consumer, stream)
        group = self._groups.of(stream)
        if group is not None and group.left:
            stream.end()

    def _on_cut(self, event: on.Cut) -> None:
        consumer, stream = self._read_by(event.consumer)
        handed = consumer.believed(event.handed)
        self._admission.on_consumer_gone(consumer)
        if (group := self._groups.of(stream)) is not None:
            group.on_consumer_lost(consumer)
        stream.on_consumer_cut(consumer, handed)

    def _on_lost(self, event: on.Lost) -> None:
        consumer, stream = self._read_by(event.consumer)
        with self._affected.alone(stream):
            handed = consumer.believed(event.handed)
            self._admission.on_consumer_gone(consumer)
            group = self._groups.of(stream)
            if group is not None:
                group.on_consumer_lost(consumer)
            stream.on_consumer_lost(consumer, handed)
            self._groups.on_parted(consumer, stream)
            several = stream.sharing is not None and len(stream.consumers) > 1
            if group is not None or (several and consumer in stream.consumers):
                stream.remove(consumer, self.budget.with_those_left(stream, len(stream.consumers) - 1))
        del self.consumers[event.consumer], self._read[event.consumer]

    def _on_imported(self, event: on.Imported) -> None:
        self._staffing.on_imported(event)
        self.periodic_checks.begin()  # for saved groups

    # --- the daemon ---

    def _on_slots_allowed(self, event: on.SlotsAllowed) -> None:
        self.budget.slots = event.slots

    def _stop(self, event: on.Stop) -> None:
        self.stopping = event.reason
        for stream in self._affected.all():
            with self._affected.alone(stream):
                stream.stop(event.reason)

    def _on_not_saved(self, event: on.NotSaved) -> None:
        stream = self._groups.on_not_saved(event.feed, event.group, event.saved)
        self.periodic_checks.begin()
        if stream is not None:
            self._affected.fail(stream, event.error)

    def _on_stream_failed(self, event: on.StreamFailed) -> None:
        stream = self.streams.get(event.stream)
        if stream is not None:
            self._affected.fail(stream, event.error)
        elif not isinstance(event.error, PenstockError):
            self._do(do.ReportBug(event.error))

    # --- time ---

    def _on_tick(self, _: on.Tick) -> None:
        for call in self.timers.due():
            call()

    # --- helpers ---

    def _read_by(self, number: int) -> tuple[Consumer, Stream]:
        """Return the consumer and its stream, which the event is about to change."""
        if number not in self.consumers:
            raise ProtocolError(f"consumer {number} reads no stream")
        stream = self._read[number]
        self._affected.add(stream)
        return self.consumers[number], stream
