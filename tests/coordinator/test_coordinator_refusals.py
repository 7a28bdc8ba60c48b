"""A refused request leaves nothing behind: no stream, no memory, no setting, no changed state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock_proto import PenstockError, ProtocolError, StateMismatch
from penstock_proto.batches.position import EndedLane, Place, Position
from penstock_proto.messages import Had
from penstock_server.coordinator.model.open_request import OpenRequest
from tests.simulation.simulation import SimFeed, World

ASK = OpenRequest(4, 1 << 40, 0)


INFO = SimFeed().info()
REFUSED = {
    "a rank that does not exist": replace(ASK, rank=2, world_size=2),
    "more ranks than there is memory for": replace(ASK, rank=0, world_size=50_000),
    "lane": replace(ASK, position=Position(INFO, 0, places=(Place(4, 1, b""),))),
    "lane that has ended": replace(ASK, position=Position(INFO, 0, ended=(EndedLane(4, 1, 0),))),
    "position of another feed": replace(ASK, position=Position(replace(SimFeed(), lanes=3).info(), 0)),
    "batches that a group's consumer had": replace(ASK, group="g", had=(Had(0, 0, 0, 2**16),)),
    "a group that is not there": replace(ASK, group="g", again=True),
}


@pytest.mark.parametrize("ask", REFUSED.values(), ids=REFUSED)
def test_who_is_refused_leaves_nothing_behind(ask: OpenRequest) -> None:
    world = World(SimFeed(), memory=1 << 20)
    for _ in range(2):
        with pytest.raises(PenstockError):
            world.ask("train", ask)
        assert not world.take()
        assert not world.coordinator.streams
        assert not world.coordinator._admission.waiting
        assert world.coordinator.budget.nbytes_reserved == 0


@pytest.mark.parametrize(
    ("feed", "place"),
    [
        (SimFeed(dynamic=True), {"places": (Place(4, 1, b""),)}),
        (SimFeed(dynamic=True), {"ended": (EndedLane(4, 1, 0),)}),
        (SimFeed(samples=36), {"batches": 10, "rows": 40}),
        (SimFeed(samples=36, dynamic=True), {"batches": 8, "rows": 32, "skip": 2}),
        (SimFeed(dynamic=True), {"batches": 2, "rows": 8, "merged": 3}),
    ],
)
def test_a_position_beyond_what_the_feed_has_is_refused_before_its_splits_are_listed(
    feed: SimFeed, place: dict[str, Any]
) -> None:
    world = World(feed)
    with pytest.raises(StateMismatch, match="the position was not made by this feed, or is damaged"):
        world.ask("train", replace(ASK, position=Position(feed.info(), 0, **place)))
    assert not world.take()
    assert not world.coordinator.streams


def test_a_job_has_its_own_settings_and_not_those_of_a_rank_that_was_refused_or_left() -> None:
    feed = SimFeed(splits=(9, 9, 9), lanes=3)
    world = World(feed, memory=40 * 4096)
    asks: dict[str, Any] = {"world_size": 2, "pad": True, "credit": 9, "quota": 8}
    with pytest.raises(ProtocolError):
        world.open(rank=5, **asks)
    gone = world.open(rank=0, **asks)
    assert world.coordinator.budget.nbytes_reserved > 0
    gone.vanish()
    world.run()
    assert not world.coordinator.streams
    ranks = [world.open(rank=rank, world_size=2, credit=2) for rank in range(2)]
    assert ranks[0].stream.share.credit == 2
    world.run()
    batches = list(feed.expected(0))
    assert len(batches) == 7
    assert [consumer.read[0] for consumer in ranks] == [batches[rank::2][:3] for rank in range(2)]
