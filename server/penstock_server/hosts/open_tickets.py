"""The tickets for which the workers of a joined host are to answer, and the slots into which they may write until then.

A ticket is open from the command to fill a slot until the worker has answered, or until the worker or its host is gone.
While it is open, the host may write into the slot, and the coordinator does not use the slot for anything else. Both
are also true while the host keeps the slot's batches (kept.py). A worker that has asked for a larger slot (NeedRoom)
still answers, when it has that slot or its run is dropped, but it may write nowhere until then.
"""

from __future__ import annotations

import dataclasses

from penstock_proto import ProtocolError

from ..shared_memory.arena import Memfd


@dataclasses.dataclass(frozen=True, slots=True)
class _Open:
    """An open ticket: its worker, the memory of the slot if the worker may write there, and whether the host may keep
    the batches."""

    worker: int
    memfd: Memfd | None
    keep: bool


class OpenTickets:
    """The open tickets of one host, and its runs."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], _Open] = {}
        """By ticket and run. Several runs may write rows of a merged batch."""
        self._runs: dict[int, int] = {}
        """The worker of each run about which messages may still come."""
        self._dropped: set[int] = set()
        self._kept: dict[int, Memfd | None] = {}
        """By ticket: the slot of batches that the host keeps, and may send later. None: nobody needs them now."""

    @property
    def slots(self) -> int:
        """How many slots are to be filled."""
        return sum(one.memfd is not None for one in self._open.values())

    def open(self, worker: int, run: int, ticket: int, memfd: Memfd | None, *, keep: bool = False) -> None:
        """Open a ticket: the worker is to answer for it in this run, and may write into `memfd` if there is one.
        `keep`: its host may keep the batches, and send them later."""
        self._open[ticket, run] = _Open(worker, memfd, keep)

    def keep(self, ticket: int, run: int) -> None:
        """Note that the host keeps the batches that it has made for the ticket in this run.

        Raises:
            ProtocolError: the host may not keep them.
        """
        if not self._open[ticket, run].keep:
            raise ProtocolError(f"it keeps what belongs to ticket {ticket}, and was not to")
        self._kept.setdefault(ticket, self._open[ticket, run].memfd)

    def release(self, ticket: int) -> None:
        """Note that nobody needs the batches that the host keeps for the ticket. They may be on their way
        nevertheless."""
        if ticket in self._kept:
            self._kept[ticket] = None

    def kept_no_longer(self, ticket: int) -> bool:
        """Note that the host now keeps nothing for the ticket. Return whether it has sent all batches to the slot.

        Raises:
            ProtocolError: it kept nothing.
        """
        if ticket not in self._kept:
            raise ProtocolError(f"it kept nothing for ticket {ticket}")
        return self._kept.pop(ticket) is not None

    def check(self, worker: int, run: int, ticket: int, *, batches: int) -> None:
        """Check that the worker is to answer for this ticket in this run, and may have made `batches` batches.

        Raises:
            ProtocolError: it is not, or may not.
        """
        if self._find(worker, run, ticket).memfd is None and batches:
            raise ProtocolError(f"worker {worker} has made batches for ticket {ticket}, and has no slot for it")

    def needs_room(self, worker: int, run: int, ticket: int) -> None:
        """Note that the batch does not fit into the slot. The worker answers later.

        Raises:
            ProtocolError: the worker is not to answer for this ticket, or has no slot for it.
        """
        if self._find(worker, run, ticket).memfd is None:
            raise ProtocolError(f"worker {worker} needs more room for ticket {ticket}, and has no slot for it")
        self._open[ticket, run] = _Open(worker, None, keep=False)

    def slot(self, worker: int, run: int, ticket: int) -> Memfd | None:
        """Return the memory into which the worker may write in this run; None if it may write nowhere, or nobody needs
        the batches that its host has kept.

        Raises:
            ProtocolError: the worker is not to answer for this ticket.
        """
        if ticket in self._kept:
            return self._kept[ticket]
        return self._find(worker, run, ticket).memfd

    def is_released(self, ticket: int) -> bool:
        """Return whether nobody needs the batches that the host has kept for the ticket."""
        return ticket in self._kept and self._kept[ticket] is None

    def answered(self, worker: int, run: int, ticket: int) -> None:
        """Note that the worker has answered for the ticket in this run.

        Raises:
            ProtocolError: the worker was not to answer for it.
        """
        self._find(worker, run, ticket)
        del self._open[ticket, run]
        self._forget_if_over(run)

    def begin_run(self, run: int, worker: int) -> None:
        """Note that the worker opens a run."""
        self._runs[run] = worker

    def is_of(self, run: int, worker: int) -> bool:
        """Return whether the worker has this run, and may still send messages about it."""
        return self._runs.get(run) == worker

    def drop_run(self, run: int) -> None:
        """Note that the run is dropped. It still answers for its open tickets."""
        self._dropped.add(run)
        self._forget_if_over(run)

    def run_failed(self, run: int) -> None:
        """Note that the run has failed, and will not answer for its tickets."""
        for ticket, of in [key for key in self._open if key[1] == run]:
            del self._open[ticket, of]
        self._runs.pop(run)
        self._dropped.discard(run)

    def worker_ended(self, worker: int) -> None:
        """Forget the runs and open tickets of a worker whose process has ended."""
        for key in [key for key, one in self._open.items() if one.worker == worker]:
            del self._open[key]
        for run in [run for run, of in self._runs.items() if of == worker]:
            del self._runs[run]
            self._dropped.discard(run)

    def clear(self) -> None:
        """Forget everything: the host is gone, and nothing more may be written for it."""
        self._open.clear()
        self._kept.clear()
        self._runs.clear()
        self._dropped.clear()

    def _forget_if_over(self, run: int) -> None:
        if run in self._dropped and not any(other == run for _, other in self._open):
            self._dropped.discard(run)
            self._runs.pop(run, None)

    def _find(self, worker: int, run: int, ticket: int) -> _Open:
        found = self._open.get((ticket, run))
        if found is None or found.worker != worker:
            raise ProtocolError(f"worker {worker} has nothing to say about ticket {ticket} and run {run}")
        return found
