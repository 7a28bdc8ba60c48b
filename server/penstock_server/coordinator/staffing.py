"""Workers come, die and leave: tells the start of the feeds (starting.py) and each stream.

When user code has ended a worker and there are several streams, one of the other workers is set apart for a minute: it
makes only the lanes that have done so, and hands over the others first. So if these lanes do it again, no other stream
waits.

A worker *stands* if it has been in one call of user code for long. Then it hands over the work that it has not begun
for other streams, and gets no new work until it goes on. So one long call, or one that ends its worker later, does not
delay other streams.

A worker that is to leave hands over each lane when the lane comes to a border. After a minute it hands over its other
lanes wherever they are. A little later it is killed.

While no worker can make batches, a vacant place has their work (`workers.VACANT`). The next worker that is ready takes
it over, as if another one had died.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock_proto import WorkerDied
from penstock_proto.messages import IDS_PER_STREAM

from .model import commands as do
from .model import events as on
from .model.timers import Timers
from .model.workers import REMOTE, VACANT, Workers
from .starting import Starting
from .stream.affected import AffectedStreams
from .stream.budget import Budget

HAND_OVER = 60.0
"""Seconds for which a worker that is to leave may go on until its lanes come to a border."""

HURRY = 10.0
"""Seconds that it then has to finish its current batch, before it is killed."""


APART = 60.0
"""Seconds since the last death in user code for which a worker is set apart."""


class Staffing:
    """Takes the events about workers.

    Args:
        workers: the worker processes.
        streams: all streams; notes those that the event affects.
        starting: how feeds start.
        budget: the memory that streams share.
        timers: for the steps of leaving.
        out: where commands go.
    """

    def __init__(
        self,
        workers: Workers,
        streams: AffectedStreams,
        starting: Starting,
        budget: Budget,
        timers: Timers,
        out: Callable[[do.Command], None],
    ) -> None:
        self._workers = workers
        self._streams = streams
        self._starting = starting
        self._budget = budget
        self._timers = timers
        self._do = out
        self._deaths = 0
        """How often user code has ended a worker."""

    def on_imported(self, event: on.Imported) -> None:
        """Give work to a worker that has imported the feeds, unless other workers have imported different ones."""
        lost = event.worker >= REMOTE and event.worker not in self._workers.numbers
        if lost or not self._starting.on_imported(event.worker, event.feeds):
            self._do(do.RejectWorker(event.worker))
            return
        self._do(do.AcceptWorker(event.worker))
        if event.worker in self._workers.away:
            self._workers.on_ready(event.worker)
            self._take_vacant_place()
            self._plan_memory()
            self._on_workers_changed()

    def on_worker_died(self, event: on.WorkerDied) -> None:
        """Hand over the work of a worker whose process has ended. Another process takes its place."""
        self._starting.on_worker_died(event.worker, event.how)
        if event.worker in self._workers.numbers:
            self._workers.on_died(event.worker)
        if event.blamed is not None and event.blamed[1] >= 0:
            self._set_apart(event.worker)
        for stream in self._streams.all():
            with self._streams.alone(stream):
                stream.on_workers_gone((event.worker,), event.how, event.blamed)
        self.retire()

    def _set_apart(self, died: int) -> None:
        """Set a worker apart, if that spares other streams. It gets the messages in order, so it has handed over the
        other lanes before it begins one that has ended a worker."""
        if self._workers.apart is None and len(list(self._streams.all())) < 2:
            return  # it would only make the one stream slower
        worker = self._workers.set_apart(died)
        if self._workers.apart is None:
            return
        self._deaths += 1
        deaths = self._deaths
        self._timers.later(APART, lambda: self._unset_apart(deaths))
        self._clear(worker)

    def _clear(self, worker: int | None) -> None:
        """Let a worker that was just set apart, if any, hand over its lanes."""
        if worker is not None:
            for stream in self._streams.all():
                with self._streams.alone(stream):
                    stream.production.move_all(worker)

    def _unset_apart(self, deaths: int) -> None:
        if deaths == self._deaths and self._workers.apart is not None:
            self._workers.unset_apart()
            self._on_workers_changed()

    def on_worker_stands(self, event: on.WorkerStands) -> None:
        """Hand over the work that the worker has not begun for other streams than the one that it works for."""
        if event.worker not in self._workers.numbers or event.worker in self._workers.away:
            return
        self._workers.on_stands(event.worker)
        for stream in self._streams.all():
            if stream.number != event.run // IDS_PER_STREAM:
                with self._streams.alone(stream):
                    stream.on_worker_stands(event.worker, event.seconds)

    def on_worker_goes_on(self, event: on.WorkerGoesOn) -> None:
        """Give the worker work again: lanes move to it when they come to borders."""
        if event.worker in self._workers.standing:
            self._workers.on_goes_on(event.worker)
            self._on_workers_changed()

    def on_worker_added(self, event: on.WorkerAdded) -> None:
        """Add a worker."""
        self._workers.add(event.worker, event.machine)

    def let_leave(self, event: on.RetireWorkers) -> None:
        """Let workers leave. None of them gets lanes of another."""
        workers = [worker for worker in event.workers if worker in self._workers.numbers]
        self._workers.let_leave(workers)
        if self._workers.apart in self._workers.leaving:
            self._clear(self._workers.set_apart(self._workers.apart))
        self._on_workers_changed()
        if event.now:
            self._kill(workers)
        else:
            self._timers.later(HAND_OVER, lambda: self._hurry(workers))

    def on_worker_gone(self, event: on.WorkerGone) -> None:
        """Remove a worker that has ended for good: no other process takes its place."""
        self._workers.remove(event.worker)
        if not self._workers.scaled and not self._workers.idle:
            self._workers.let_own_stay()
        if not self._workers.numbers:
            said = f"no worker process is left, and none can start: the last one {event.how}; see the daemon's log"
            for stream in self._streams.all():
                with self._streams.alone(stream):
                    stream.fail(WorkerDied(said))
        self.on_worker_died(on.WorkerDied(event.worker, event.how))

    def on_workers_lost(self, event: on.WorkersLost) -> None:
        """Remove the workers of a lost host. All of them are removed before their work is handed over, so it goes to
        none of them."""
        self._workers.remove(*event.workers)
        for stream in self._streams.all():
            with self._streams.alone(stream):
                stream.on_workers_gone(event.workers, event.how, None)
        self.retire()

    def retire(self) -> None:
        """End the workers that are to leave and no longer do anything."""
        for worker in sorted(self._workers.leaving):
            uses = any(stream.uses(worker) for stream in self._streams.all()) or self._starting.uses(worker)
            if not uses:
                self._workers.remove(worker)
                self._starting.checks.on_worker_away(worker)
                self._do(do.Retire(worker))

    def _take_vacant_place(self) -> None:
        """Hand over the work of the vacant place, if a worker is ready."""
        if self._workers.vacant and self._workers.available != [VACANT]:
            for stream in self._streams.all():
                with self._streams.alone(stream):
                    stream.on_workers_gone((VACANT,), "", None)
            self._workers.on_vacant_place_taken()

    def _plan_memory(self) -> None:
        """Let streams hold more slots if there are more workers than when they opened."""
        for stream in self._streams.all():
            with self._streams.alone(stream):
                self._budget.plan_for(stream, len(self._workers.makers))

    def _on_workers_changed(self) -> None:
        for stream in self._streams.all():
            with self._streams.alone(stream):
                stream.production.on_workers_changed()
        self.retire()

    def _hurry(self, workers: Sequence[int]) -> None:
        """Hand over the lanes of these workers wherever they are: the minute is over."""
        leaving = [worker for worker in workers if worker in self._workers.leaving]
        for stream in self._streams.all():
            with self._streams.alone(stream):
                for worker in leaving:
                    stream.production.move_all(worker)
        self.retire()
        if leaving:
            self._timers.later(HURRY, lambda: self._kill(leaving))

    def _kill(self, workers: Sequence[int]) -> None:
        for worker in workers:
            if worker in self._workers.leaving:
                self._do(do.KillWorker(worker))
