"""When each batch was handed over, and why not earlier: for whoever measures how long training steps wait.

TensorFlow takes batches ahead, so a wait of its thread is not a wait of the trainer. But the trainer counts the batches
that it has consumed, and this file when each of them was handed over. A step that asks for a batch has waited if that
batch was handed over after it asked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MOST = 20_000
"""Slabs that are remembered until a step has consumed them. Nobody takes so many ahead."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """A slab that was handed over. Times are monotonic.

    Attributes:
        end: how many batches were handed over with it and before it.
        began: when its first byte came.
        whole: when all of it was there.
        handed: when it was handed over.
    """

    end: int
    began: float
    whole: float
    handed: float


class HandOvers:
    """The hand-overs of one stream that no step has consumed yet.

    One thread calls `begins`, `ends` and `handed`, and another one `take`.

    Attributes:
        total: batches that were handed over.
        overflowed: whether more is handed over than is consumed.
    """

    def __init__(self) -> None:
        self.total = 0
        self.overflowed = False
        self._log: deque[HandOver] = deque()
        self._restarts: deque[int] = deque()
        self._consumed = 0
        self._within = True  # perhaps: Keras may have taken a batch before, to build the model

    # --- the thread that hands over ---

    def begins(self) -> None:
        """An epoch begins. If the one before was left, batches that were taken ahead will not be consumed."""
        if self._within:
            self._restarts.append(self.total)
        self._within = True

    def ends(self) -> None:
        """The epoch has ended: all of it was handed over, and will be consumed."""
        self._within = False

    def handed(self, batches: int, began: float, whole: float, now: float) -> None:
        """A slab of so many batches is handed over."""
        self.total += batches
        if len(self._log) < MOST:
            self._log.append(HandOver(self.total, began, whole, now))
        else:
            self.overflowed = True

    # --- the trainer ---

    def take(self, batches: int) -> list[HandOver]:
        """Consume the next batches. Return the hand-over of each; fewer, if fewer were handed over."""
        while self._restarts:
            self._consumed = max(self._consumed, self._restarts.popleft())
        found: list[HandOver] = []
        while self._log and len(found) < batches:
            one = self._log[0]
            while self._consumed < one.end and len(found) < batches:
                found.append(one)
                self._consumed += 1
            if self._consumed >= one.end:
                self._log.popleft()
        return found
