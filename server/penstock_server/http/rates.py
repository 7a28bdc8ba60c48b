"""How fast each feed was, and how often its consumers had a batch ready, since the daemon was started. No I/O.

Each second of the last 15 minutes and each minute of the last day is kept, in some 100 KB for each feed. That is cheap
enough to do at all times, so a user who opens the page sees the history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock_proto.status.status_history import WINDOW

_COLUMNS = ("batches", "samples", "bytes", "ready")


@dataclass(frozen=True, slots=True)
class FeedLook:
    """A feed at one moment.

    Attributes:
        batches, samples, nbytes: amounts sent so far.
        reading: seconds in which consumers have read epochs so far, all consumers together.
        waiting: the part of these seconds in which a consumer had nothing to take.
    """

    batches: int
    samples: int
    nbytes: int
    reading: float
    waiting: float


Looks: TypeAlias = Mapping[str, FeedLook]
"""All feeds, by name."""


class Rates:
    """The history of each feed's rates. `look` is called at least once a second."""

    def __init__(self) -> None:
        self._seconds = _Track(1, 900)
        self._minutes = _Track(60, 1440)

    def look(self, at: float, feeds: Looks) -> None:
        """Note what the feeds have sent by second `at` of the daemon."""
        self._seconds.look(at, feeds)
        self._minutes.look(at, feeds)

    def since(self, seconds: int, minutes: int) -> dict[str, Any]:
        """Return the per-second points after the first `seconds` ones, and the per-minute points after the first
        `minutes` ones, as JSON types.

        Each of the two has the `count` of points so far, when each point was taken (`at`, in seconds of the daemon),
        and for each feed batches, samples and bytes a second, and the share of the time in which consumers had
        something to take. A point is the average of the last `WINDOW` seconds, or of its minute: many batches are sent
        at once, as one slab, so a single second has all or nothing. A figure that does not exist is None.
        """
        return {"seconds": self._seconds.since(seconds), "minutes": self._minutes.since(minutes)}


class _Track:
    """A point each `every` seconds; the last `most` are kept."""

    def __init__(self, every: int, most: int) -> None:
        self._every = every
        self._most = most
        self._count = 0
        self._times = np.zeros(most)
        self._rows: dict[str, npt.NDArray[np.float64]] = {}
        self._looks: dict[str, deque[tuple[float, FeedLook]]] = {}
        self._before: float | None = None

    def look(self, at: float, feeds: Looks) -> None:
        for name, feed in feeds.items():
            if name not in self._rows:
                self._rows[name] = np.full((self._most, len(_COLUMNS)), np.nan)
                self._looks[name] = deque()
            looks = self._looks[name]
            looks.append((at, feed))
            while at - looks[0][0] > max(self._every, WINDOW):
                looks.popleft()
        if self._before is None:
            self._before = at
        elif at - self._before > self._every - 0.5:
            self._add(at, feeds)
            self._before = at

    def _add(self, at: float, feeds: Looks) -> None:
        place = self._count % self._most
        self._count += 1
        self._times[place] = at
        for name, rows in self._rows.items():
            rows[place] = np.nan
            (then, first), (now, last) = self._looks[name][0], self._looks[name][-1]
            if name in feeds and now > then:
                for column, key in enumerate(("batches", "samples", "nbytes")):
                    rows[place, column] = (getattr(last, key) - getattr(first, key)) / (now - then)
            if last.reading > first.reading:
                rows[place, 3] = 1 - (last.waiting - first.waiting) / (last.reading - first.reading)

    def since(self, count: int) -> dict[str, Any]:
        first = max(0, self._count - self._most, min(count, self._count))
        places = np.arange(first, self._count) % self._most
        return {
            "count": self._count,
            "at": [round(at, 2) for at in self._times[places].tolist()],
            "feeds": {
                name: {key: _short(rows[places, column]) for column, key in enumerate(_COLUMNS)}
                for name, rows in self._rows.items()
            },
        }


def _short(values: npt.NDArray[np.float64]) -> list[float | None]:
    """Return the numbers with four digits; None for NaN, which JSON does not have."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.floor(np.log10(np.abs(values))) - 3
        exponents[~np.isfinite(exponents)] = 0  # of 0 and NaN
    above, below = 10.0 ** np.maximum(exponents, 0), 10.0 ** np.maximum(-exponents, 0)  # both are whole, so exact
    return [None if value != value else value for value in (np.round(values / above * below) / below * above).tolist()]
