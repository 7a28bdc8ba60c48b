"""Makes reported batches again if their bytes were lost with their host.

A batch depends only on the feed, the epoch, the lane and its number in the lane. So its slot keeps the restart record
from which it was made (leases.Recipe), and another worker makes the same bytes from that record, in a run of its own.
Turns and lanes do not change: consumers that were told of the batches wait for their bytes.

If that fails, the stream fails as after a broken connection: clients connect again, with their positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from penstock_proto import ConnectionLost, PenstockError
from penstock_proto.messages import Made

from ..model import commands as do
from ..model.feeds import ServedFeed
from ..model.leases import Lease, Leases
from ..model.workers import VACANT, Workers
from ..order.open_turns import OpenTurns

_ATTEMPTS = 3
"""How many times workers may fail or die while they make one slot again."""


def can_be_made_again(feed: ServedFeed) -> bool:
    """Whether single slots of the feed can be made again.

    Slots of pools cannot: rows are mixed in the slots themselves. Nor can slots of a feed that lists its splits for
    each epoch: the list is forgotten with the epoch. If splits may be left out, a run from an earlier record might find
    that user code does not fail this time.
    """
    plan = feed.plan
    listed = feed.static_splits is not None or plan.length is not None
    return listed and feed.info.pool == 1 and plan.on_error != "skip"


@dataclass(slots=True)
class _Slot:
    """A slot that is to be filled again. Remaking holds it until that is done.

    Attributes:
        lease: its lease.
        made: how many batches its current run has made.
        failures: how many runs have failed.
        unwanted: whether nobody else holds it any longer, so that its run was dropped.
    """

    lease: Lease
    made: int = 0
    failures: int = 0
    unwanted: bool = False


class Remaking:
    """The slots of one stream that are made again, each by a run of its own.

    Args:
        feed: the feed that the stream reads.
        slots: the stream's slots.
        turns: its turns that are being made.
        workers: the workers.
        ids: gives numbers to runs.
        fail: called with the error when the stream cannot go on.
        out: where commands go.
    """

    def __init__(
        self,
        feed: ServedFeed,
        slots: Leases,
        turns: OpenTurns,
        *,
        workers: Workers,
        ids: Iterator[int],
        fail: Callable[[PenstockError], None],
        out: Callable[[do.Command], None],
    ) -> None:
        self._feed = feed
        self._slots = slots
        self._turns = turns
        self._workers = workers
        self._ids = ids
        self._fail = fail
        self._do = out
        self._waiting: deque[_Slot] = deque()
        self._runs: dict[tuple[int, int], _Slot] = {}
        """The slots that are being filled, by worker and run."""
        self._stopped = False

    def on_bytes_lost(self, tickets: Iterable[int]) -> None:
        """Note that the bytes of these tickets are lost. Ignore tickets whose slot was already freed: nobody needs
        them."""
        for lease in map(self._slots.find, tickets):
            if lease is None or self._stopped:
                continue
            self._slots.hold(lease)
            self._waiting.append(_Slot(lease))

    def proceed(self) -> None:
        """Start a run for each lost slot that has none. Drop the runs of slots that nobody else holds any longer."""
        for filler, slot in self._runs.items():
            if slot.lease.holders == 1 and not slot.unwanted:
                slot.unwanted = True
                self._do(do.DropRun(*filler))
        for _ in range(len(self._waiting)):
            slot = self._waiting.popleft()
            if slot.lease.holders == 1:
                self._finish(slot, whole=False)
            elif slot.lease.ticket in self._turns.by_ticket:  # wait: a run makes the rest of the turn
                self._waiting.append(slot)
            else:
                self._start(slot)

    def on_made(self, made: Made) -> bool:
        """Note that a worker has made batches. Return False if this is not one of the runs that make batches again."""
        filler = self._filler(made.run)
        if filler is None:
            return False
        slot = self._runs[filler]
        slot.made += made.batches
        if made.last:
            del self._runs[filler]
            whole = slot.made == slot.lease.made
            if not slot.unwanted:
                self._do(do.DropRun(*filler))
                if not whole:
                    self._give_up(f"a worker made {slot.made} batches instead of {slot.lease.made}")
            self._finish(slot, whole=whole)
        return True

    def on_run_failed(self, run: int, error: PenstockError) -> None:
        """Try again with another run: user code failed in this one. The worker has dropped it."""
        filler = self._filler(run)
        if filler is not None:
            self._retry(filler, error.message)

    def on_need_room(self, run: int) -> None:
        """Try again with another run: a batch of this one has another size than before, and its worker waits for a
        larger slot."""
        filler = self._filler(run)
        assert filler is not None
        if not self._runs[filler].unwanted:
            self._do(do.DropRun(*filler))
        self._retry(filler, "a batch had another size")

    def on_workers_gone(self, workers: Collection[int], how: str, *, lost: bool) -> None:
        """Give the work of these workers, whose processes are gone, to others. With `lost`, nothing is to blame, and it
        does not count as a failure."""
        for filler in [filler for filler in self._runs if filler[0] in workers]:
            self._retry(filler, f"a worker {how}", failed=not lost)

    def uses(self, worker: int) -> bool:
        """Whether the worker makes something again."""
        return any(filler[0] == worker for filler in self._runs)

    def is_of(self, run: int) -> bool:
        """Whether this run makes something again."""
        return self._filler(run) is not None

    def stop(self) -> None:
        """Stop, because nobody needs the batches any longer. Slots to which a worker still writes are released when it
        has answered."""
        self._stopped = True
        while self._waiting:
            self._finish(self._waiting.popleft(), whole=False)
        for filler, slot in list(self._runs.items()):
            if filler[0] == VACANT:  # nobody will answer for it
                del self._runs[filler]
                self._finish(slot, whole=False)
            elif not slot.unwanted:
                slot.unwanted = True
                self._do(do.DropRun(*filler))

    @property
    def unwanted(self) -> int:
        """The number of slots that nobody else holds, but to which a worker may still write."""
        return sum(slot.lease.holders == 1 for slot in self._runs.values())

    @property
    def fillers(self) -> Collection[tuple[int, int]]:
        """The (worker, run) pairs that make something again."""
        return self._runs.keys()

    @property
    def tickets(self) -> set[int]:
        """The tickets of the slots that are being filled again."""
        return {slot.lease.ticket for slot in self._runs.values()}

    def _filler(self, run: int) -> tuple[int, int] | None:
        return next((filler for filler in self._runs if filler[1] == run), None)

    def _start(self, slot: _Slot) -> None:
        recipe = slot.lease.recipe
        assert recipe is not None, "bytes were lost that may not have stayed at a host"
        worker, run = self._workers.pick(recipe.index // slot.lease.made + slot.failures), next(self._ids)
        slot.made = 0
        self._runs[worker, run] = slot
        self._do(
            do.StartRun(
                worker,
                run,
                feed=self._feed.name,
                epoch=recipe.epoch,
                lane=recipe.lane,
                splits=recipe.splits,
                record=recipe.record,
                sample_spec=self._feed.sample_spec,
            )
        )
        self._do(do.Fill(worker, run, slot.lease.ticket, recipe.index, slot.lease.made, 0))

    def _retry(self, filler: tuple[int, int], why: str, *, failed: bool = True) -> None:
        """Let another run try, because this one is gone, unless runs have failed too often."""
        slot = self._runs.pop(filler)
        slot.failures += failed
        if not slot.unwanted and slot.failures < _ATTEMPTS:
            self._waiting.append(slot)
            return
        if not slot.unwanted:
            self._give_up(why)
        self._finish(slot, whole=False)

    def _finish(self, slot: _Slot, *, whole: bool) -> None:
        """Release the slot: its bytes are there, or nobody makes them any longer."""
        self._do(do.Remade(slot.lease.ticket, whole))
        self._slots.release(slot.lease)

    def _give_up(self, why: str) -> None:
        """Fail the stream: the lost batches cannot be made again."""
        self._fail(
            ConnectionLost(
                f"batches were lost with their host, and could not be made again ({why}); the stream goes on from "
                "where its consumers are"
            )
        )
