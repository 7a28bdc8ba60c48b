"""Which workers there are, which of them can be given work, and which are to leave."""

from __future__ import annotations


class Workers:
    """The workers by number.

    A worker that died is away until the next process in its place is ready. It gets work only if all others are away or
    leaving too. A worker that is to leave gets no new work.
    """

    def __init__(self, count: int) -> None:
        self.numbers = list(range(count))
        self.away: set[int] = set()
        self.leaving: set[int] = set()
        self._available = list(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def available(self) -> list[int]:
        """The numbers of the workers that can be given work: none that leaves or is away, unless all do."""
        return self._available

    def pick(self, place: int) -> int:
        """Return the worker for work number `place`. Neighbouring places get different workers."""
        return self._available[place % len(self._available)]

    def add(self, number: int) -> None:
        """Add a worker. It is away until it is ready."""
        self.numbers = sorted({*self.numbers, number})
        self.away.add(number)
        self._look()

    def is_ready(self, number: int) -> None:
        """The worker can work."""
        self.away.discard(number)
        self._look()

    def died(self, number: int) -> None:
        """The worker's process is gone."""
        self.away.add(number)
        self._look()

    def leaves(self, number: int) -> None:
        """The worker is to leave. At least one other must stay."""
        self.leaving.add(number)
        self._look()

    def all_stay(self) -> None:
        """No worker leaves after all."""
        self.leaving.clear()
        self._look()

    def gone(self, number: int) -> None:
        """Remove the worker."""
        self.numbers.remove(number)
        self.away.discard(number)
        self.leaving.discard(number)
        self._look()

    def _look(self) -> None:
        staying = [number for number in self.numbers if number not in self.leaving]
        self._available = [number for number in staying if number not in self.away] or staying or self.numbers
