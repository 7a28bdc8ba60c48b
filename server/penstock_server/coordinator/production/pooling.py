"""Pooling: has the rows of a formed pool copied to new batches. Any of the daemon's own workers can do that.

The pool's visits keep their slots until all of its batches are there. So if a worker dies, another one does its part
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from penstock_proto import PenstockError

from ..model import commands as do
from ..model.feeds import ServedFeed
from ..model.turn import COMPLETE, DONE, FILLING, Part, Turn, VisitPool
from ..model.workers import Workers
from ..order.epoch import Epoch
from ..order.open_turns import OpenTurns


class Pooling:
    """The copying of pools' rows for one stream: which worker does which turn.

    Args:
        feed: the feed whose batches are made.
        turns: the stream's turns in production.
        workers: the worker processes.
        ids: numbers for new runs.
        singly: whether each batch is delivered on its own.
        out: where commands go.
    """

    def __init__(
        self,
        feed: ServedFeed,
        turns: OpenTurns,
        *,
        workers: Workers,
        ids: Iterator[int],
        singly: bool,
        out: Callable[[do.Command], None],
    ) -> None:
        self._feed = feed
        self._turns = turns
        self._workers = workers
        self._ids = ids
        self._singly = singly
        self._do = out
        self._revoked: set[int] = set()
        """The runs that were told to drop their turn before they began with it. Another run copies its rows."""

    def fill(self, epoch: Epoch, turn: Turn) -> None:
        """Have one of the daemon's own workers copy the rows of the turn into its slot.

        Raises:
            WorkerDied: the daemon has no worker of its own.
        """
        pool = turn.pool
        assert pool is not None
        worker, run = self._workers.pick_local(turn.index // self._feed.turn), next(self._ids)
        turn.fillers = [(worker, run)]
        turn.become(FILLING)
        self._do(
            do.PoolRows(
                worker,
                run,
                ticket=turn.slot.ticket,
                feed=self._feed.name,
                epoch=epoch.number,
                visit=pool.number,
                part=pool.part,
                sources=tuple((visit.slot.ticket, visit.made) for visit in pool.visits if visit.made),
                first=turn.index - pool.index,
                batches=turn.batches,
                index=turn.index,
            )
        )

    def on_written(self, epoch: Epoch, turn: Turn, run: int) -> None:
        """Complete the turn, whose rows a worker has copied. Once its pool is mixed, release the slots of the
        visits."""
        if all(filler[1] != run for filler in turn.fillers):
            return
        if run in self._revoked:
            self._revoke(epoch, turn)
            return
        turn.fillers = []
        if turn.left_order:
            self._turns.complete(epoch, turn, DONE)
            return
        turn.made = turn.batches
        step = 1 if self._singly else turn.batches
        rows = self._feed.plan.batch_size or 1
        for first in range(0, turn.batches, step):
            turn.parts.append(Part(first, step, step * rows, ()))
        self._turns.complete(epoch, turn, COMPLETE)
        assert turn.pool is not None
        self._release(epoch, turn.pool)

    def on_run_failed(self, run: int, error: PenstockError) -> None:
        """Fail the turn whose rows a worker could not copy."""
        for epoch, turn in list(self._turns.by_ticket.values()):
            if turn.pooled and any(filler[1] == run for filler in turn.fillers):
                self._revoked.discard(run)
                turn.fillers = []
                if turn.left_order:
                    self._turns.complete(epoch, turn, DONE)
                else:
                    self._turns.fail(epoch, turn, error)
                    self._turns.complete(epoch, turn, COMPLETE)

    def on_workers_gone(self, epoch: Epoch, workers: Collection[int]) -> None:
        """Give the work of these workers, whose processes are gone, to others."""
        for other, turn in list(self._turns.by_ticket.values()):
            lost = turn.pooled and any(filler[0] in workers for filler in turn.fillers)
            if other is epoch and lost:
                self._revoked.discard(turn.fillers[0][1])
                self._turns.take_from(turn, lambda filler: filler[0] in workers)
                self.fill(epoch, turn)

    def on_worker_stands(self, worker: int) -> None:
        """Take the turns from a worker that has not begun to copy their rows; see `Production.on_worker_stands`. It
        first has to know: it may go on at any time."""
        for epoch, turn in list(self._turns.by_ticket.values()):
            if turn.pooled and turn.fillers and turn.fillers[0][0] == worker:
                _, run = turn.fillers[0]
                if run in self._revoked:
                    self._revoke(epoch, turn)
                elif not self._workers.local_stand:
                    self._revoked.add(run)
                    self._do(do.DropRun(worker, run))

    def _revoke(self, epoch: Epoch, turn: Turn) -> None:
        """Give the turn to another run: its run writes nothing more to the slot, and perhaps never did."""
        self._revoked.discard(turn.fillers[0][1])
        self._turns.take_from(turn, lambda filler: True)
        if turn.left_order:
            self._turns.complete(epoch, turn, DONE)
        else:
            self.fill(epoch, turn)

    def _release(self, epoch: Epoch, pool: VisitPool) -> None:
        """Release the slots of the pool's visits, once all of its batches are there."""
        if all(turn.complete for turn in pool.turns):
            for visit in pool.visits:
                self._turns.on_left_order(epoch, visit)
