"""The activity of each worker in the last minutes, from looks several times a second while somebody has the page
open."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from penstock_proto.messages import WorkerActivity

KEPT = 120.0
"""Seconds of looks to keep; fewer if they have more than `_MOST_CELLS` cells, the number for 64 workers."""

_MOST_CELLS = 64 * 600

Cell: TypeAlias = tuple[int, int, int, int, str]
"""One worker in the time between two looks: its number, the state of its process, the time in the generator and in
collating (both in thousandths), and what it read."""


class Timeline:
    """The looks at each worker, packed for the page.

    Args:
        feed_of: as in `Watched`.
    """

    def __init__(self, feed_of: Callable[[int], str]) -> None:
        self._feed_of = feed_of
        self._looks: deque[tuple[float, list[Cell]]] = deque()
        self._cells = 0
        self._count = 0

    def add(self, at: float, workers: Iterable[WorkerActivity]) -> None:
        """Note what workers did up to second `at` of the daemon. The looks at one worker come in order of time; those
        at others may be earlier."""
        cells = [(one.worker, one.state, one.generating, one.collating, self._text(one)) for one in workers]
        self._looks.append((at, cells))
        self._count += 1
        self._cells += len(cells)
        while self._looks and (self._cells > _MOST_CELLS or self._looks[0][0] < at - KEPT):
            self._cells -= len(self._looks.popleft()[1])

    def forget(self) -> None:
        """Forget all looks: nobody has the page open any longer."""
        self._looks.clear()
        self._cells = 0

    def since(self, count: int) -> dict[str, Any]:
        """Return the looks after the first `count` ones that were ever made, as JSON types.

        `looks` has for each look its time and its cells, in which a number stands for one of the `texts`.
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

    def _text(self, one: WorkerActivity) -> str:
        feed = self._feed_of(one.run) if one.run >= 0 and one.what else ""
        return f"{feed}: {one.what}" if feed else one.what
