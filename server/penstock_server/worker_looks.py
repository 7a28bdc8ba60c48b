"""What workers did between two looks, from the sums on their activity pages.

So the shares of the time between two looks are exact, however short the calls of user code are. Which split was read is
that of the moment of the look. The daemon looks at its own workers, and a host that has joined at those that it has.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock_proto.messages import WorkerActivity

from .activity import Activity, Spent
from .host.worker_handle import WorkerHandle

EVERY = 0.2
"""Seconds between two looks, while somebody wants to see them."""

RUNS, IMPORTS, STARTS, GIVEN_UP = range(4)
"""What a worker's process does: it serves, it imports the user's modules, there was none, or none will come."""


class WorkerLooks:
    """Looks at workers again and again."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int | None, Spent | None]] = {}

    def look(self, workers: Iterable[WorkerHandle]) -> list[WorkerActivity]:
        """Look at these workers, and return what each did since the look before."""
        found: list[WorkerActivity] = []
        seen: dict[int, tuple[int | None, Spent | None]] = {}
        for worker in workers:
            activity, spent = worker.look(), worker.time_spent()
            pid, before = self._before.get(worker.number, (worker.pid, None))
            seen[worker.number] = worker.pid, spent
            state, generating, collating = _state(worker, activity), 0, 0
            if pid != worker.pid:
                state = STARTS  # perhaps it has started already, but the last process ended in this time
            elif before is not None and spent is not None:
                generating, collating = shares(before, spent)
            run, what = -1, ""
            if activity is not None and (generating or collating or state == IMPORTS):
                run, what = min(max(-1, activity.run), 2**62), activity.split  # user code may write to the page
            found.append(WorkerActivity(worker.number, state, generating, collating, run, what))
        self._before = seen
        return found

    def forget(self) -> None:
        """Nobody wants to see them any longer."""
        self._before.clear()


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
