"""Pooling: has the rows of a formed pool copied to new batches, and merged batches transformed (`batch_transform`).

Any of the daemon's own workers can do that. A pool's visits keep their slots until all of its batches are there. So if
a worker dies, another one does its part again. The result for a merged batch takes the place of the batch's rows, so
these are written again then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from penstock_proto import GeneratorError, PenstockError

from ..model import commands as do
from ..model import failures
from ..model.feeds import ServedFeed
from ..model.turn import COMPLETE, DONE, FILLING, IDLE, Part, Turn, VisitPool
from ..model.workers import Workers
from ..order.epoch import Epoch
from ..order.open_turns import OpenTurns


class Pooling:
    """The work of the daemon's own workers for one stream: which worker does which turn.

    Args:
        feed: the feed whose batches are made.
        turns: the stream's turns in production.
        workers: the worker processes.
        ids: numbers for new runs.
        fill: has a turn made again.
        later: `later(seconds, run)` tries the run's work again after `seconds`.
        out: where commands go.
    """

    def __init__(
        self,
        feed: ServedFeed,
        turns: OpenTurns,
        *,
        workers: Workers,
        ids: Iterator[int],
        fill: Callable[[Epoch, Turn], None],
        later: Callable[[float, int], None],
        out: Callable[[do.Command], None],
    ) -> None:
        self._feed = feed
        self._turns = turns
        self._workers = workers
        self._ids = ids
        self._fill_again = fill
        self._later = later
        self._do = out
        self._pauses: dict[int, tuple[Epoch, Turn]] = {}
        """The turns that wait for another attempt, by the run that failed."""
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
                sample_spec=self._feed.sample_spec,
            )
        )

    def transform(self, epoch: Epoch, turn: Turn) -> None:
        """Have one of the daemon's own workers transform a merged batch, whose rows are all written.

        Raises:
            WorkerDied: the daemon has no worker of its own.
        """
        assert self._feed.sample_spec is not None
        worker, run = self._workers.pick_local(turn.index), next(self._ids)
        turn.fillers = [(worker, run)]
        turn.transforming = True
        self._do(
            do.TransformRows(
                worker,
                run,
                ticket=turn.slot.ticket,
                feed=self._feed.name,
                epoch=epoch.number,
                rows=turn.rows,
                index=turn.index,
                shapes=turn.shapes,
                sample_spec=self._feed.sample_spec,
            )
        )

    def drop(self, turn: Turn) -> None:
        """Spare user code a batch that nobody wants any longer, if the turn's worker has not begun with it: the rows of
        the batch may be overwritten from now on."""
        if self._feed.sample_spec is not None and _is_local(turn):
            for filler in turn.fillers:
                self._do(do.DropRun(*filler))

    def on_revoked(self, epoch: Epoch, turn: Turn, run: int) -> bool:
        """Give the turn to another run if this run, which has answered, had been told to drop it. Return whether that
        is so."""
        if run not in self._revoked or all(filler[1] != run for filler in turn.fillers):
            return False
        self._revoke(epoch, turn)
        return True

    def on_written(self, epoch: Epoch, turn: Turn, run: int) -> None:
        """Complete the turn, whose rows a worker has copied. Once its pool is mixed, release the slots of the
        visits."""
        if all(filler[1] != run for filler in turn.fillers):
            return
        turn.fillers = []
        if turn.left_order:
            self._turns.complete(epoch, turn, DONE)
            return
        turn.made = turn.batches
        turn.parts.append(Part(0, turn.batches, turn.batches * (self._feed.plan.batch_size or 1), ()))
        self._turns.complete(epoch, turn, COMPLETE)
        assert turn.pool is not None
        self._release(epoch, turn.pool)

    def on_run_failed(self, run: int, error: PenstockError) -> None:
        """Fail the turn whose rows a worker could not copy or transform. With `on_error="retry"` try it again after a
        pause, if user code failed."""
        for epoch, turn in list(self._turns.by_ticket.values()):
            if _is_local(turn) and any(filler[1] == run for filler in turn.fillers):
                self._revoked.discard(run)
                if not turn.left_order and self._feed.plan.on_error == "retry" and isinstance(error, GeneratorError):
                    self._turns.take_from(turn, lambda filler: True)
                    turn.failures += 1
                    self._pauses[run] = epoch, turn
                    self._later(failures.pause(turn.failures), run)
                    continue
                turn.fillers = []
                if turn.left_order:
                    self._turns.complete(epoch, turn, DONE)
                else:
                    self._turns.fail(epoch, turn, error)
                    self._turns.complete(epoch, turn, COMPLETE)

    def retry(self, run: int) -> None:
        """Have the turn of this run made again: the pause after the run's failure is over."""
        epoch, turn = self._pauses.pop(run, (None, None))
        if epoch is not None and turn is not None and turn.state is IDLE:
            self._fill_again(epoch, turn)

    def on_workers_gone(
        self, epoch: Epoch, workers: Collection[int], how: str, blamed: tuple[int, int, str] | None
    ) -> None:
        """Give the work of these workers, whose processes are gone, to others; see `Production.on_workers_gone`. If
        `batch_transform` ends its workers again and again, fail the turn."""
        plan = self._feed.plan
        for other, turn in list(self._turns.by_ticket.values()):
            lost = _is_local(turn) and any(filler[0] in workers for filler in turn.fillers)
            if other is epoch and lost:
                worker, run = turn.fillers[0]
                self._revoked.discard(run)
                self._turns.take_from(turn, lambda filler: filler[0] in workers)
                name = blamed[2] if blamed is not None and blamed[0] == run else ""
                turn.failures += bool(name)
                if name and turn.failures >= plan.attempts and plan.on_error != "retry":
                    error = failures.deadly(plan, epoch.number, -1, turn.failures, how, worker, name)
                    self._turns.fail(epoch, turn, error)
                    self._turns.complete(epoch, turn, COMPLETE)
                else:
                    self._fill_again(epoch, turn)

    def on_worker_stands(self, worker: int) -> None:
        """Take the turns from a worker that has not begun to copy their rows; see `Production.on_worker_stands`. It
        first has to know: it may go on at any time."""
        for epoch, turn in list(self._turns.by_ticket.values()):
            if _is_local(turn) and turn.fillers and turn.fillers[0][0] == worker:
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
            self._fill_again(epoch, turn)

    def _release(self, epoch: Epoch, pool: VisitPool) -> None:
        """Release the slots of the pool's visits, once all of its batches are there."""
        if all(turn.complete for turn in pool.turns):
            for visit in pool.visits:
                self._turns.on_left_order(epoch, visit)


def _is_local(turn: Turn) -> bool:
    """Whether the turn can be made by any of the daemon's own workers."""
    return turn.pooled or turn.transforming
