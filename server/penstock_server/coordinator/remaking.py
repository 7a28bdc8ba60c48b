"""Makes batches again that were reported, and whose bytes were lost with their host.

A batch is a function of the feed, the epoch, the lane and its number. So its slot keeps the restart record from which
it was made (slots.Recipe), and another worker makes the same bytes from there, next to the run that makes the lane. No
turn and no lane takes notice: consumers that were told of the batches wait for their bytes.

If that fails, the stream fails as after a broken connection: clients connect again, with their positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from penstock_proto import ConnectionLost, PenstockError
from penstock_proto.messages import Made

from . import commands as do
from .feeds import ServedFeed
from .open_turns import OpenTurns
from .slots import Lease, Slots
from .workers import VACANT, Workers

_ATTEMPTS = 3
"""How often a worker may fail, or end, while it makes the same slot again."""


def can_be_made_again(feed: ServedFeed) -> bool:
    """Whether single slots of the feed can be made again.

    The rows of a pool are mixed in the slots themselves. A list of splits is forgotten with its epoch. If splits may be
    left out, a run from an earlier record might find that user code does not fail again.
    """
    plan = feed.plan
    listed = feed.static_splits is not None or plan.length is not None
    return listed and feed.info.pool == 1 and plan.on_error != "skip"


@dataclass(slots=True)
class _Slot:
    """A slot to be filled again, which is held meanwhile.

    Attributes:
        lease: its lease.
        made: how many batches its present run has made.
        failures: how many runs have failed.
        unwanted: whether nobody else holds it any longer, so that its run was dropped.
    """

    lease: Lease
    made: int = 0
    failures: int = 0
    unwanted: bool = False


class Remaking:
    """See the file's head.

    Args:
        feed: what the stream reads.
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
        slots: Slots,
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
        """By worker and run."""
        self._stopped = False

    def lost(self, tickets: Iterable[int]) -> None:
        """The bytes for these tickets are lost. Those of which no slot is left nobody needs."""
        for lease in map(self._slots.find, tickets):
            if lease is None or self._stopped:
                continue
            self._slots.hold(lease)
            self._waiting.append(_Slot(lease))

    def proceed(self) -> None:
        """Have those slots filled that no run fills now."""
        for filler, slot in self._runs.items():
            if slot.lease.holders == 1 and not slot.unwanted:
                slot.unwanted = True
                self._do(do.DropRun(*filler))
        for _ in range(len(self._waiting)):
            slot = self._waiting.popleft()
            if slot.lease.holders == 1:
                self._over(slot, whole=False)
            elif slot.lease.ticket in self._turns.by_ticket:  # a run makes the rest of the turn
                self._waiting.append(slot)
            else:
                self._start(slot)

    def made(self, made: Made) -> bool:
        """A worker has made batches. Return whether it was for this."""
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
                    self._give_up(f"a worker made {slot.made} batches in place of {slot.lease.made}")
            self._over(slot, whole=whole)
        return True

    def run_failed(self, run: int, error: PenstockError) -> None:
        """User code failed in the run. The worker has dropped it."""
        filler = self._filler(run)
        if filler is not None:
            self._again(filler, error.message)

    def needs_room(self, run: int) -> None:
        """What the run makes has another size than before. The worker waits for a larger slot."""
        filler = self._filler(run)
        assert filler is not None
        if not self._runs[filler].unwanted:
            self._do(do.DropRun(*filler))
        self._again(filler, "a batch had another size")

    def workers_gone(self, workers: Collection[int], how: str, *, lost: bool) -> None:
        """The processes of these workers are gone: others do what they were to do. `lost`: nobody is to blame."""
        for filler in [filler for filler in self._runs if filler[0] in workers]:
            self._again(filler, f"a worker {how}", failed=not lost)

    def uses(self, worker: int) -> bool:
        """Whether the worker makes something again."""
        return any(filler[0] == worker for filler in self._runs)

    def is_of(self, run: int) -> bool:
        """Whether this run makes something again."""
        return self._filler(run) is not None

    def stop(self) -> None:
        """Nobody needs anything any longer. Slots in which a worker still writes come back when it has answered."""
        self._stopped = True
        while self._waiting:
            self._over(self._waiting.popleft(), whole=False)
        for filler, slot in list(self._runs.items()):
            if filler[0] == VACANT:  # nobody will answer for it
                del self._runs[filler]
                self._over(slot, whole=False)
            elif not slot.unwanted:
                slot.unwanted = True
                self._do(do.DropRun(*filler))

    @property
    def unwanted(self) -> int:
        """How many slots nobody else holds, while a worker may still write to them."""
        return sum(slot.lease.holders == 1 for slot in self._runs.values())

    @property
    def fillers(self) -> Collection[tuple[int, int]]:
        """The (worker, run) pairs that make something again."""
        return self._runs.keys()

    def _filler(self, run: int) -> tuple[int, int] | None:
        return next((filler for filler in self._runs if filler[1] == run), None)

    def _start(self, slot: _Slot) -> None:
        recipe = slot.lease.recipe
        assert recipe is not None, "bytes were lost that may not have stayed at a host"
        worker, run = self._workers.pick(recipe.index // self._feed.turn + slot.failures), next(self._ids)
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
            )
        )
        self._do(do.Fill(worker, run, slot.lease.ticket, recipe.index, slot.lease.made, 0))

    def _again(self, filler: tuple[int, int], why: str, *, failed: bool = True) -> None:
        """The run is gone: let another one try, unless runs have failed too often."""
        slot = self._runs.pop(filler)
        slot.failures += failed
        if not slot.unwanted and slot.failures < _ATTEMPTS:
            self._waiting.append(slot)
            return
        if not slot.unwanted:
            self._give_up(why)
        self._over(slot, whole=False)

    def _over(self, slot: _Slot, *, whole: bool) -> None:
        """The slot's bytes are there, or nobody makes them."""
        self._do(do.Remade(slot.lease.ticket, whole))
        self._slots.release(slot.lease)

    def _give_up(self, why: str) -> None:
        """The lost batches cannot be made again."""
        self._fail(
            ConnectionLost(
                f"batches were lost with their host, and could not be made again ({why}); the stream goes on from "
                "where its consumers are"
            )
        )
