"""What Keras reads to build a model, and is handed over again when it trains. Plain state, under the hand-off's lock.

An iteration that Keras makes only to learn the shapes of a batch (keras_calls.py) begins an epoch as usual. But its
batches do not count as handed over: the iteration gets copies of them, since TensorFlow may write to what it gets, and
the next iteration begins with the batches themselves, in the same epoch.
"""

from __future__ import annotations

import collections
import logging

from penstock_proto.messages import End

from .consumer_state import Received

MOST = 256 * 2**20
"""Most bytes of batches that are kept for the next iteration. Keras needs one or two batches, and TensorFlow may
prefetch others."""

logger = logging.getLogger("penstock")


class BuildReads:
    """What one iteration has read so that Keras could build a model.

    Attributes:
        kept: its slabs, and the End of the epoch if it came to that.
        nbytes: the bytes of these slabs.
        too_many: whether it read more than is kept, so nothing of it can be handed over again.
    """

    def __init__(self) -> None:
        self.kept: list[Received | End] = []
        self.nbytes = 0
        self.too_many = False

    def keep(self, item: Received | End) -> None:
        """Keep an item that is handed over."""
        if isinstance(item, Received):
            self.nbytes += item.slab.nbytes
        if self.too_many or (self.nbytes > MOST and len(self.kept) >= 2):
            self.too_many = True
            self.kept.clear()
        else:
            self.kept.append(item)


class Again:
    """The items that the current iteration is handed over again, before new ones.

    Attributes:
        reads: what the current iteration reads to build a model; None if it trains.
    """

    def __init__(self) -> None:
        self.reads: BuildReads | None = None
        self._queue: collections.deque[Received | End] = collections.deque()

    @property
    def batches(self) -> int:
        """How many batches were taken from the stream and do not count as handed over yet."""
        kept = [] if self.reads is None else self.reads.kept
        return sum(item.slab.batches for item in [*kept, *self._queue] if isinstance(item, Received))

    def begin(self, reads: BuildReads | None, url: str) -> bool:
        """Begin an iteration. Return whether it begins with what the one before has read to build a model."""
        before, self.reads = self.reads, reads
        if before is not None and before.too_many:
            logger.warning(
                "%s: to build the model Keras has read more than %d MB ahead, so the rest of this epoch is skipped. "
                "Build the model first (an Input layer, or model.build), or prefetch less",
                url,
                MOST // 2**20,
            )
        if before is None or not before.kept:
            self._queue.clear()
            return False
        self._queue.extendleft(reversed(before.kept))
        return True

    def next(self) -> Received | End | None:
        """Return the next item to hand over again, or None if there is none."""
        return self._queue.popleft() if self._queue else None

    def go_on(self, reads: BuildReads) -> bool:
        """Let the iteration that read `reads` train, because it is still read after the model was built. Return whether
        it is the newest iteration."""
        if self.reads is not reads:
            return False
        self.reads = None
        return True

    def clear(self) -> None:
        """Drop all items: the stream was closed."""
        self.reads = None
        self._queue.clear()
