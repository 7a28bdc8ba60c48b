"""Has the daemon's own workers list the splits of a stream's epochs. Asks again when that fails or a worker dies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from penstock_proto import GeneratorError, PenstockError, WorkerDied

from ...worker_state.process_ends import advice
from ..model import commands as do
from ..model.failures import pause
from ..model.feeds import ServedFeed
from ..model.known_lists import SplitsInfo
from ..model.workers import Workers
from ..order.epoch import Epoch


class SplitLists:
    """The runs that list splits for one stream.

    Args:
        feed: the feed whose splits are listed.
        epochs: the stream's open epochs. `Epoch.listing` is the worker and run that list its splits.
        workers: the worker processes.
        ids: numbers for new runs.
        later: `later(seconds, run)` calls `retry` with the run after `seconds`.
        out: where commands go.
    """

    def __init__(
        self,
        feed: ServedFeed,
        epochs: Iterable[Epoch],
        *,
        workers: Workers,
        ids: Iterator[int],
        later: Callable[[float, int], None],
        out: Callable[[do.Command], None],
    ) -> None:
        self._feed = feed
        self._epochs = epochs
        self._workers = workers
        self._ids = ids
        self._later = later
        self._do = out

    def ask(self, epoch: Epoch) -> None:
        """Have one of the daemon's own workers list the epoch's splits.

        Raises:
            WorkerDied: the daemon has no worker of its own.
        """
        epoch.listing = self._workers.pick_local(epoch.number + epoch.listings), next(self._ids)
        epoch.listings += 1
        self._do(do.ListSplits(*epoch.listing, self._feed.name, epoch.number))

    def on_listed(self, run: int, splits: SplitsInfo) -> Epoch | None:
        """Return the epoch whose splits `run` has listed. If the list is no longer wanted, have it forgotten and return
        None."""
        epoch = self._listing(run)
        if epoch is None:
            self._do(do.ForgetSplits(splits.number))
        else:
            epoch.listing = None
        return epoch

    def on_run_failed(self, run: int, error: PenstockError) -> None:
        """Ask again later, or keep the error: user code failed in the run."""
        epoch = self._listing(run)
        if epoch is None:
            return
        if self._feed.plan.on_error == "retry" and isinstance(error, GeneratorError):
            self._ask_later(epoch, run)
        else:
            epoch.listing, epoch.error = None, error

    def retry(self, run: int) -> None:
        """Ask again: the pause after this run's failure is over."""
        for epoch in self._epochs:
            if epoch.listing_pause == run:
                epoch.listing_pause = None
                self.ask(epoch)

    def on_workers_gone(self, workers: Collection[int], how: str, blamed: tuple[int, int, str] | None) -> None:
        """Ask again for the lists of workers whose processes are gone; see `Production.on_workers_gone`."""
        for epoch in self._epochs:
            if epoch.listing is not None and epoch.listing[0] in workers:
                self._ask_again(epoch, how, blamed is not None and blamed[0] == epoch.listing[1])

    def on_worker_stands(self, worker: int) -> None:
        """Ask others for the lists of a worker that has not begun them, as it stands in a step of another stream."""
        for epoch in self._epochs:
            if epoch.listing is not None and epoch.listing[0] == worker and not self._workers.local_stand:
                self.ask(epoch)

    def uses(self, worker: int) -> bool:
        """Whether the worker lists splits."""
        return any(epoch.listing is not None and epoch.listing[0] == worker for epoch in self._epochs)

    def _listing(self, run: int) -> Epoch | None:
        return next((epoch for epoch in self._epochs if epoch.listing is not None and epoch.listing[1] == run), None)

    def _ask_again(self, epoch: Epoch, how: str, blamed: bool) -> None:
        """Ask again, as the worker that listed the splits died, unless that happened too often. `blamed`: whether it
        died in the function that lists them."""
        epoch.listing_deaths += blamed
        if blamed and self._feed.plan.on_error == "retry" and epoch.listing is not None:
            self._ask_later(epoch, epoch.listing[1])
        elif epoch.listing_deaths < self._feed.plan.attempts:
            self.ask(epoch)
        else:
            epoch.listing = None
            epoch.error = WorkerDied(
                f"the function that lists the splits ended its worker process {epoch.listing_deaths} times; the last "
                f"time it {how}{advice(how)}",
                feed=self._feed.name,
            )

    def _ask_later(self, epoch: Epoch, run: int) -> None:
        epoch.listing, epoch.listing_pause = None, run
        epoch.listing_failures += 1
        self._later(pause(epoch.listing_failures), run)
