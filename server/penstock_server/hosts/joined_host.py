"""A joined host, as the head knows it: its workers, and its connection.

The head checks each message as a whole before it changes anything, and drops a host that sends an invalid one. A host
writes only into slots of open tickets (open_tickets.py).
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Mapping
from typing import Protocol

from msgspec import structs

from penstock_proto import PenstockError, ProtocolError, StartError
from penstock_proto import messages as m
from penstock_proto.spec import Spec
from penstock_proto.transport import codec

from ..coordinator import worker_messages
from ..coordinator.model import commands as do
from ..net.keys import ClientKey
from ..shared_memory.arena import Memfd
from ..shared_memory.kept import KeptBatches
from ..worker_state.activity import Activity
from .agreement import plan_differences
from .host_check import HostCheck
from .host_view import HostView
from .open_tickets import OpenTickets

log = logging.getLogger(__name__)

SILENT = 15.0
"""Seconds of silence after which a host is lost. It sends a report each second."""


_KEYS = 2048
"""Maximum number of keys in one message."""


class Channel(Protocol):
    """The connection to a host."""

    def send(self, message: m.Message) -> bool:
        """Send a message. Return False if the host is gone."""

    def send_piece(self, message: m.Message, body: memoryview) -> bool:
        """Send a message with a second frame, which must not change until it is sent. Return False if the host is
        gone."""

    @property
    def piece(self) -> int:
        """Bytes that a second frame may have."""


class Head(Protocol):
    """What a joined host needs from the head."""

    @property
    def plans(self) -> tuple[m.FeedPlan, ...]:
        """The feeds that are served."""

    @property
    def first_samples(self) -> Mapping[str, do.Compare]:
        """The commands to compare the feeds' first samples, by feed."""

    def list_of(self, splits: int) -> tuple[int, int]:
        """Return the fd and the size of a list of splits."""

    def said(self, worker: int, message: m.FromWorker) -> None:
        """Handle a message from a worker."""

    def came(self, worker: int, message: m.Imported) -> None:
        """Handle a worker that has imported the feeds."""

    def died(self, worker: int, how: str, doing: Activity | None) -> None:
        """Handle the end of a worker's process."""

    def given_up(self, worker: int, how: str) -> None:
        """Note that no further process takes the worker's place."""

    def keeps(self, host: JoinedHost, ticket: int, reader: int | None) -> bool:
        """Return whether the host should keep the batches that it makes for the ticket: the consumer `reader` of the
        stream (None: each of them) can fetch them there."""

    @property
    def kept(self) -> KeptBatches:
        """The batches that hosts keep."""

    def leaves(self, host: JoinedHost) -> None:
        """Handle a host that wants to leave."""

    def sampled(self, host: JoinedHost, message: m.StacksSampled | m.SamplingEnded) -> None:
        """Handle a host's samples of its workers' stacks, for a profile."""


