"""Reads samples of a feed as a worker does, place by place, and records them.

Samples pass the same checks as in a worker. They are not shuffled, so a sample's place and its number there identify
it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from penstock_proto import GeneratorError

from ...worker.isolation.randomness import GlobalRandomness
from ...worker.reading.loaded_feed import LoadedFeed
from ...worker_state.activity import ActivityPage
from .places import BatchPlaces, SplitPlaces
from .recording import Recorder, Recording
from .transformed_places import TransformedPlaces

_QUICK = 0.05
"""Seconds: if a read takes longer, the next one reads fewer rows; otherwise more."""


class Reader:
    """Reads places, and records their samples.

    Args:
        feed: the feed; its spec must be known.
        splits: its list of splits, or a range of segments; ignored for an indexable feed.
        recorder: records the samples.
        on_samples: called with the number of samples so far, after each read.
        on_skip: called with a place's text, its number of samples and the error, if user code raised and the feed has
            on_error="skip", or if a part of a zipped feed has fewer samples there than another.

    Attributes:
        seconds, cpu_seconds: how long all reads took, and their CPU time.
        whole: whether the reading came to its end before the time was up.
        place: the place that was read last.
        empty: names of the splits for which the generator has yielded no sample.
    """

    def __init__(
        self,
        feed: LoadedFeed,
        splits: Any,
        randomness: GlobalRandomness,
        page: ActivityPage,
        recorder: Recorder,
        on_samples: Callable[[int], None],
        on_skip: Callable[[str, int, GeneratorError], None],
    ) -> None:
        self._feed = feed
        self._recorder = recorder
        self._on_samples = on_samples
        self._on_skip = on_skip
        self._places: SplitPlaces | TransformedPlaces | BatchPlaces
        self._lanes: int
        self._indexable = feed.plan.length is not None
        if self._indexable:
            self._places, self._lanes = BatchPlaces(feed, randomness, page), 1
        else:
            plain = SplitPlaces(feed, splits, randomness, page, self._uneven)
            self._places = TransformedPlaces(feed, plain, randomness, page) if feed.has_lane_batches else plain
            self._lanes = min(feed.plan.lanes, len(splits))
        self._store = self._places.store()
        self._step = self._places.rows if self._places.in_batches else 1
        self._count = 0
        self.seconds = self.cpu_seconds = 0.0
        self.whole = False
        self.place = 0
        self.empty: list[str] = []
        self._told: set[int] = set()
        """The places that were skipped."""

    @property
    def recording(self) -> Recording:
        """The recording of the samples so far."""
        return self._recorder.recording

    @property
    def undivided_seconds(self) -> float:
        """How long a generator has run that cannot be divided. Each lane runs all of it."""
        return self._places.undivided_seconds

    @property
    def generator(self) -> Any:
        """The user's generator that was read last, or None."""
        return None if isinstance(self._places, BatchPlaces) else self._places.generator(self.place)

    def close(self) -> None:
        """Close the generators, since they may have started processes."""
        for place in self.recording.names:
            self._places.close(place)

    def in_lanes(self, seconds: float) -> None:
        """Read as one worker does: a batch of each lane in turn, for about `seconds`.

        Raises:
            PenstockError: user code failed, or yielded a sample that cannot be served.
        """
        until = time.monotonic() + seconds
        batch = self._feed.plan.batch_size or 1
        turns = [self._lane(range(lane, len(self._places), self._lanes), batch) for lane in range(self._lanes)]
        while turns:
            for turn in list(turns):
                for went_on in turn:
                    if time.monotonic() >= until:
                        return
                    if went_on:
                        break
                else:
                    turns.remove(turn)
        self.whole = True

    def backwards(self, other: Recording, seconds: float) -> None:
        """Read the samples of `other` again, one lane after another, the last lane first, for at most `seconds`.

        Raises:
            PenstockError: as `in_lanes`.
        """
        until = time.monotonic() + seconds
        places = sorted(other.digests, key=lambda place: (-(place % self._lanes), place))
        if self._indexable:
            places.reverse()
        for place in places:
            count = other.count(place)
            if not self._exactly(place, count, place in other.ended, until):
                return
        self.whole = True

    def alone(self, place: int, count: int | None, seconds: float) -> None:
        """Read the first `count` samples of a place (None: all), for at most `seconds`.

        Raises:
            PenstockError: as `in_lanes`.
        """
        self.whole = self._exactly(place, sys.maxsize if count is None else count, False, time.monotonic() + seconds)

    def _exactly(self, place: int, count: int, to_the_end: bool, until: float) -> bool:
        """Read `count` samples of a place and, if `to_the_end`, one more, to see whether the place ends there.

        Return False if the time was up before that.
        """
        left = count
        while left > 0 or to_the_end:
            if time.monotonic() >= until:
                return False
            asked = self._asked(left) or 1
            read = self._read(place, asked)
            if read < asked or self._indexable:
                break
            left -= read
            if left < 0:
                break  # the place goes on where it ended in the other run
        self._places.close(place)
        return True

    def _lane(self, places: range, batch: int) -> Iterator[bool]:
        """Read a lane. After each read, yield whether it completed a batch."""
        left = batch
        for place in places:
            while True:
                asked = self._asked(left)
                read = self._read(place, asked)
                left -= read
                if left <= 0:
                    left = batch
                    yield True
                else:
                    yield False
                if read < asked or self._indexable:
                    break
            self._places.close(place)

    def _asked(self, left: int) -> int:
        """Return how many rows to read at once, if `left` more are wanted."""
        return self._step if self._places.in_batches else min(left, self._step)

    def _read(self, place: int, rows: int) -> int:
        recording = self.recording
        self.place = place
        if place not in recording.names:
            recording.names[place] = self._places.show(place)
            recording.digests[place] = bytearray()
        began, cpu = time.monotonic(), time.process_time()
        error: GeneratorError | None = None
        try:
            read = self._places.read(place, self._store, rows)
        except GeneratorError as raised:
            failed_in_transform = isinstance(self._places, TransformedPlaces) and self._places.raised is not None
            if self._feed.plan.on_error != "skip" or failed_in_transform:
                raise
            error = raised
            read = self._read_before(place, recording)
        spent = time.monotonic() - began
        self.seconds += spent
        self.cpu_seconds += time.process_time() - cpu
        if read < rows or self._indexable:
            recording.ended.add(place)
        if not self._places.in_batches:
            self._step = min(self._places.rows, 2 * self._step) if spent < _QUICK else max(1, self._step // 2)
        self._recorder.add(place, self._store, read)
        self._count += read
        self._on_samples(self._count)
        if error is not None:
            self._told.add(place)
            self._on_skip(recording.names[place], recording.count(place), error)
        if not recording.count(place) and place not in self._told and self._places.is_empty(place):
            self.empty.append(recording.names[place])
        return read

    def _uneven(self, place: int, samples: int, why: str) -> None:
        self._told.add(place)
        self._on_skip(self._places.show(place), samples, GeneratorError(why))

    def _read_before(self, place: int, recording: Recording) -> int:
        """Return how many rows the read put into the store before user code raised."""
        assert not isinstance(self._places, BatchPlaces)
        return self._places.taken(place) - recording.count(place) if self._places.taken(place) else 0
