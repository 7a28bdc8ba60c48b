"""Records when each batch was handed over, and why not earlier. The measurement of step waits reads it.

TensorFlow takes batches ahead, so a wait of its thread is not a wait of the trainer. But the trainer counts the batches
that it has consumed, and this file records when each of them was handed over. A step has waited if its batch was handed
over after the step asked for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MOST = 20_000
"""The most slabs to remember until a step has consumed them. Nobody takes this many ahead."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """A slab that was handed over. Times are monotonic.

    Attributes:
        end: how many batches were handed over before it, plus its own.
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

    One thread calls the methods that begin with `on_`, and another one `take`.

    Attributes:
        total: batches that were handed over.
        direct: whether steps take the batches themselves. A batch then counts as handed over as soon as all of it was
            there, because nothing takes it before a step asks.
        overflowed: whether slabs went unrecorded, because far more are handed over than consumed.
    """

    def __init__(self, direct: bool = False) -> None:
        self.total = 0
        self.direct = direct
        self.overflowed = False
        self._log: deque[HandOver] = deque()
        self._restarts: deque[int] = deque()
        self._consumed = 0
        self._within = True  # perhaps: Keras may have taken a batch before, to build the model

    # --- the thread that hands over ---

    def on_epoch_begun(self) -> None:
        """Note that an epoch begins. If the one before was left, the batches taken ahead will not be consumed."""
        if self._within:
            self._restarts.append(self.total)
        self._within = True

    def on_epoch_ended(self) -> None:
        """Note that the epoch has ended: all of it was handed over, and will be consumed."""
        self._within = False

    def on_handed(self, batches: int, began: float, whole: float, now: float) -> None:
        """Record that a slab of `batches` batches was handed over."""
        self.total += batches
        if len(self._log) < MOST:
            self._log.append(HandOver(self.total, began, whole, whole if self.direct else now))
        else:
            self.overflowed = True

    # --- the trainer ---

    def take(self, batches: int) -> list[HandOver]:
        """Consume the next `batches` batches. Return the hand-over of each, or fewer if fewer were handed over."""
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
