"""How long a client waits for a daemon whose feeds are being started."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock_proto.status import readiness
from penstock_proto.status.readiness import NO_PROGRESS, Patience
from penstock_proto.status.status_shape import Failing, Status
from tests.fakes.statuses import of
from tests.simulation.clock import Clock

STARTING = of(Status, phase="importing scenes.py:feed (12 s)")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(readiness, "time", clock)
    return clock


def test_a_wait_lasts_as_long_as_the_daemon_makes_progress(clock: Clock) -> None:
    heard: list[float] = []
    patience = Patience(NO_PROGRESS, lambda: heard.append(clock.now))
    for _ in range(1000):
        clock.now += 29
        assert patience.left
        patience.heard(STARTING)
    assert len(heard) == 1000
    clock.now += NO_PROGRESS - 1
    assert patience.left == 1
    clock.now += 1
    assert not patience.left
    assert patience.seconds == patience.lasted == 29_030


@pytest.mark.parametrize(
    "state",
    [
        replace(STARTING, failing=[Failing(feed="train", times=3, error="the disk is away")]),
        replace(STARTING, draining=True),
        replace(STARTING, ready=True, phase=""),
    ],
)
def test_no_progress_is_made_by_a_feed_that_failed_a_daemon_that_stops_and_one_that_is_ready(
    clock: Clock, state: Status
) -> None:
    patience = Patience(NO_PROGRESS, lambda: pytest.fail("this is no progress"))
    clock.now += 20
    patience.heard(state)
    assert patience.left == NO_PROGRESS - 20
    assert patience.state is state


def test_a_time_that_was_given_is_a_deadline(clock: Clock) -> None:
    patience = Patience(5)
    clock.now += 4
    patience.heard(STARTING)
    assert patience.left == 1
    assert patience.fixed
