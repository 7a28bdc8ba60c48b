"""The daemon's looks at its consumers: what each waits for, and what workers do meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_server.status.waits import Looks, Waits

MIB = 1 << 20


def nobody(worker: int, seconds: float) -> None:
    raise AssertionError("no worker was awaited")


def no_split(worker: int) -> None:
    return None


@dataclass
class View:
    """What a look sees of a stream."""

    awaited_worker: int | None = 7
    slow: Sequence[Any] = ()
    listing: bool = False
    interrupted: bool = False
    at_work: set[int] = field(default_factory=lambda: {7})
    lanes: set[int] = field(default_factory=lambda: {7, 8})

    def holding_up(self, consumer: Any) -> Sequence[Any]:
        return self.slow

    def with_work(self, workers: Collection[int]) -> int:
        return len(self.lanes.intersection(workers))


def looking(view: View, *others: View, split: str | None = "a.h5") -> tuple[Looks, Any, list[tuple[int, float]]]:
    """Return looks at one consumer, which reads the stream of `view`; the consumer; and the workers awaited."""
    consumer = SimpleNamespace(number=1, reading=True, under_way=0)
    streams = {number: SimpleNamespace(view=one) for number, one in enumerate((view, *others))}
    workers = SimpleNamespace(numbers=[7, 8, 9, 10], makers=[7, 8, 9, 10], away={10}, leaving=set())
    coordinator = SimpleNamespace(
        consumers={1: consumer}, stream_read_by=lambda _: streams[0], streams=streams, workers=workers
    )
    link = SimpleNamespace(under_way=[], unsent_bytes=0)
    table = SimpleNamespace(by_consumer={1: SimpleNamespace(feed="train", link=link, fetching={})})
    awaited: list[tuple[int, float]] = []
    looks = Looks(
        coordinator,  # type: ignore[arg-type]
        table,  # type: ignore[arg-type]
        lambda _: 0,
        lambda *told: awaited.append(told),
        lambda _: split,
    )
    return looks, consumer, awaited


def test_a_feeds_waits_go_on_when_its_consumers_are_gone() -> None:
    looks, consumer, awaited = looking(View(at_work={7, 8, 9}))
    looks.look(1.0)
    assert awaited == [(7, 1.0)]
    consumer.under_way = 1
    looks.look(2.0)
    assert looks.of(1) == Waits(reading=3.0, production=1.0)
    assert (looks.of_feed("train").reading, looks.of_feed("train").production) == (3.0, 1.0)
    assert awaited == [(7, 1.0)], "nobody waited"
    looks._table.by_consumer.clear()
    looks.look(1.0)
    assert (looks.of(1), looks.of_feed("train").waited) == (Waits(), 1.0)


@pytest.mark.parametrize(
    ("view", "others", "waits"),
    [
        (View(), [], {"ahead": 1.0, "without_lane": 1.0}),  # of workers 7, 8 and 9, 8 is ahead and 9 has no lane
        (View(lanes={7, 8, 9}), [], {"ahead": 2.0}),
        (View(at_work={7, 8}), [], {"without_lane": 1.0}),
        (View(), [View(at_work={8, 9})], {}),  # they work for another stream
        (View(interrupted=True, awaited_worker=None, at_work={7, 8, 9}), [], {"interrupted": 3.0}),
        (View(listing=True, awaited_worker=None, at_work=set()), [], {"listing": 3.0}),
    ],
)
def test_a_wait_for_production_is_counted_by_what_workers_do_meanwhile(
    view: View, others: list[View], waits: dict[str, float]
) -> None:
    looks, _, _ = looking(view, *others)
    looks.look(3.0)
    assert asdict(looks.of(1)) == pytest.approx(asdict(Waits(reading=3.0, production=3.0, **waits)))


def test_the_split_is_known_at_which_a_worker_was_awaited_most() -> None:
    looks, _, _ = looking(View())
    told = iter([*"aabab", *"c" * 30])
    looks._split_of = lambda _: next(told)
    for _ in range(5):
        looks.look(0.1)
    assert looks.of_worker(7) == pytest.approx(0.5)
    assert looks.awaited_at(7) == "a"
    for _ in range(30):
        looks.look(0.1)
    assert looks.awaited_at(7) == "c"
    assert (looks.of_worker(8), looks.awaited_at(8)) == (0.0, None)


@pytest.mark.parametrize(("unsent", "waits"), [(15 * MIB, 0.0), (16 * MIB, 1.0), (33 * MIB, 1.0), (0, 0.0)])
def test_a_slow_consumer_does_not_wait_for_the_network_while_it_has_batches_to_take(unsent: int, waits: float) -> None:
    """32 slabs of 1 MiB are under way. Up to 16 MiB of them may lie in buffers."""
    consumer = SimpleNamespace(number=1, reading=True, under_way=32)
    link = SimpleNamespace(under_way=[MIB] * 32, unsent_bytes=unsent)
    session = SimpleNamespace(feed="train", link=link, fetching={})
    table = SimpleNamespace(by_consumer={1: session})
    coordinator = SimpleNamespace(consumers={1: consumer}, workers=SimpleNamespace(numbers=[]))
    looks = Looks(coordinator, table, lambda _: 0, nobody, no_split)  # type: ignore[arg-type]
    looks.look(1.0)
    assert looks.of(1) == Waits(reading=1.0, sending=waits)


@pytest.mark.parametrize(("unfetched", "waits"), [((0, 0), 0.0), ((3 * MIB, 0), 1.0), ((0, 3 * MIB), 1.0)])
def test_a_consumer_that_fetches_waits_for_the_connections_to_hosts_too(
    unfetched: tuple[int, int], waits: float
) -> None:
    consumer = SimpleNamespace(number=1, reading=True, under_way=4)
    fetching = {n: (SimpleNamespace(nbytes=MIB), None, 7 + n % 2) for n in range(4)}
    link = SimpleNamespace(under_way=[], unsent_bytes=0)
    session = SimpleNamespace(feed="train", link=link, fetching=fetching)
    table = SimpleNamespace(by_consumer={1: session})
    looks = Looks(
        SimpleNamespace(consumers={1: consumer}, workers=SimpleNamespace(numbers=[])),  # type: ignore[arg-type]
        table,  # type: ignore[arg-type]
        dict(zip((7, 8), unfetched, strict=True)).__getitem__,
        nobody,
        no_split,
    )
    looks.look(1.0)
    assert looks.of(1) == Waits(reading=1.0, sending=waits)