class JoinedHost:
    """One host from its Join to the end of its connection.

    Args:
        join: the host's Join message.
        number: its number, which is never reused.
        name: its name, which no other host has.
        address: its address, HOST:PORT.
        machine: its machine, as Router.machine returns it.
        numbers: the first numbers of its workers.
        channel: the connection to it.
        head: the head, which it joins.
        key: its public key; empty without keys.

    Attributes:
        numbers: all numbers that its workers have had, each with the number of that worker at its host.
        workers: the numbers of its workers that were not retired.
        there: the numbers of those workers that the coordinator knows.
        leaving: whether it wants to leave.
        report: its last report.
        said: its last report on each worker, and when that came, in monotonic seconds.
        received: bytes of batches that it has sent.
        fetched: bytes of batches that consumers were told to fetch from it.
        awaited: seconds that consumers have waited for its workers' batches.
        heard: when it was last heard, in monotonic seconds.
        view: what users see of its workers.
    """

    def __init__(
        self,
        join: m.Join,
        number: int,
        *,
        name: str,
        address: str,
        machine: str,
        numbers: range,
        channel: Channel,
        head: Head,
        key: bytes = b"",
    ) -> None:
        self.join = join
        self.number = number
        self.name = name
        self.address = address
        self.machine = machine
        self.key = key
        self.numbers = {number: worker for worker, number in enumerate(numbers)}
        self.workers = set(numbers)
        self._first = numbers.start
        self.there: set[int] = set()
        self.leaving = False
        self.report: m.HostReport | None = None
        self.said: dict[int, tuple[m.WorkerReport, float]] = {}
        self.received = 0
        self.fetched = 0
        self.awaited = 0.0
        self.heard = time.monotonic()
        self.view = HostView(self.numbers, channel.send)
        self._channel = channel
        self._head = head
        self._check = HostCheck(head, compare=self._have_compared, admit=self._admit)
        self._processes = dict.fromkeys(self.workers, 0)
        self._tickets = OpenTickets()
        self._lists: set[int] = set()

    @property
    def working(self) -> bool:
        """Whether it has passed the check, and gets work."""
        return self._check.passed

    def name_of(self, worker: int) -> str:
        """Return the name of one of its workers, as status shows it: "b/3"."""
        return f"{self.name}/{self.numbers[worker]}"

    @property
    def slots(self) -> int:
        """How many slots its workers are to fill."""
        return self._tickets.slots

    @property
    def fetchable(self) -> bool:
        """Whether consumers can be told to fetch from it."""
        return self.working and not self.leaving and self.join.fetch_port > 0

    @property
    def where(self) -> m.HostAt:
        """Where consumers fetch from it. The address is that of its connection, so that a host cannot send consumers
        elsewhere."""
        host = self.address.rpartition(":")[0]
        host = f"[{host}]" if ":" in host else host
        return m.HostAt(self.number, f"tcp://{host}:{self.join.fetch_port}", self.key, self.join.unix)

    # --- what workers are told ---

    def say(self, worker: int, message: m.Message) -> None:
        """Send a message to a worker, or to the process that will replace it."""
        if isinstance(message, m.DropRun):
            self._tickets.drop_run(message.run)
        self._say(worker, message)

    def fill(self, command: do.Fill, memfd: Memfd) -> None:
        """Tell a worker to fill a turn, or a part of it, into `memfd`."""
        keep = command.may_stay and self._head.keeps(self, command.ticket, command.reader)
        self._tickets.open(command.worker, command.run, command.ticket, memfd, keep=keep)
        self._say(command.worker, worker_messages.fill(command, 0, memfd.nbytes), keep=keep)

    def send_kept(self, ticket: int) -> None:
        """Tell the host to send the batches that it keeps for the ticket."""
        self._channel.send(m.SendKept(ticket))

    def release(self, ticket: int) -> None:
        """Tell the host that nobody needs the batches that it keeps for the ticket."""
        self._tickets.release(ticket)
        self._channel.send(m.Release(ticket))

    def measure_rows(self, command: do.MeasureRows) -> None:
        """Tell a worker to measure leftover rows."""
        self._tickets.open(command.worker, command.run, command.ticket, None)
        self._say(command.worker, worker_messages.measure_rows(command))

    def write_rows(self, command: do.WriteRows, memfd: Memfd) -> None:
        """Tell a worker to write leftover rows into `memfd`."""
        self._tickets.open(command.worker, command.run, command.ticket, memfd)
        self._say(command.worker, worker_messages.write_rows(command, 0, memfd.nbytes))

    def start_run(self, command: do.StartRun, spec: Spec) -> None:
        """Tell a worker to open a run of a feed with this spec."""
        self._show_list(command.splits)
        self._tickets.begin_run(command.run, command.worker)
        self._say(command.worker, worker_messages.start_run(command, spec))

    def forget_list(self, splits: int) -> None:
        """Forget a list of splits that no message will name again."""
        if splits in self._lists:
            self._lists.discard(splits)
            self._channel.send(m.SplitsGone(splits))

    def accepted(self, worker: int) -> None:
        """Tell the host that the worker gets work from now on."""
        self._channel.send(m.Accepted(worker))

    def scale(self, workers: int, new: range) -> None:
        """Tell the host to run `workers` workers. The new ones have the numbers `new`."""
        for number in new:
            self.numbers[number] = len(self.numbers)
            self._processes[number] = 0
        self.workers.update(new)
        self._channel.send(m.Scale(workers, new.start, len(new)))

    def reject(self, worker: int, why: str) -> None:
        """End a worker that may get no work. Another one takes its place."""
        self.say(worker, m.Shutdown())

    def retire(self, worker: int) -> None:
        """End a worker that has no work left."""
        self.workers.discard(worker)
        self.there.discard(worker)
        self.said.pop(worker, None)
        self._channel.send(m.Retire(worker))
        self._check.gone(worker)

    def kill(self, worker: int) -> None:
        """Kill the worker's process. Another one takes its place."""
        self._channel.send(m.Kill(worker))

    def sample(self, message: m.SampleStacks) -> None:
        """Tell the host to sample its workers' stacks, or to stop that."""
        self._channel.send(message)

    def beat(self) -> None:
        """Send the host a sign of life."""
        self._channel.send(m.Beat())

    def joined(self) -> None:
        """Tell the host that it has joined."""
        self._channel.send(m.Joined(self._first))

    def admit(self, admitted: Mapping[bytes, ClientKey] | None) -> None:
        """Tell the host which clients may fetch there. None: no keys are used."""
        clients = [key.public for key in (admitted or {}).values() if not key.host]
        for start in range(0, max(1, len(clients)), _KEYS):
            if admitted is not None:
                more = start + _KEYS < len(clients)
                self._channel.send(m.AdmitClients(tuple(clients[start : start + _KEYS]), more))

    def refuse(self, error: PenstockError) -> None:
        """Tell the host why it cannot go on."""
        self._channel.send(m.Failed(m.ErrorReport.of(error)))

    def lost(self) -> None:
        """Note that the connection has ended: nothing more may be written for this host."""
        self._tickets.clear()
        self.view.lost()

    def _say(self, worker: int, message: m.Message, *, keep: bool = False) -> None:
        if worker in self.workers:
            self._channel.send(m.Say(worker, self._processes[worker], codec.encode(message), keep))

    def _show_list(self, splits: int) -> None:
        if not splits or splits in self._lists:
            return
        self._lists.add(splits)
        fd, nbytes = self._head.list_of(splits)
        content = memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
        for start in range(0, nbytes, self._channel.piece):
            part = content[start : start + self._channel.piece]
            self._channel.send_piece(m.SplitsPart(splits, start, len(part), nbytes), part)

    # --- what comes ---

    def place(self, data: bytes) -> memoryview:
        """Return the memory for the bytes that follow a Payload, in the slot that the worker is to fill.

        Raises:
            ProtocolError: the message is not a Payload, or the worker may not write there.
            OSError: the slot cannot be mapped.
        """
        payload = codec.from_host(data)
        if not isinstance(payload, m.Payload):
            raise ProtocolError(f"a {type(payload).__name__} with a second frame")
        if self._tickets.is_released(payload.ticket):
            return memoryview(bytearray(payload.nbytes))
        memfd = self._tickets.slot(payload.worker, payload.run, payload.ticket)
        if memfd is None or payload.start + payload.nbytes > memfd.nbytes:
            raise ProtocolError(f"{payload.nbytes} bytes from {payload.start} on, which are not in the slot")
        self.received += payload.nbytes
        return memfd.writable(payload.start, payload.start + payload.nbytes)

    def take(self, data: bytes) -> None:
        """Handle a message from the host.

        Raises:
            ProtocolError: the message is invalid; drop the host.
            StartError: the host does not fit the head; drop the host.
        """
        self.heard = time.monotonic()
        message = codec.from_host(data)
        match message:
            case m.Said():
                self._check_worker(message.worker)
                self._worker_said(message.worker, codec.from_worker(message.data), message.secret)
            case m.KeptNoLonger():
                if self._tickets.kept_no_longer(message.ticket):
                    self._head.kept.there(message.ticket)
            case m.WorkerEnded():
                self._check_worker(message.worker)
                self._ended(message)
            case m.GivenUp():
                self._check_worker(message.worker)
                self._check.gone(message.worker)
                self.workers.discard(message.worker)
                if message.worker in self.there:
                    self.there.discard(message.worker)
                    self._head.given_up(message.worker, message.how)
                if not self.workers:
                    raise StartError("none of its workers can start: see its log")
            case m.HostReport():
                for said in message.workers:
                    self._check_worker(said.number)
                self.report = message
                self.said.update((said.number, (said, self.heard)) for said in message.workers)
            case m.MemoryMeasured() | m.ActivityShown():
                self.view.take(message)
            case m.StacksSampled():
                self._check_worker(message.worker)
                self._head.sampled(self, message)
            case m.SamplingEnded():
                self._head.sampled(self, message)
            case m.Leaving():
                if not self.leaving:
                    self.leaving = True
                    self._head.leaves(self)
            case m.Payload():
                raise ProtocolError("a Payload without a second frame")

    def _check_worker(self, worker: int) -> None:
        if worker not in self.numbers:
            raise ProtocolError(f"it speaks of worker {worker}, which is not its own")

    def _worker_said(self, worker: int, message: m.FromWorker, secret: bytes) -> None:
        match message:
            case m.Made():
                self._tickets.check(worker, message.run, message.ticket, batches=message.batches)
                if secret:
                    self._tickets.keep(message.ticket, message.run)
                    self._head.kept.begin(message.ticket, self, secret)
                if message.last:
                    self._tickets.answered(worker, message.run, message.ticket)
                self._head.said(worker, message)
            case m.NeedRoom():
                self._tickets.needs_room(worker, message.run, message.ticket)
                self._head.said(worker, message)
            case m.RowsMeasured() | m.RowsWritten():
                self._tickets.answered(worker, message.run, message.ticket)
                self._head.said(worker, message)
            case m.RunFailed():
                self._run_failed(worker, message)
            case m.SplitSkipped() | m.SpotCheck():
                if self._tickets.is_of(message.run, worker):
                    self._head.said(worker, message)
            case m.CacheUsed() | m.TransformDiffers():
                self._head.said(worker, message)
            case m.Imported():
                self._came(worker, message)
            case m.Compared():
                self._check.compared(worker, message)
            case m.StartFailed() if self.working:
                self._head.said(worker, message)
            case m.StartFailed():
                raise StartError(f"its worker cannot start: {message.error.message}")
            case _:
                raise ProtocolError(f"a {type(message).__name__} from a worker of another host")

    def _run_failed(self, worker: int, message: m.RunFailed) -> None:
        if not self._tickets.is_of(message.run, worker):
            return  # the run was dropped, and nobody waits for it
        self._tickets.run_failed(message.run)
        where = structs.replace(message.error, message=f"{message.error.message} (on host {self.name})"[: m.MAX_TEXT])
        self._head.said(worker, structs.replace(message, error=where))

    def _ended(self, message: m.WorkerEnded) -> None:
        worker = message.worker
        if worker not in self._processes:
            return
        self._processes[worker] += 1
        self._tickets.worker_ended(worker)
        if worker in self.there:
            doing = None if message.doing is None else Activity(**structs.asdict(message.doing))
            self._head.died(worker, message.how, doing)
        self._check.gone(worker)

    # --- the check ---

    def _came(self, worker: int, message: m.Imported) -> None:
        differs = plan_differences(message.feeds, self._head.plans)
        if differs:
            raise StartError(f"it cannot join: {differs}")
        if worker in self.workers:
            self._check.imported(worker, message)

    def _have_compared(self, worker: int, compare: do.Compare) -> None:
        self._show_list(compare.splits)
        self._say(worker, worker_messages.compare(compare))

    def _admit(self, worker: int, message: m.Imported) -> None:
        self.there.add(worker)
        self._head.came(worker, message)
