"""Opens the splits of a feed for a run, by their numbers in the lane, and reports skipped splits."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from penstock_proto import FeedError, GeneratorError
from penstock_proto import messages as m

from ...feed.combined.own_object import with_own_object
from ...feed.objects.indexables import is_indexable
from ...worker_state.activity import ActivityPage
from ..isolation.randomness import GlobalRandomness
from ..verification.spot_checks import SAMPLES, SpotOf
from .loaded_feed import LoadedFeed
from .open_split import OpenSplit
from .split_list import SplitSequence
from .split_opener import SplitOpener
from .transforming import TransformFailed

_ONLY_THE_SAMPLE = "; a transform that returns penstock.DROP instead leaves out only that sample"


def opener_of(
    feed: LoadedFeed,
    randomness: GlobalRandomness,
    page: ActivityPage,
    run: int,
    *,
    stretch: int = 1,
    drops: Callable[[Any], bool] | None = None,
    fills_cache: bool = False,
    on_uneven: Callable[[int, int, int, str], None] = lambda *_: None,
    shared: bool = False,
    beside: bool = False,
) -> SplitOpener:
    """Return an opener for the splits of a feed, or of a component of a mix; see `SplitOpener`. `shared`: it goes on
    with the feed's `first_split`, and reads its `passes`. `beside`: its generators may run beside those of a stream."""
    return SplitOpener(
        with_own_object(feed.declared) if beside else feed.declared,
        feed.plan,
        randomness,
        page,
        run,
        stretch=stretch,
        drops=drops,
        cache=feed.cache,
        fills_cache=fills_cache,
        on_uneven=on_uneven,
        taken_over=feed.first_split.take if shared else lambda *_: None,
        passes=feed.passes if shared else None,
        component=feed.component,
        also=feed.also,
        items=feed.items if is_indexable(feed.declared.generate) else None,
    )


class RunSplits:
    """The splits of a list, for one run.

    Args:
        feed: the feed, or the component of a mix.
        splits: the list, or the numbers of segments.
        epoch: from 0.
        worker: the worker's number, for errors; None without worker processes.
        randomness: the random numbers of this process.
        page: the activity page, on which calls of user code are announced.
        run: the daemon's number of the run.
        send: sends a message to the daemon.
        spot_of: returns a spot for a split that was opened, or None; see `SpotChecks.of_run`.
        stretch, drops: as in `SplitOpener`.
    """

    def __init__(
        self,
        feed: LoadedFeed,
        splits: SplitSequence,
        epoch: int,
        worker: int | None,
        randomness: GlobalRandomness,
        page: ActivityPage,
        run: int,
        send: Callable[[m.SplitSkipped], None],
        spot_of: SpotOf,
        *,
        stretch: int = 1,
        drops: Callable[[Any], bool] | None = None,
    ) -> None:
        self._feed = feed
        self._splits = splits
        self._epoch = epoch
        self._worker = worker
        self._page = page
        self._run = run
        self._send = send
        self._spot_of = spot_of
        self._opener = opener_of(
            feed,
            randomness,
            page,
            run,
            stretch=stretch,
            drops=drops,
            fills_cache=True,
            on_uneven=self._on_uneven,
            shared=True,
        )

    def expect(self, index: int, first: int) -> None:
        """Say that the split with this index in the list will be opened, and that its samples from number `first` on
        are needed."""
        if not isinstance(self._splits, range):
            self._opener.expect(self._splits[index], self._epoch, first)

    @property
    def begins_pass(self) -> bool:
        """Whether the generator will start for several lanes that need samples from its beginning."""
        return self._opener.begins_pass

    def close(self) -> None:
        """Say that no split will be opened any more."""
        self._opener.close()

    def open(self, number: int, index: int) -> OpenSplit:
        """Start to read the split with this number within the lane and this index in the list.

        Raises:
            FeedError: it cannot be unpickled.
            GeneratorError: the user's code raised, or a file has changed since it was listed.
        """
        began = time.monotonic()
        split = self._item(number, index)
        check = None
        if not isinstance(self._splits, range) and self._splits.versions.versions:
            check = partial(self._opener.check_files, split, self._splits.versions)
            check()
        opened = self._opener.open(split, index, self._epoch, number)
        if check is not None:
            opened.on_end = check
        seconds = time.monotonic() - began + opened.seconds_to(SAMPLES - 1)
        spot = None if opened.held else self._spot_of(index, seconds)
        if spot is not None:
            opened.check(spot)
        return opened

    def on_skip(self, number: int, index: int, samples: int, error: GeneratorError | None) -> None:
        """Report that a split is skipped after `samples` samples."""
        report = None
        if error is not None:
            error.feed, error.worker = self._feed.plan.name, self._worker
            report = m.ErrorReport.of(error)
            if isinstance(error.__cause__, TransformFailed):
                report = msgspec.structs.replace(report, message=f"{report.message}{_ONLY_THE_SAMPLE}")
        try:
            text = self._opener.show(self._item(number, index))
        except FeedError:  # it cannot be unpickled
            text = f"item {index} of the list of splits"
        self._send(m.SplitSkipped(run=self._run, number=number, split=text[:1024], samples=samples, error=report))

    def _on_uneven(self, number: int, index: int, samples: int, why: str) -> None:
        self.on_skip(number, index, samples, GeneratorError(why))

    def _item(self, number: int, index: int) -> Any:
        if isinstance(self._splits, range):
            return index
        self._page.enter(self._run, number, f"item {index} of the list of splits")
        try:
            return self._splits[index]
        finally:
            self._page.leave()
