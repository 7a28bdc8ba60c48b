"""Which workers there are, which of them can be given work, and which are to leave.

The daemon's own workers run on its host. They have small numbers, which are used again. Workers of hosts that have
joined are *remote*: their numbers begin at REMOTE, and each is used once. Remote workers only make batches. Lists of
splits, first samples and rows of pools are for the daemon's own workers (`pick_local`).
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock_proto import WorkerDied

REMOTE = 1_000_000
"""The first number of a remote worker."""

VACANT = -1
"""Used instead of a worker's number: the vacant place of the next worker. Its work waits until a worker is ready."""

NOBODY = -2
"""Used instead of a worker's number by work that waits for its next attempt, and has no place meanwhile."""


class Workers:
    """The workers by number.

    A worker that died is away until the next process in its place is ready. Meanwhile it makes no batches. A worker
    that is to leave gets no new work, unless all others are away or leaving too. If no worker can make batches, VACANT
    gets the work.

    Args:
        count: how many workers the daemon has; they are numbered from 0.
        idle: whether these make no batches.

    Attributes:
        numbers: all workers.
        away: those whose next process is not ready yet.
        leaving: those that are to leave.
        standing: those that have been in one call of user code for long. They get no new work, unless all others are
            away, leaving or standing too.
        vacant: whether VACANT may have work.
        apart: the worker that makes only lanes which have ended a worker, so that no other lane waits when they do so
            again; None if there is none.
    """

    def __init__(self, count: int, idle: bool = False) -> None:
        self.numbers = list(range(count))
        self.away: set[int] = set()
        self.leaving: set[int] = set()
        self.standing: set[int] = set()
        self.vacant = False
        self._first: int | None = None
        self.apart: int | None = None
        self._idle = set(self.numbers) if idle else set()
        self._machines: dict[int, str] = {}
        self._update()

    @property
    def available(self) -> list[int]:
        """The workers that can be given batches to make: leaving ones only if all are leaving; [VACANT] if there are
        none."""
        return self._available

    @property
    def makers(self) -> list[int]:
        """All workers that make batches, even if they are away or leaving."""
        return [number for number in self.numbers if number not in self._idle]

    @property
    def own(self) -> list[int]:
        """The daemon's own workers."""
        return [number for number in self.numbers if number < REMOTE]

    @property
    def scaled(self) -> list[int]:
        """The workers that `scale` counts: the daemon's own that make batches, and are not to leave."""
        return [number for number in self.own if number not in self._idle and number not in self.leaving]

    @property
    def idle(self) -> set[int]:
        """The daemon's own workers that make no batches."""
        return self._idle

    def pick(self, place: int) -> int:
        """Return the worker that makes batches number `place`. Neighbouring places get different workers."""
        return self._prompt[(self._offset + place) % len(self._prompt)]

    def begin_with(self, number: int) -> None:
        """Let `pick` begin with this worker: it has the split open that comes first."""
        self._first = number
        self._update()

    def pick_local(self, place: int) -> int:
        """Return the daemon's own worker for work number `place`. One that is away does it when it is ready.

        Raises:
            WorkerDied: the daemon has no worker of its own.
        """
        if not self._local:
            raise WorkerDied("no worker process of the daemon is left, and none can start: see the daemon's log")
        return self._local[place % len(self._local)]

    @property
    def prompt_ones(self) -> list[int]:
        """The available workers that do not stand; all of them if all stand."""
        return self._prompt

    @property
    def local_stand(self) -> bool:
        """Whether all workers stand that `pick_local` picks from."""
        return self.standing.issuperset(self._local)

    def prompt(self, numbers: list[int]) -> list[int]:
        """Return those of these workers that do not stand; all of them if all stand."""
        return [number for number in numbers if number not in self.standing] or numbers if self.standing else numbers

    def machine_of(self, number: int) -> str:
        """Return the machine on which a worker runs; "": that of the daemon."""
        return self._machines.get(number, "")

    def add(self, number: int, machine: str = "") -> None:
        """Add a worker, which runs on this machine. It is away until it is ready."""
        self.numbers = sorted({*self.numbers, number})
        self._machines[number] = machine
        self.away.add(number)
        self._update()

    def on_ready(self, number: int) -> None:
        """Note that the worker can work."""
        self.away.discard(number)
        self._update()

    def on_stands(self, number: int) -> None:
        """Note that the worker has been in one call of user code for long."""
        self.standing.add(number)
        self._update()

    def on_goes_on(self, number: int) -> None:
        """Note that the worker does not stand any longer."""
        self.standing.discard(number)
        self._update()

    def on_died(self, number: int) -> None:
        """Note that the worker's process is gone."""
        self.away.add(number)
        self.standing.discard(number)
        self._update()

    def let_leave(self, numbers: Iterable[int]) -> None:
        """Note that these workers are to leave."""
        self.leaving.update(numbers)
        self._update()

    def set_apart(self, died: int) -> int | None:
        """Set a worker apart, unless one is that can be given work or has just died; if possible, one that stands. Take
        the one that has just died if only one other can be given work. One that is to leave is not set apart while
        others stay. Return the worker that has to hand over its lanes, or None."""
        there = self.apart in self.numbers and not self._apart_leaves
        if there and (self.apart == died or self.apart not in self.away):
            return None
        self.apart = None
        self._update()
        if len(self._available) > 1:
            self.apart = max(self._available, key=lambda number: (number in self.standing, number))
            self._update()
            return self.apart
        if self._available != [VACANT] and died in self.numbers and died not in self.leaving:
            self.apart = died
        return None

    def unset_apart(self) -> None:
        """Let all workers make all lanes again."""
        self.apart = None
        self._update()

    @property
    def _apart_leaves(self) -> bool:
        """Whether the worker that is set apart is to leave, and others stay."""
        return self.apart in self.leaving and not self.leaving.issuperset(self._available)

    def let_own_stay(self) -> None:
        """Let the daemon's own workers stay after all."""
        self.leaving.difference_update(self.own)
        self._update()

    def remove(self, *numbers: int) -> None:
        """Remove these workers."""
        self.numbers = [number for number in self.numbers if number not in numbers]
        for number in numbers:
            self._machines.pop(number, None)
        for those in (self.away, self.leaving, self.standing, self._idle):
            those.difference_update(numbers)
        if self.apart in numbers:
            self.apart = None
        self._update()

    def on_vacant_place_taken(self) -> None:
        """Note that VACANT has no work any longer."""
        self.vacant = False

    def _update(self) -> None:
        ready = [number for number in self.makers if number not in self.away]
        staying = [number for number in ready if number not in self.leaving]
        self._available = [number for number in staying if number != self.apart] or staying or ready or [VACANT]
        self._prompt = self.prompt(self._available)
        self._offset = self._prompt.index(self._first) if self._first in self._prompt else 0
        self.vacant = self.vacant or self._available == [VACANT]
        staying = [number for number in self.own if number not in self.leaving]
        there = [number for number in staying if number not in self.away]
        there = [number for number in there if number != self.apart] or there
        self._local = self.prompt(there) or staying or self.own
