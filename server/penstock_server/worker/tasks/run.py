"""Runs: the daemon's requests to make one lane of one epoch, or batches of one epoch of an indexable feed.

Opening a run reads only the restart record.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_proto import ProtocolError
from penstock_proto import messages as m

from ...feed.options.plan_sizes import blocks_fill_slots, segment_count
from ...worker_state.activity import ActivityPage
from ..batch.shares import stretch_of_share
from ..isolation.randomness import GlobalRandomness
from ..lane.lane import LaneRun
from ..lane.mixed_lane import Component, MixedLane, live_lanes
from ..reading.first_sample import Probe
from ..reading.first_split import SLOW
from ..reading.indexed import IndexRun
from ..reading.lane_batches import LaneBatches
from ..reading.loaded_feed import LoadedFeed
from ..reading.opening import RunSplits
from ..reading.split_list import SharedSplits, SplitSequence
from ..reading.transforming import transform_of
from ..verification.spot_checks import SpotChecks
from .mixed_feed import lists_of_parts


@dataclass(eq=False)
class Run:
    """A run that the daemon has opened.

    Attributes:
        number: the daemon's number of the run.
        feed: the feed that it reads.
        epoch: from 0.
        lane: number of the lane, 0 for an indexable feed.
        batches: makes the batches.
        transforms: transforms the batches of a lane, if the feed has a `batch_transform` and no pools.
        careful: each batch before this one is reported at once.
        read_again: whether it was read again only for its leftover.
        closed: whether it was dropped or has failed, so that it makes no more batches.
        waiting: the ticket whose batch needs a larger slot; None if there is none.
        held: that batch: a store, and how many of the store's rows it has.
        seconds: how long its finished steps took.
        began: when its present step began, in monotonic seconds.
        sources: its splits, those of each feed of a mix.
        starts: when its first step may be taken, in monotonic seconds.
    """

    number: int
    feed: LoadedFeed
    epoch: int
    lane: int
    batches: LaneRun | IndexRun
    transforms: LaneBatches | None = None
    careful: int = 0
    read_again: bool = False
    closed: bool = False
    waiting: int | None = None
    held: tuple[Any, int] | None = None
    seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)
    sources: Sequence[RunSplits] = ()
    starts: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether no step can be taken now."""
        return self.waiting is not None or (self.starts > 0 and self.starts > time.monotonic())

    @property
    def replay_ms(self) -> int:
        """About how many milliseconds another worker would take to get to the end of the last full batch."""
        again, read = self.batches.read_again, self.batches.samples_read
        helped = self.batches.helped_seconds if isinstance(self.batches, LaneRun) else 0.0
        return math.ceil(1000 * (self.worked + helped) * again / max(1, again, read))

    @property
    def worked(self) -> float:
        """How many seconds its steps took, with the present one."""
        return self.seconds + time.monotonic() - self.began

    def close(self) -> None:
        """End the generators, and release the waiting batch."""
        self.closed = True
        self.waiting = None
        self.held = None
        self.batches.close()
        for source in self.sources:
            source.close()


