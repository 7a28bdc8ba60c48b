"""Decides which samples another worker makes again, and notes their digests while this worker makes them.

A *spot* is the first samples of a split, or of a batch of an indexable feed. The other worker needs about as much time
for a spot as this one did. So a worker checks spots for about 1 % of the time in which it makes batches, spread over
that time, and a few spots of each stream at once. This file does not know how samples are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeAlias

from penstock_proto import messages as m

from ..batch.sample_spec import digests_of

SHARE = 0.01
"""The share of a worker's time that checks may take."""

FIRST = 4
"""Spots of each stream that a worker has checked before it has saved time for them."""

FIRST_SECONDS = 0.2
"""Seconds that one of these first spots may take."""

OVERHEAD = 0.002
"""Seconds that a spot takes besides its samples: messages, and opening the split once more."""

MOST_SECONDS = 0.1
"""A spot ends with the sample at which it has taken this many seconds."""

MOST_SAVED = 60.0
"""Seconds that can be saved for later checks, at most."""

SAMPLES = 16
"""Samples of a spot."""

MOST_DIGESTS = 8 * m.MAX_SHAPES
"""Bytes of a spot's digests, at most."""


class Spot:
    """The first samples of a split or batch, while they are made.

    Args:
        over: called when the spot is complete, or was given up.
        seconds: the time that it took to start the generator.

    Attributes:
        samples: how many samples it has.
        digests: the digests of their leaves.
        ended: whether the split has no more samples.
        seconds: how long a check takes: the other worker makes the samples, and both make digests.
        complete: whether it can be compared.
    """

    def __init__(self, over: Callable[[Spot], None], seconds: float = 0.0) -> None:
        self.samples = 0
        self.digests = b""
        self.ended = False
        self.seconds = OVERHEAD + seconds
        self.complete = False
        self._over: Callable[[Spot], None] | None = over

    def of(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield `samples`, and note the first ones."""
        return chain(self._noting(samples), samples)

    @property
    def over(self) -> bool:
        """Whether it needs no more samples."""
        return self._over is None

    def close(self) -> None:
        """Complete the spot with the samples that it has: no more will come."""
        over, self._over = self._over, None
        if over is not None:
            self.complete = self.samples > 0 or self.ended
            over(self)

    def give_up(self) -> None:
        """End the spot without a comparison."""
        over, self._over = self._over, None
        if over is not None:
            over(self)

    def _noting(self, samples: Iterator[Any]) -> Iterator[Any]:
        while self._over is not None:
            began = time.monotonic()
            try:
                sample = next(samples)
            except StopIteration:
                self.ended = True
                self.close()
                return
            except BaseException:
                self.give_up()
                raise
            made = time.monotonic()
            try:
                digests = digests_of(sample)
            except BaseException:  # it does not fit the spec, or its __array__ raises: collating it tells
                self.give_up()
                yield sample
                return
            self.samples += 1
            self.digests += digests
            self.seconds += 2 * (time.monotonic() - made) + made - began
            full = self.samples >= SAMPLES or len(self.digests) + len(digests) > MOST_DIGESTS
            if full or self.seconds > MOST_SECONDS:
                self.close()
            yield sample


SpotOf: TypeAlias = Callable[[int, float], Spot | None]
"""Returns a spot for the samples that are about to be made, or None if they are not checked. Called with the index of
the split or batch, and the seconds that it took to start the generator."""


class SpotChecks:
    """The spots of one worker. `send` sends a spot to the daemon, which has another worker make it again."""

    def __init__(self, send: Callable[[m.SpotCheck], None]) -> None:
        self._send = send
        self._saved = 0.0
        """Seconds that checks may take now; negative if the first spots took more than was saved."""
        self._needed = 0.0
        """Seconds that the last spot needed which was too expensive."""
        self._first = 0
        self._stream = -1
        self._open = False

    def on_work_done(self, seconds: float) -> None:
        """Note that this worker has made batches for `seconds`."""
        self._saved = min(MOST_SAVED, self._saved + SHARE * seconds)

    def of_run(self, run: m.StartRun, part: str | None = None) -> SpotOf:
        """Return a function that returns spots of a run, or of that part of the run if its feed is a mix."""
        return lambda index, seconds: self._spot(run, part or "", index, seconds)

    def _spot(self, run: m.StartRun, part: str, index: int, seconds: float) -> Spot | None:
        stream = run.run // m.IDS_PER_STREAM
        if stream > self._stream:
            self._stream, self._first = stream, FIRST
        if self._open or not (self._first or self._saved > self._needed):
            return None
        self._open = True
        return Spot(lambda spot: self._over(run, part, index, spot), seconds)

    def _over(self, run: m.StartRun, part: str, index: int, spot: Spot) -> None:
        self._open = False
        if not spot.complete or not spot.samples:
            return
        first, self._first = self._first > 0, max(0, self._first - 1)
        if spot.seconds > max(self._saved, FIRST_SECONDS if first else 0.0):
            self._needed = spot.seconds
            return
        self._saved -= spot.seconds
        self._needed = 0.0
        self._send(
            m.SpotCheck(
                run=run.run,
                feed=run.feed,
                splits=run.splits,
                epoch=run.epoch,
                index=index,
                samples=spot.samples,
                digests=spot.digests,
                ended=spot.ended,
                first=first,
                part=part,
            )
        )
