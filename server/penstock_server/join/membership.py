"""One connection of a host to the head, from Joined to its end: passes on the messages of the head and of the host's
workers.

Workers write batches into memory of this host, and not into the slots at the head (built_slots.py).

Each worker has a queue of messages. A message that needs memory waits for it, and the messages after it wait too.
Memory in use waits for nothing but a worker or the network, so the queue always goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import mmap
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import structs

from penstock_proto import PenstockError, ProtocolError
from penstock_proto import messages as m
from penstock_proto.transport import codec

from ..logs.bugs import Bugs
from ..machine import cpus, descriptors
from ..machine.free_cpus import FreeCpus
from ..machine.memory_limits import available
from ..shared_memory.arena import Memfd
from ..status import status
from ..worker_state.activity import Activity
from ..worker_state.process_ends import ENDED
from ..workers.local_workers import LocalWorkers
from ..workers.supervisor import Supervisor
from .building import Building, Regions
from .built_slots import BuiltSlots, Writes
from .sampling import Sampling
from .shown_workers import ShownWorkers
from .to_head import ToHead

log = logging.getLogger(__name__)

MAX_WAITING = 65536
"""Most messages from the head that wait for one worker. They wait while memory is in use."""

_MOST_REPORTED = 64
"""Maximum number of workers in one report; if there are more, the next report goes on with them."""


class Host(Protocol):
    """What a membership asks of its host (agent.py)."""

    @property
    def plans(self) -> Mapping[str, m.FeedPlan]:
        """The feeds as they were imported here."""

    def fail(self, error: PenstockError) -> None:
        """Handle an error that this host cannot survive."""

    def scaled(self, workers: int) -> None:
        """Note how many workers this host should have."""

    def retired(self, worker: int) -> None:
        """Handle a worker that the head has retired."""


class Membership:
    """Takes the head's messages and the workers' answers until the connection ends.

    Args:
        link: the connection.
        joined: the head's answer.
        host: this host.
        supervisor: the worker processes.
        workers: sends them messages.
        memory: bytes in which they may build.
        folder: the folder of the first feed's file here, or empty.
        memory_gone: called with memory that was returned to the system.
    """

    def __init__(
        self,
        link: ToHead,
        joined: m.Joined,
        host: Host,
        supervisor: Supervisor,
        workers: LocalWorkers,
        *,
        memory: int,
        folder: str,
        memory_gone: Callable[[Memfd], None],
    ) -> None:
        self._link = link
        self._supervisor = supervisor
        self._workers = workers
        self._host = host
        self._memory_gone = memory_gone
        self._building = Building(memory, self._on_memfd_gone)
        self._numbers: dict[int, int] = {}
        """The head's number of each worker. Here workers have other numbers, which are used once for each
        connection."""
        self._here: dict[int, int] = {}
        """The opposite: the number here of each worker, by the head's number."""
        self._processes: dict[int, int] = {}
        self._queues: dict[int, asyncio.Queue[tuple[m.Say, m.ToWorker] | m.SplitsGone]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        for worker in supervisor.workers:
            self._take_in(worker, joined.first + worker)
        self._going: Counter[int] = Counter()
        """How many queues still hold a SplitsGone, by the number of the list."""
        self.slots = BuiltSlots(link, self._building)
        self._regions: dict[int, Regions] = {}
        """By run: the regions of its feed."""
        self._of_feeds: dict[str, Regions] = {}
        self._dropped: set[int] = set()
        self._list = memoryview(b"")
        """The list of splits that is being received."""
        self._reported = 0
        self._cpus = FreeCpus()
        bugs = Bugs()
        self._shown = ShownWorkers(link.send, self._numbers, supervisor, bugs)
        self._sampling = Sampling(link.send, self._numbers, supervisor, folder, bugs)

    def end(self) -> None:
        """Stop, as the connection has ended."""
        for task in self._tasks.values():
            task.cancel()
        self._shown.end()
        self._sampling.end()
        self._workers.forget_lists()
        self._building.close(self.slots.in_use)

    def _on_memfd_gone(self, memfd: Memfd) -> None:
        self._workers.forget_memfd(memfd)
        self._memory_gone(memfd)

    # --- what the head says ---

    def take(self, message: m.FromHead) -> None:
        """Handle a message from the head, other than Joined and Failed.

        Raises:
            ProtocolError: the message is invalid.
        """
        match message:
            case m.Say():
                worker = self._worker(message.worker)
                if worker in self._queues:  # else no process takes the worker's place
                    if self._queues[worker].qsize() >= MAX_WAITING:
                        raise ProtocolError(f"more than {MAX_WAITING} messages for worker {message.worker}")
                    self._queues[worker].put_nowait((message, codec.to_worker(message.data)))
            case m.SendKept():
                self.slots.send_kept(message.ticket)
            case m.Release():
                self.slots.release(message.ticket)
            case m.Accepted():
                pass
            case m.Scale():
                if len(self._queues) + message.more > m.MAX_WORKERS or message.more > message.workers:
                    raise ProtocolError(f"{message.more} more workers, {message.workers} in all")
                for number in range(message.first, message.first + message.more):
                    self._add(number)
                self._host.scaled(message.workers)
            case m.Retire():
                worker = self._worker(message.worker)
                self._stop_passing_on(worker)
                if worker in self._supervisor.workers:  # else it could not be started
                    self._supervisor.retire(worker, codec.encode(m.Shutdown()))
                self._host.retired(worker)
            case m.Kill():
                worker = self._worker(message.worker)
                if worker in self._supervisor.workers:  # else it was retired
                    self._supervisor.kill(worker, ENDED)
            case m.MeasureMemory():
                self._shown.measure_memory()
            case m.ShowActivity():
                self._shown.show_activity(message)
            case m.SampleStacks():
                self._sampling.take(message)
            case m.SplitsGone():
                for queue in self._queues.values():  # messages in it may still name the list
                    queue.put_nowait(message)
                    self._going[message.splits] += 1

    def place(self, data: bytes) -> memoryview:
        """Return where the second frame of a message belongs: in a list of splits.

        Raises:
            ProtocolError: the frame belongs nowhere.
        """
        part = codec.from_head(data)
        if not isinstance(part, m.SplitsPart) or part.start + part.size > part.nbytes:
            raise ProtocolError(f"a {type(part).__name__} with a second frame")
        if part.start == 0:
            if part.nbytes > (left := available()):
                raise ProtocolError(f"a list of splits of {part.nbytes} bytes, and this host has {left} bytes left")
            fd = os.memfd_create("penstock-splits", os.MFD_CLOEXEC)
            os.ftruncate(fd, part.nbytes)
            self._workers.keep_list(part.splits, fd, part.nbytes)
            self._list = memoryview(mmap.mmap(fd, part.nbytes))
        place = self._list[part.start : part.start + part.size]
        if len(place) != part.size or part.nbytes != len(self._list):
            raise ProtocolError(f"bytes {part.start} to {part.start + part.size} of a list of splits that is not due")
        if part.start + part.size == part.nbytes:
            self._list = memoryview(b"")
        return place

    def _take_in(self, worker: int, number: int) -> None:
        """Start to pass on messages for a worker, which is worker `number` at the head."""
        self._numbers[worker] = number
        self._here[number] = worker
        self._processes[worker] = 0
        self._queues[worker] = asyncio.Queue()
        self._tasks[worker] = asyncio.create_task(self._pass_on(worker))
        self._tasks[worker].add_done_callback(self._on_task_ended)

    def _add(self, number: int) -> None:
        """Start another worker, which is worker `number` at the head."""
        worker = 1 + max(self._numbers)
        self._take_in(worker, number)
        try:
            self._supervisor.add(worker)
        except OSError as error:
            text = f"cannot be started on its host ({error}): {descriptors.HOW_TO_RAISE}"
            log.error("worker %d %s", worker, text, extra={"event": "scale_limited"})
            self.given_up(worker, text)

    def _stop_passing_on(self, worker: int) -> None:
        queue = self._queues.pop(worker, None)
        if queue is not None:
            self._tasks[worker].cancel()
            while not queue.empty():
                said = queue.get_nowait()
                if isinstance(said, m.SplitsGone):
                    self._on_list_passed(said.splits)

    def _on_task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.critical("a worker cannot be given its messages", exc_info=error, extra={"event": "internal_error"})
            self._host.fail(PenstockError(f"this host failed: {error!r}; please report this as a bug"))

    def _worker(self, number: int) -> int:
        """Return the number here of the worker that is worker `number` at the head."""
        if number not in self._here:
            raise ProtocolError(f"the head speaks of worker {number}, which is not of this host")
        return self._here[number]

    async def _pass_on(self, worker: int) -> None:
        """Give a worker the head's messages, in order."""
        queue = self._queues[worker]
        while True:
            said = await queue.get()
            if isinstance(said, m.SplitsGone):
                self._on_list_passed(said.splits)
                continue
            say, message = said
            if isinstance(message, Writes):
                try:
                    memfd = await self._building.acquire(message.nbytes)
                except PenstockError as error:
                    self._host.fail(error)
                    return
                if say.process != self._processes[worker] or message.run not in self._regions:
                    self._building.release(memfd)
                    continue
                self.slots.begin(say.worker, memfd, message, self._regions[message.run], keep=say.keep)
                self._workers.show_memfd(worker, memfd)
                message = structs.replace(message, memfd=memfd.number)
            elif say.process != self._processes[worker]:
                continue
            elif isinstance(message, m.StartRun | m.Compare):
                try:
                    self._prepare(worker, message)
                except ProtocolError as error:
                    self._host.fail(ProtocolError(f"the head sent an invalid message: {error.message}"))
                    return
            elif isinstance(message, m.DropRun):
                self._dropped.add(message.run)
                self._forget_if_over(message.run)
            self._workers.say(worker, message)

    def _prepare(self, worker: int, message: m.StartRun | m.Compare) -> None:
        """Give a worker what the message names.

        Raises:
            ProtocolError: there is no such thing.
        """
        if isinstance(message, m.StartRun):
            self._regions[message.run] = self._regions_of(message)
        try:
            self._workers.show_list(worker, message.splits)
        except KeyError:
            raise ProtocolError(f"list of splits {message.splits}, which the head has not sent") from None

    def _on_list_passed(self, splits: int) -> None:
        """Note that one queue holds no more messages that name the list. After the last queue, forget the list."""
        self._going[splits] -= 1
        if not self._going[splits]:
            del self._going[splits]
            self._workers.forget_list(splits)

    def _regions_of(self, message: m.StartRun) -> Regions:
        if message.feed not in self._of_feeds:
            plan = self._host.plans.get(message.feed)
            if plan is None or message.spec is None:
                raise ProtocolError(
                    f"a run of feed {message.feed!r}, which this host does not serve, or without a spec"
                )
            self._of_feeds[message.feed] = Regions(plan, message.spec, message.sample_spec)
        return self._of_feeds[message.feed]

    # --- what workers say ---

    def on_said(self, worker: int, message: m.FromWorker, data: bytes) -> None:
        """Handle a message from a worker."""
        match message:
            case m.Made():
                self._on_made(worker, message, data)
            case m.RowsWritten():
                self.slots.rows_written(message.ticket, message.run)
                self._pass_said(worker, data)
                self._on_answered(message.ticket, message.run)
            case m.NeedRoom():
                self._pass_said(worker, data)
                self._on_answered(message.ticket, message.run)
            case m.RunFailed():
                self._pass_said(worker, data)
                self.slots.on_run_failed(message.run)
                self._regions.pop(message.run, None)
                self._dropped.discard(message.run)
            case m.SplitsListed() | m.EnvironmentWanted():
                pass  # nobody asked for it, or it is for this host
            case _:
                self._pass_said(worker, data)

    def on_worker_ended(self, worker: int, how: str, doing: Activity | None) -> None:
        """Tell the head that a worker's process has ended."""
        self._processes[worker] += 1
        said = None if doing is None else m.LastActivity(**dataclasses.asdict(doing))
        self._link.send(codec.encode(m.WorkerEnded(self._numbers[worker], how[:1024], said)))
        self.slots.on_worker_ended(self._numbers[worker])

    def given_up(self, worker: int, how: str) -> None:
        """Tell the head that no further process takes this worker's place."""
        self._stop_passing_on(worker)
        self._link.send(codec.encode(m.GivenUp(self._numbers[worker], how[:1024])))

    def leave(self) -> None:
        """Ask the head to take over the workers' work, and send it the batches that are kept here."""
        self.slots.leave()
        self._link.send(codec.encode(m.Leaving()))

    def report(self, unfetched: int = 0, lent: int = 0) -> None:
        """Report the workers to the head, and how many bytes wait for the connections of consumers and were lent to
        them."""
        workers = sorted(self._supervisor.workers.values(), key=lambda worker: worker.number)
        first = self._reported % max(1, len(workers))
        told = workers[first : first + _MOST_REPORTED]
        self._reported = first + len(told)
        building = self._building
        report = m.HostReport(
            workers=tuple(status.reported(worker, self._numbers[worker.number]) for worker in told),
            memory=building.used,
            allowed=building.allowed,
            unsent=self._link.unsent_bytes,
            cpus=cpus.usable(),
            unfetched=unfetched,
            lent=lent,
            machine=self._cpus.now(),
        )
        self._link.send(codec.encode(report))

    def _on_made(self, worker: int, message: m.Made, data: bytes) -> None:
        self._pass_said(worker, data, self.slots.on_made(message))
        if message.last:
            self._on_answered(message.ticket, message.run)

    def _pass_said(self, worker: int, data: bytes, secret: bytes = b"") -> None:
        try:
            self._link.send(codec.encode(m.Said(self._numbers[worker], data, secret)))
        except ProtocolError as error:  # it is too large
            self._host.fail(error)

    def _on_answered(self, ticket: int, run: int) -> None:
        """Note that the worker has answered for the ticket, and no longer writes there."""
        self.slots.on_answered(ticket, run)
        self._forget_if_over(run)

    def _forget_if_over(self, run: int) -> None:
        if run in self._dropped and not self.slots.is_used(run):
            self._dropped.discard(run)
            self._regions.pop(run, None)