class RunOpener:
    """Opens runs.

    Args:
        worker: the worker's number, for errors; None without worker processes.
        lists: the lists of splits that the daemon has sent, by number.
        randomness: the random numbers of this process.
        page: the activity page, on which calls of user code are announced.
        send: sends a message to the daemon.
        spots: the samples that other workers make again.
    """

    def __init__(
        self,
        worker: int | None,
        lists: Mapping[int, SharedSplits],
        randomness: GlobalRandomness,
        page: ActivityPage,
        send: Callable[[m.SplitSkipped], None],
        spots: SpotChecks,
    ) -> None:
        self._worker = worker
        self._lists = lists
        self._randomness = randomness
        self._page = page
        self._send = send
        self._spots = spots

    def open(self, message: m.StartRun, feed: LoadedFeed) -> Run:
        """Open the run that `message` requests.

        Raises:
            ProtocolError: its restart record or its list of splits is not of this feed.
        """
        if message.spec is not None:
            feed.learn(message.spec, message.sample_spec)
        batches: LaneRun | IndexRun
        transforms = None
        sources: Sequence[RunSplits] = ()
        if feed.plan.length is not None:
            batches = IndexRun(
                feed.plan,
                feed.items,
                epoch=message.epoch,
                collate=feed.collate,
                randomness=self._randomness,
                page=self._page,
                run=message.run,
                transform=transform_of(feed.declared, feed.plan.seed, self._randomness),
                batches=Probe(feed, self._randomness, self._page, message.run).batches(),
                weights=feed.declared.weights,
                spot_of=self._spots.of_run(message),
            )
        else:
            batches, sources = self._lane(message, feed)
            if feed.has_lane_batches and not feed.has_pools:
                transforms = LaneBatches(feed, self._randomness, self._page, message.run)
        careful = message.careful
        if feed.first is not None and feed.first.seconds > SLOW and not message.record and not message.ahead:
            careful = max(careful, 1)  # so the lane's first batch does not wait for the next slow sample
        run = Run(message.run, feed, message.epoch, message.lane, batches, transforms, batches.index + careful)
        run.sources = sources
        return run

    def _lane(self, message: m.StartRun, feed: LoadedFeed) -> tuple[LaneRun, Sequence[RunSplits]]:
        """Return a lane, and the splits of each of its feeds."""
        segmented = feed.plan.segment is not None and not feed.parts
        splits = range(segment_count(feed.plan)) if segmented else self._lists.get(message.splits)
        if splits is None:
            raise ProtocolError(f"a run uses list of splits {message.splits}, which was not sent to this worker")
        if isinstance(splits, SharedSplits) and feed.parts:
            return self._mixed_lane(message, feed, splits)
        source = self._splits_of(message, feed, feed, splits)
        lane = LaneRun(
            feed.plan,
            epoch=message.epoch,
            lane=message.lane,
            n_splits=len(splits),
            collate=feed.sample_collate,
            open_split=source.open,
            record=message.record,
            ahead=message.ahead,
            skip=message.skip,
            on_skip=source.on_skip,
            in_slots=_in_slots(feed, min(feed.plan.lanes, len(splits))),
        )
        if lane.first_open is not None:
            source.expect(*lane.first_open)
        return lane, [source]

    def _mixed_lane(
        self, message: m.StartRun, feed: LoadedFeed, splits: SharedSplits
    ) -> tuple[MixedLane, Sequence[RunSplits]]:
        mixed, components, sources = feed.mixed, [], []
        for (label, part), listed in zip(feed.parts.items(), lists_of_parts(feed, splits), strict=True):
            source = self._splits_of(message, feed, part, listed)
            weight = mixed.weights[label]
            sources.append(source)
            components.append(Component(part.plan, weight, len(listed), source.open, source.on_skip))
        lane = MixedLane(
            feed.plan,
            components,
            stop_first=mixed.stop == "first",
            epoch=message.epoch,
            lane=message.lane,
            collate=feed.collate,
            record=message.record,
            ahead=message.ahead,
            skip=message.skip,
            in_slots=_in_slots(feed, live_lanes(feed.plan, [component.n_splits for component in components])),
        )
        return lane, sources

    def _splits_of(self, message: m.StartRun, feed: LoadedFeed, part: LoadedFeed, splits: SplitSequence) -> RunSplits:
        """Return the splits of `part`, which is a component of `feed`, or `feed` itself."""
        if message.epoch or message.record:  # nobody begins the first epoch now, or others do
            part.first_split.drop()
        return RunSplits(
            part,
            splits,
            message.epoch,
            self._worker,
            self._randomness,
            self._page,
            message.run,
            self._send,
            self._spots.of_run(message, part.component),
            stretch=1 if feed.parts else stretch_of_share(feed.plan, feed.layout),
            drops=feed.drops,
        )


def _in_slots(feed: LoadedFeed, lanes: int) -> bool:
    return feed.spec is not None and blocks_fill_slots(feed.plan, feed.spec, lanes, feed.sample_spec)
