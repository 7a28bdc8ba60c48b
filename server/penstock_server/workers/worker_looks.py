"""Finds out what workers did between two looks, from the sums on their activity pages.

So the shares of time between two looks are exact, however short the calls of user code are. The split is that of the
moment of the look. The daemon looks at its own workers, and a joined host at its workers.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock_proto.messages import WorkerActivity

from ..worker_state.activity import Activity, Spent
from .worker_handle import WorkerHandle

EVERY = 0.2
"""Seconds between two looks, while somebody watches."""

RUNS, IMPORTS, STARTS, GIVEN_UP = range(4)
"""States of a worker's process: it serves, it imports the user's modules, there is no process yet, or there will be
none."""


class WorkerLooks:
    """Looks at workers repeatedly."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int | None, Spent | None]] = {}

    def look(self, workers: Iterable[WorkerHandle]) -> list[WorkerActivity]:
        """Look at these workers, and return what each has done since the previous look."""
        found: list[WorkerActivity] = []
        seen: dict[int, tuple[int | None, Spent | None]] = {}
        for worker in workers:
            activity, spent = worker.look(), worker.time_spent()
            pid, before = self._before.get(worker.number, (worker.pid, None))
            seen[worker.number] = worker.pid, spent
            state, generating, collating = _state(worker, activity), 0, 0
            if pid != worker.pid:
                state = STARTS  # the previous process ended in this time, even if the next one runs already
            elif before is not None and spent is not None:
                generating, collating = shares(before, spent)
            run, what = -1, ""
            if activity is not None and (generating or collating or state == IMPORTS):
                run, what = min(max(-1, activity.run), 2**62), activity.split  # user code may write to the page
            found.append(WorkerActivity(worker.number, state, generating, collating, run, what))
        self._before = seen
        return found

    def forget(self) -> None:
        """Forget the previous look, because nobody watches any longer."""
        self._before.clear()


def shares(before: Spent, now: Spent) -> tuple[int, int]:
    """Return the shares of the time from `before` to `now` in the generator and in collating, in thousandths."""
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
