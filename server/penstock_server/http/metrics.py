"""Metrics for Prometheus, made from the daemon's status. No I/O, except where the format is chosen.

A figure whose declaration names a metric is one (penstock_proto/declarations.py). The code here adds those that are
made from several figures. Counters of a worker begin at 0 again when its process is replaced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from penstock_proto.declarations import Figure, figures
from penstock_proto.status.feed_status import Cache, Feed
from penstock_proto.status.host_status import Host
from penstock_proto.status.span import WAITS
from penstock_proto.status.status_shape import HostEngine, Status
from penstock_proto.status.worker_status import Worker

Labels: TypeAlias = tuple[str, ...]

_NAMED: dict[type[Struct] | None, str] = {Feed: "feed", Worker: "worker", Host: "host", HostEngine: "engine"}
"""The structs that have a name, and the label that shows it."""

_CONSUMER = ("feed", "stream", "consumer", "rank")


@dataclass(frozen=True, slots=True)
class Described:
    """A metric.

    Attributes:
        means: its help text.
        labels: the names of its labels.
        path: the figures on the way to its value; empty if it is made from several figures.
    """

    means: str
    labels: Labels
    path: tuple[Figure, ...] = ()


def _declared(
    kind: type[Struct], labels: Labels = (), path: tuple[Figure, ...] = ()
) -> Iterator[tuple[str, Described]]:
    """Yield the metrics that the figures of a struct declare."""
    for figure in figures(kind):
        if figure.metric:
            yield figure.metric, Described(figure.means, labels, (*path, figure))
        if figure.kind is not None and figure.kind is not Cache:  # a feed may have several caches
            label = (_NAMED[figure.kind],) if figure.kind in _NAMED else ()
            yield from _declared(figure.kind, (*labels, *label), (*path, figure))


_OF_STATUS = dict(_declared(Status))
_OF_CACHES = dict(_declared(Cache, ("feed", "part")))

METRICS: dict[str, Described] = {
    "penstock_daemon": Described("The daemon's version of the protocol.", ()),
    **_OF_STATUS,
    **_OF_CACHES,
    "penstock_feed_reading_seconds_total": Described(
        "Seconds in which consumers read epochs, all consumers together.", ("feed",)
    ),
    "penstock_feed_waiting_seconds_total": Described(
        "Seconds in which consumers that read had nothing to take, by cause.", ("feed", "cause")
    ),
    "penstock_consumer_reading_seconds_total": Described("Seconds in which the consumer read epochs.", _CONSUMER),
    "penstock_consumer_waiting_seconds_total": Described(
        "Seconds in which the consumer read and had nothing to take, by cause.", (*_CONSUMER, "cause")
    ),
    "penstock_consumer_holding_up_seconds_total": Described(
        "Seconds in which other ranks waited for the consumer.", _CONSUMER
    ),
    "penstock_workers": Described("Worker processes that should run.", ()),
    "penstock_worker_time_seconds_total": Described(
        "Where the worker's time went: generating (user code), collating, or idle.", ("worker", "state")
    ),
}
"""All metrics, by name. Counters end with `_total`."""


def render(status: Status, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics as text, and its content type: OpenMetrics if `accept` asks for it.

    Args:
        status: the daemon's status.
        accept: the request's Accept header.
    """
    encoder, content_type = choose_encoder(accept)
    return encoder(_Collected(list(families(status)))), content_type


class _Collected(Collector):
    """Metrics that are known already, in the form that an encoder asks for."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def families(status: Status) -> Iterator[Metric]:
    """Yield all metrics of a status."""
    yield InfoMetricFamily("penstock_daemon", METRICS["penstock_daemon"].means, {"protocol": str(status.version)})
    for name, described in _OF_STATUS.items():
        yield _family(name, _values([((), status)], described.path))
    yield from _waits(status)
    yield from _caches(status)
    yield from _workers(status)


def _values(found: list[tuple[Labels, Any]], path: Iterable[Figure]) -> list[tuple[Labels, Any]]:
    """Follow a path from structs to their values. A value that is None is left out."""
    for figure in path:
        found = [(key, value) for key, one in found if (value := getattr(one, figure.name)) is not None]
        if figure.many:
            found = [(key, one) for key, several in found for one in several]
        if figure.kind in _NAMED:
            found = [((*key, one.name), one) for key, one in found]
    return found


def _waits(status: Status) -> Iterator[Metric]:
    """Yield how consumers spent their time. A process that joins a group twice has two consumers in one stream: they
    are added up."""
    yield _family("penstock_feed_reading_seconds_total", [((feed.name,), feed.waits.reading) for feed in status.feeds])
    by_cause = [((feed.name, cause), getattr(feed.waits, cause)) for feed in status.feeds for cause in WAITS]
    yield _family("penstock_feed_waiting_seconds_total", by_cause)
    reading: defaultdict[Labels, float] = defaultdict(float)
    waiting: defaultdict[Labels, float] = defaultdict(float)
    holding_up: defaultdict[Labels, float] = defaultdict(float)
    for one in status.streams:
        rank = "" if one.rank is None else str(one.rank)
        client = one.client.partition(" ")[0]  # its rank follows
        key, waits = (one.feed, str(one.stream), client, rank), one.waits
        reading[key] += waits.reading
        holding_up[key] += waits.holding_up
        for cause in WAITS:
            waiting[*key, cause] += getattr(waits, cause)
    yield _family("penstock_consumer_reading_seconds_total", reading.items())
    yield _family("penstock_consumer_waiting_seconds_total", waiting.items())
    yield _family("penstock_consumer_holding_up_seconds_total", holding_up.items())


def _caches(status: Status) -> Iterator[Metric]:
    found: list[tuple[Labels, Any]] = [
        ((feed.name, part), cache)
        for feed in status.feeds
        for part, cache in {"": feed.cache, **feed.part_caches}.items()
        if cache is not None
    ]
    for name, described in _OF_CACHES.items():
        yield _family(name, _values(found, described.path))


def _workers(status: Status) -> Iterator[Metric]:
    yield _family("penstock_workers", [((), sum(not worker.leaving for worker in status.workers))])
    times: dict[Labels, float] = {}
    for worker in status.workers:
        if (spent := worker.spent) is not None:
            times[worker.name, "generating"] = spent.user_seconds
            times[worker.name, "collating"] = max(0.0, spent.seconds - spent.user_seconds - spent.idle_seconds)
            times[worker.name, "idle"] = spent.idle_seconds
    yield _family("penstock_worker_time_seconds_total", times.items())


def _family(name: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    described = METRICS[name]
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, described.means, labels=described.labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
