"""Which workers there are: who can be given work, and who shall leave."""

from __future__ import annotations


class Workers:
    """The workers by number.

    A worker that died is away until the process in its place is ready; it gets work only where there is nobody else. A
    worker that leaves gets no new work.
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
        """Those that can be given work, by number: none that leaves or is away, unless all others are."""
        return self._available

    def pick(self, place: int) -> int:
        """Who gets work number `place`: neighbours get different workers."""
        return self._available[place % len(self._available)]

    def add(self, number: int) -> None:
        """There is one worker more; it is away until it is ready."""
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
        """The worker shall leave; another one must stay."""
        self.leaving.add(number)
        self._look()

    def all_stay(self) -> None:
        """Nobody leaves after all."""
        self.leaving.clear()
        self._look()

    def gone(self, number: int) -> None:
        """The worker is no more."""
        self.numbers.remove(number)
        self.away.discard(number)
        self.leaving.discard(number)
        self._look()

    def _look(self) -> None:
        staying = [number for number in self.numbers if number not in self.leaving]
        self._available = [number for number in staying if number not in self.away] or staying or self.numbers
