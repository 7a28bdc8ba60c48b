"""Keeps a split open whose first sample took long, for the lane that reads it.

A worker makes a feed's first sample before anybody reads the feed, to learn the spec. If a lane of this process then
begins to read the same split, it goes on with the same generator, behind the sample that exists already. Any other lane
reads the split from its start. A generator yields the same samples whenever it runs, so the stream is the same.

This file knows nothing of lanes or messages, and runs user code only to end it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .open_split import OpenSplit

SLOW = 0.25
"""Seconds that a first sample must take for its split to stay open. Quick samples are made twice."""

KEEP_SECONDS = 60.0
"""Seconds after which the split is read from its start instead, as a connection that the generator holds may break when
it is not used."""


@dataclass(frozen=True)
class _Kept:
    key: tuple[bytes, int, int]
    split: OpenSplit
    sample: Any
    until: float


class FirstSplit:
    """The kept split of one feed, or none.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: _Kept | None = None
        self._report: Callable[[int, str], None] = _nobody

    def report(self, number: int, index: int, samples: int, why: str) -> None:
        """Pass on that zipped generators of the split yield different numbers of samples, once a lane reads it."""
        self._report(samples, why)

    def keep(self, split: Any, index: int, epoch: int, opened: OpenSplit, sample: Any, seconds: float) -> bool:
        """Keep an open split, if its first sample took long. Return whether it is kept, and will be closed here.

        Args:
            split: the split, as it was opened.
            index: its index in the list.
            epoch: from 0.
            opened: the open split, of which only the first sample was taken.
            sample: that sample, after transforms.
            seconds: how long it took, from the opening on.
        """
        self.drop()
        if seconds <= SLOW or any(opened.source_place[1:]):  # transforms dropped samples, or made several of one
            return False
        self._kept = _Kept(_key(split, index, epoch), opened, sample, self._clock() + KEEP_SECONDS)
        return True

    def take(
        self, split: Any, index: int, epoch: int, report: Callable[[int, str], None]
    ) -> tuple[OpenSplit, Any] | None:
        """Return the kept split and its first sample if this is the one that is asked for. It is the caller's then.

        `report` is called if its zipped generators turn out to yield different numbers of samples.
        """
        if self._kept is None:
            return None
        if self.left == 0:
            self.drop()
            return None
        if self._kept.key != _key(split, index, epoch):
            return None
        kept, self._kept, self._report = self._kept, None, report
        return kept.split, kept.sample

    @property
    def left(self) -> float | None:
        """Seconds until the kept split is too old; None if there is none."""
        return None if self._kept is None else max(0.0, self._kept.until - self._clock())

    def drop(self) -> None:
        """End the generator of the kept split, if there is one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.split.close()


def _key(split: Any, index: int, epoch: int) -> tuple[bytes, int, int]:
    return pickle.dumps(split), index, epoch


def _nobody(samples: int, why: str) -> None:
    pass
