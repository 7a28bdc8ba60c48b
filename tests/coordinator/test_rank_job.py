"""A job of ranks alone, over a window: whom it tells of what."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from penstock_proto.messages import LaneEnded
from penstock_server.coordinator.delivery.rank_job import RankJob
from penstock_server.coordinator.delivery.window import Entry, EpochEnd, Window
from penstock_server.coordinator.model.leases import Leases


class Rank(SimpleNamespace):
    """A rank that reads epoch 0, and was told everything before batch `told` of it."""

    def __init__(self, rank: int, told: int) -> None:
        super().__init__(rank=rank, number=rank, told=(0, told), reading=True, epoch=0, begun=0, gone=False)
        self.slabs, self.ends, self.under_way = 0, 0, 0

    def leave(self) -> None:
        self.reading, self.epoch = False, 1


def test_a_rank_hears_of_the_end_of_a_lane_at_the_place_after_batches_that_were_passed_over() -> None:
    """A stream that begins after batch 4 passes over the first 4, and has no round before the end of the epoch."""
    said: list[tuple[int, str]] = []

    def tell(message: Any, ranks: list[Any]) -> None:
        said.extend((rank.number, type(message).__name__) for rank in ranks)

    window = Window(Leases(itertools.count(1), 4096, lambda command: None))
    outlet: Any = SimpleNamespace(tell=tell, feed=SimpleNamespace(name="feed", info=SimpleNamespace(room=1)))
    ranks: list[Any] = [Rank(rank, told) for rank, told in enumerate((4, 5))]
    job = RankJob(outlet, window, ranks, pad=False, position=None, in_lanes=False)
    job.at = window.end
    window.append(Entry(0, 4, LaneEnded(0, 0, 1, 4, 0, b"")))
    window.append(Entry(0, 4, EpochEnd(4, 4)))
    assert job.catch_up() is None
    assert said == [(0, "LaneEnded"), (0, "End"), (1, "End")], "rank 1 has heard of the lane before"
