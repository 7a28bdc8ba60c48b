"""A daemon's statuses of the last seconds give rates, the shares of workers, and a verdict on each stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from penstock_proto.messages import Machine, TimeSpent
from penstock_proto.status.feed_status import Feed, FeedWaits, Sent
from penstock_proto.status.host_status import Host
from penstock_proto.status.span import LEAST
from penstock_proto.status.status_history import WINDOW, History
from penstock_proto.status.status_shape import Memory, Status
from penstock_proto.status.stream_status import Production, Stream, Waits
from penstock_proto.status.worker_status import Shares, Worker
from tests.fakes.statuses import of

NONE = dict.fromkeys(
    ("production", "ranks", "sending", "holding_up", "listing", "interrupted", "without_lane", "ahead"), 0.0
)


def status(
    seconds: float, batches: int, *, waits: dict[str, float] | None = None, hosts: Sequence[Host] = (), **more: Any
) -> Status:
    """Return a status of a daemon with one feed, one worker that is always in user code, and one consumer that always
    reads.

    `waits` are shares of the time. `more` are further figures of the consumer.
    """
    counted = {name: seconds * share for name, share in {**NONE, **(waits or {})}.items()}
    feed = of(
        Feed,
        name="train",
        url="tcp://127.0.0.1:5555/train",
        spec="(uint8[4], int64[])",
        batch_size=2,
        lanes=16,
        order="exact",
        turn=1,
        stripe=1,
        splits=64,
        consumers=1,
        made=batches,
        sent=Sent(batches=batches, samples=2 * batches, bytes=1_000_000 * batches),
        waits=of(FeedWaits, production=counted["production"]),
    )
    stream = {
        "stream": 1,
        "feed": "train",
        "client": "host:1",
        "transport": "local",
        "reading": True,
        "handed": batches,
        "production": Production(slots=3, used=1),
        "waits": Waits(reading=seconds, **counted),
    }
    return of(
        Status,
        seconds=seconds,
        cpus=8,
        machine=of(Machine, count=8, idle_seconds=7 * seconds, free_seconds=7 * seconds),
        memory=of(Memory, allowed=100, reserved=10),
        feeds=[feed],
        workers=[
            of(
                Worker,
                pid=70,
                makes_batches=True,
                ready=True,
                spent=of(TimeSpent, seconds=seconds, user_seconds=seconds),
            )
        ],
        hosts=[*hosts],
        streams=[of(Stream, **{**stream, **more})],
    )


def described(seconds: int = 12, **more: Any) -> Stream:
    """Return the description of the stream after `seconds` seconds."""
    history = History()
    for second in range(1, seconds):
        history.add(status(second, second, **more))
    (stream,) = history.described(status(seconds, seconds, **more)).streams
    return stream


def test_rates_and_shares_are_averages_of_the_window() -> None:
    history = History()
    for second in range(30):
        history.add(status(second, 5 * second if second < 20 else 100 + 20 * (second - 20)))
    found = history.described(status(29.5, 290))
    assert found.window_seconds == pytest.approx(WINDOW + 0.5)
    (feed,), (worker,) = found.feeds, found.workers
    assert asdict(feed.rates) == pytest.approx({"batches": 18.571, "samples": 37.143, "bytes": 18571428.571}, rel=1e-3)
    assert worker.shares == Shares(generating=1.0, collating=0.0, cpu_wait=0.0, idle=0.0, cpu=0.0)


def host(name: str, received: int, fetched: int, awaited: float) -> Host:
    figures = {"received_bytes": received, "fetched_bytes": fetched, "awaited_seconds": awaited}
    return of(Host, name=name, address="10.0.0.2", cpus=4, **figures)


def test_a_host_has_a_rate_and_its_share_of_the_waiting() -> None:
    history = History()
    for second in range(5):
        hosts = [host("a", 3_000_000 * second, 1_000_000 * second, 0.1 * second), host("b", 7_000_000, 0, 9.0)]
        history.add(status(second, second, waits={"production": 0.4}, hosts=hosts))
    last = [host("a", 20_000_000, 4_000_000, 0.9), host("b", 5_000, 0, 0.5), host("c", 0, 10_000_000, 0.0)]
    a, b, c = history.described(status(5, 5, waits={"production": 0.4}, hosts=last)).hosts
    assert (a.rates.bytes, a.awaited) == (4_800_000.0, 0.45)
    assert (b.rates.bytes, b.awaited) == (1_000.0, 0.25), "the host has joined again"
    assert (c.rates.bytes, c.awaited) == (2_000_000.0, 0.0)


def test_a_host_has_no_share_if_nobody_waits() -> None:
    history = History()
    history.add(status(0, 0, hosts=[host("a", 0, 0, 0.0)]))
    (only,) = history.described(status(5, 5, waits={"production": 0.09}, hosts=[host("a", 0, 0, 0.1)])).hosts
    assert only.awaited is None


@pytest.mark.parametrize(
    ("waits", "more", "waiting", "limit", "headline"),
    [
        ({}, {}, 0.0, "consumer", "the trainer is the bottleneck, and the loader has little to spare"),
        (
            {"production": 0.31},
            {},
            0.31,
            "generator",
            "the trainer waits 31 % of the time: workers are busy 100 %, add",
        ),
        ({"production": 0.31}, {}, 0.31, "generator", "add workers (1 -> 2)"),
        (
            {"production": 0.1, "sending": 0.5},
            {"transport": "tcp"},
            0.6,
            "transport",
            "the trainer waits 60 % of the time: the network, which carries 1 MB/s",
        ),
        ({"holding_up": 0.9}, {"rank": 1}, 0.0, "consumer", "other ranks wait for it 90 % of the time"),
    ],
)
def test_the_verdict_follows_from_what_the_consumer_waited_for(
    waits: dict[str, float], more: dict[str, Any], waiting: float, limit: str, headline: str
) -> None:
    stream = described(waits=waits, **more)
    assert stream.waiting == pytest.approx(waiting)
    assert stream.limit == limit
    assert headline in stream.headline
    assert stream.verdict


def test_a_rank_that_waits_for_another_learns_for_which() -> None:
    history = History()
    for second in range(1, 8):
        state = status(second, second, waits={"production": 0.1, "ranks": 0.8}, rank=0)
        (first,), (slow,) = state.streams, status(second, second, waits={"holding_up": 0.8}, rank=2).streams
        elsewhere = status(second, second, waits={"holding_up": 0.9}, rank=3, group="another job").streams
        state = replace(state, streams=[first, slow, replace(first, rank=1), *elsewhere])
        history.add(state)
    waiting, slow, other, _ = history.described(state).streams
    assert (waiting.limit, slow.limit, other.limit) == ("ranks", "consumer", "ranks")
    assert waiting.headline == "the trainer waits 90 % of the time: rank 2 is slower, and all ranks go on together"
    assert slow.headline == "the trainer is the bottleneck: other ranks wait for it 80 % of the time"


def is_judged(stream: Stream) -> bool:
    return (stream.waiting, stream.limit, stream.headline, stream.verdict) != (None, "", "", "")


def test_there_is_no_verdict_before_there_is_enough_to_judge_and_none_between_epochs() -> None:
    history = History()
    for state in (status(5, 0), status(5 + LEAST / 2, 1)):
        (stream,) = history.described(state).streams
        assert not is_judged(stream)
        history.add(state)
    assert not is_judged(described(reading=False))
    assert is_judged(described())


def test_time_in_which_the_consumer_was_not_there_does_not_count() -> None:
    history = History()
    for second in range(1, 9):
        spent = of(TimeSpent, seconds=second, user_seconds=max(0, second - 5), idle_seconds=min(5, second))
        waits = of(Waits, reading=second - 5, production=second - 5)
        state = status(second, second)
        (worker,), (stream,) = state.workers, state.streams
        streams = [replace(stream, waits=waits)] if second > 5 else []
        state = replace(state, workers=[replace(worker, spent=spent)], streams=streams)
        history.add(state)
    (stream,) = history.described(state).streams
    assert stream.limit == "generator", "the worker was idle only before"


def test_two_streams_of_one_process_are_two_consumers() -> None:
    history = History()
    for second in range(1, 6):
        state = status(second, second, waits={"production": 1.0})
        (other,) = status(second, second, stream=2).streams
        (member,) = status(second, second, waits={"production": 0.5}).streams  # of a group
        state = replace(state, streams=[*state.streams, other, member])
        history.add(state)
    assert [stream.waiting for stream in history.described(state).streams] == pytest.approx([1.0, 0.0, 0.5])
