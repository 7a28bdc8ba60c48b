"""What each worker did in the last minutes, from looks several times a second while somebody looks at the page.

A look compares the sums on a worker's activity page with those of the look before. So the shares of the time between
two looks are exact, however short the calls of user code are. Which split was read is that of the moment of the look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from ..activity import Activity, Spent
from ..host.worker_handle import WorkerHandle

MOST_WORKERS = 64
"""Workers that are looked at: those with the smallest numbers."""

_MOST_LOOKS = 600

RUNS, IMPORTS, STARTS, GIVEN_UP = range(4)
"""What a worker's process does: it serves, it imports the user's modules, there was none, or none will come."""

Cell: TypeAlias = tuple[int, int, int, int, str]
"""One worker in the time between two looks: its number, what its process does, in thousandths the time in the generator
and that in collating, and what it read."""


class Timeline:
    """See the file's head.

    Args:
        feed_of: as in `Watched`.
    """

    def __init__(self, feed_of: Callable[[int], str]) -> None:
        self._feed_of = feed_of
        self._looks: deque[tuple[float, list[Cell]]] = deque(maxlen=_MOST_LOOKS)
        self._count = 0
        self._before: dict[int, tuple[int | None, Spent | None]] = {}

    def look(self, at: float, workers: Iterable[WorkerHandle]) -> None:
        """Look at all workers at second `at` of the daemon."""
        found: list[Cell] = []
        seen: dict[int, tuple[int | None, Spent | None]] = {}
        for worker in sorted(workers, key=lambda worker: worker.number)[:MOST_WORKERS]:
            activity, spent = worker.look(), worker.time_spent()
            pid, before = self._before.get(worker.number, (worker.pid, None))
            seen[worker.number] = worker.pid, spent
            state, generating, collating = _state(worker, activity), 0, 0
            if pid != worker.pid:
                state = STARTS  # perhaps it has started already, but the last process ended in this time
            elif before is not None and spent is not None:
                generating, collating = shares(before, spent)
            doing = self._text(activity) if generating or collating or state == IMPORTS else ""
            found.append((worker.number, state, generating, collating, doing))
        self._before = seen
        self._looks.append((at, found))
        self._count += 1

    def forget(self) -> None:
        """Nobody looks any longer."""
        self._looks.clear()
        self._before.clear()

    def since(self, count: int) -> dict[str, Any]:
        """Return the looks after the first `count` ones that were ever made, as JSON types.

        `looks` has for each its time and its cells, in which a number stands for one of the `texts`.
        """
        texts: dict[str, int] = {}
        looks = list(self._looks)[max(0, len(self._looks) - max(0, self._count - count)) :]
        return {
            "count": self._count,
            "looks": [
                [round(at, 3), [[*cell[:4], texts.setdefault(cell[4], len(texts))] for cell in cells]]
                for at, cells in looks
            ],
            "texts": list(texts),
        }

    def _text(self, activity: Activity | None) -> str:
        if activity is None:
            return ""
        feed = self._feed_of(activity.run)
        return f"{feed}: {activity.split}" if feed else activity.split


def shares(before: Spent, now: Spent) -> tuple[int, int]:
    """Return how much of the time between was in the generator and in collating, in thousandths."""
    seconds = now.seconds - before.seconds
    if seconds <= 0:
        return 0, 0
    idle = min(1.0, max(0.0, (now.idle_seconds - before.idle_seconds) / seconds))
    generating = min(1 - idle, max(0.0, (now.user_seconds - before.user_seconds) / seconds))
    return round(1000 * generating), round(1000 * (1 - idle - generating))


def _state(worker: WorkerHandle, activity: Activity | None) -> int:
    if worker.given_up:
        return GIVEN_UP
    if worker.ready:
        return RUNS
    return IMPORTS if activity is not None and activity.importing else STARTS
