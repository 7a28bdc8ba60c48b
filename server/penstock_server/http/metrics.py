"""Metrics for Prometheus, made from the daemon's status. No I/O, except where the format is chosen.

`METRICS` lists every metric with its help text. Counters of a worker begin at 0 again when its process is replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from penstock_proto.status.status_history import WAITS

METRICS: dict[str, str] = {
    "penstock_daemon": "The daemon's version of the protocol.",
    "penstock_daemon_uptime_seconds": "Seconds since the daemon was started.",
    "penstock_daemon_ready": "1 if all feeds can be consumed.",
    "penstock_daemon_draining": "1 if the daemon stops when the epochs that are being read have ended.",
    "penstock_daemon_cpus": "CPUs that the daemon and its workers may use.",
    "penstock_daemon_cpu_seconds_total": "CPU time of the daemon's own process, without its workers.",
    "penstock_daemon_internal_errors_total": "Bugs in Penstock that the daemon survived; the log has tracebacks.",
    "penstock_daemon_malformed_messages_total": "Messages from peers that could not be decoded.",
    "penstock_memory_allowed_bytes": "Bytes that slots and shuffle blocks may take (--memory).",
    "penstock_memory_reserved_bytes": "Bytes of slots and shuffle blocks that streams have reserved.",
    "penstock_memory_slots_bytes": "Bytes of the slots that exist now.",
    "penstock_feed_consumers": "Consumers that have a stream of the feed open.",
    "penstock_feed_slots": "Slots that the streams of the feed hold now.",
    "penstock_feed_sent_batches_total": "Batches that were sent to consumers.",
    "penstock_feed_sent_samples_total": "Samples that were sent to consumers (rows of their batches).",
    "penstock_feed_sent_bytes_total": "Bytes of the batches that were sent, in shared memory or over the network.",
    "penstock_feed_errors_total": "How often user code raised in a run, including attempts that were repeated.",
    "penstock_feed_skipped_splits_total": "Splits whose rest was left out, as user code raised or ended its worker.",
    "penstock_feed_reading_seconds_total": "Seconds in which consumers read epochs, all consumers together.",
    "penstock_feed_waiting_seconds_total": "Seconds in which consumers that read had nothing to take, by cause.",
    "penstock_consumer_reading_seconds_total": "Seconds in which the consumer read epochs.",
    "penstock_consumer_waiting_seconds_total": "Seconds in which the consumer read and had nothing to take, by cause.",
    "penstock_consumer_holding_up_seconds_total": "Seconds in which other ranks waited for the consumer.",
    "penstock_cache_hit_splits_total": "Splits that were read from the cache.",
    "penstock_cache_missed_splits_total": "Splits for which the generator ran, because the cache did not have them.",
    "penstock_cache_bytes": "Bytes of the cached splits.",
    "penstock_workers": "Worker processes that should run.",
    "penstock_worker_ready": "1 if the worker has imported the feeds and can be given work.",
    "penstock_worker_restarts_total": "How often the worker's process was replaced.",
    "penstock_worker_time_seconds_total": "Where the worker's time went: generating (user code), collating, or idle.",
    "penstock_worker_cpu_seconds_total": "CPU time of the worker's process.",
    "penstock_worker_cpu_wait_seconds_total": "Seconds in which the worker could have run, and no CPU was free.",
    "penstock_worker_memory_bytes": "Memory of the worker's process; shared pages count in part (PSS).",
    "penstock_engine_hosts": "Hosts that the engine (serve --on) is to run; some may not have joined yet.",
    "penstock_host_workers": "Worker processes of a host that has joined.",
    "penstock_host_ready_workers": "Worker processes of a joined host that can be given work.",
    "penstock_host_cpus": "CPUs that the host's workers may use.",
    "penstock_host_memory_allowed_bytes": "Bytes that batches may take on the host (its --memory).",
    "penstock_host_memory_used_bytes": "Bytes that batches take on the host now.",
    "penstock_host_received_bytes_total": "Bytes of batches that the host has sent to the head since it joined.",
    "penstock_host_fetched_bytes_total": "Bytes of batches that consumers were to fetch from the host since it joined.",
    "penstock_host_lent_bytes_total": "Bytes of fetched batches that were lent to consumers on the host's machine.",
    "penstock_host_unsent_bytes": "Bytes of batches that the network has not taken from the host yet.",
    "penstock_host_lanes": "Lanes that the host's workers make now.",
    "penstock_host_awaited_seconds_total": "Seconds that consumers have waited for batches of the host's workers.",
    "penstock_host_silent_seconds": "Seconds since the last message from the host.",
}


def render(status: Mapping[str, Any], accept: str = "") -> tuple[bytes, str]:
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


def families(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield all metrics of a status."""
    yield InfoMetricFamily("penstock_daemon", METRICS["penstock_daemon"], {"protocol": str(status["version"])})
    yield _gauge("penstock_daemon_uptime_seconds", status["seconds"])
    yield _gauge("penstock_daemon_ready", status["ready"])
    yield _gauge("penstock_daemon_draining", status["draining"])
    yield _gauge("penstock_daemon_cpus", status["cpus"])
    yield _counter("penstock_daemon_cpu_seconds_total", status["cpu_seconds"])
    yield _counter("penstock_daemon_internal_errors_total", status["internal_errors"])
    yield _counter("penstock_daemon_malformed_messages_total", status["malformed"])
    yield _gauge("penstock_memory_allowed_bytes", status["memory"]["allowed"])
    yield _gauge("penstock_memory_reserved_bytes", status["memory"]["reserved"])
    yield _gauge("penstock_memory_slots_bytes", status["memory"]["arena"])
    yield from _feeds(status["feeds"])
    yield from _consumers(status["streams"])
    yield from _caches(status["feeds"])
    yield from _workers(status["workers"])
    engine = status["engine"]
    yield _gauges("penstock_engine_hosts", ["engine"], {(engine["name"],): engine["hosts"]} if engine else {})
    yield from _hosts(status["hosts"])


def _feeds(feeds: list[dict[str, Any]]) -> Iterator[Metric]:
    def of(value: Callable[[dict[str, Any]], float]) -> dict[tuple[str, ...], float]:
        return {(feed["name"],): value(feed) for feed in feeds}

    yield _gauges("penstock_feed_consumers", ["feed"], of(lambda feed: feed["consumers"]))
    yield _gauges("penstock_feed_slots", ["feed"], of(lambda feed: feed["slots"]))
    yield _counters("penstock_feed_sent_batches_total", ["feed"], of(lambda feed: feed["sent"]["batches"]))
    yield _counters("penstock_feed_sent_samples_total", ["feed"], of(lambda feed: feed["sent"]["samples"]))
    yield _counters("penstock_feed_sent_bytes_total", ["feed"], of(lambda feed: feed["sent"]["bytes"]))
    yield _counters("penstock_feed_errors_total", ["feed"], of(lambda feed: feed["errors"]))
    yield _counters("penstock_feed_skipped_splits_total", ["feed"], of(lambda feed: feed["skipped_count"]))
    yield _counters("penstock_feed_reading_seconds_total", ["feed"], of(lambda feed: feed["waits"]["reading"]))
    waiting: dict[tuple[str, ...], float] = {}
    for feed in feeds:
        waiting.update({(feed["name"], cause): feed["waits"][cause] for cause in WAITS})
    yield _counters("penstock_feed_waiting_seconds_total", ["feed", "cause"], waiting)


def _consumers(streams: list[dict[str, Any]]) -> Iterator[Metric]:
    """Yield the consumers' metrics. A process that joins a group twice has two consumers in one stream: they are added
    up."""
    reading: Counter[tuple[str, ...]] = Counter()
    waiting: Counter[tuple[str, ...]] = Counter()
    holding_up: Counter[tuple[str, ...]] = Counter()
    for one in streams:
        rank = "" if one["rank"] is None else str(one["rank"])
        client = one["client"].partition(" ")[0]  # its rank follows
        key, waits = (one["feed"], str(one["stream"]), client, rank), one["waits"]
        reading[key] += waits["reading"]
        holding_up[key] += waits["holding_up"]
        for cause in WAITS:
            waiting[*key, cause] += waits[cause]
    labels = ["feed", "stream", "consumer", "rank"]
    yield _counters("penstock_consumer_reading_seconds_total", labels, reading)
    yield _counters("penstock_consumer_waiting_seconds_total", [*labels, "cause"], waiting)
    yield _counters("penstock_consumer_holding_up_seconds_total", labels, holding_up)


def _caches(feeds: list[dict[str, Any]]) -> Iterator[Metric]:
    found = [
        ((feed["name"], part), cache)
        for feed in feeds
        for part, cache in {"": feed["cache"], **feed["part_caches"]}.items()
        if cache is not None
    ]
    labels = ["feed", "part"]
    yield _counters("penstock_cache_hit_splits_total", labels, {key: cache["hits"] for key, cache in found})
    yield _counters("penstock_cache_missed_splits_total", labels, {key: cache["misses"] for key, cache in found})
    yield _gauges("penstock_cache_bytes", labels, {key: cache["bytes"] for key, cache in found})


def _workers(workers: list[dict[str, Any]]) -> Iterator[Metric]:
    yield _gauge("penstock_workers", sum(not worker["leaving"] for worker in workers))
    numbered: list[tuple[tuple[str, ...], dict[str, Any]]] = [((one["name"],), one) for one in workers]
    yield _gauges("penstock_worker_ready", ["worker"], {key: worker["ready"] for key, worker in numbered})
    yield _counters("penstock_worker_restarts_total", ["worker"], {key: worker["restarts"] for key, worker in numbered})
    spent = [(key, worker["spent"]) for key, worker in numbered if worker["spent"]]
    times: dict[tuple[str, ...], float] = {}
    for key, seconds in spent:
        generating, idle = seconds["user_seconds"], seconds["idle_seconds"]
        times[*key, "generating"] = generating
        times[*key, "collating"] = max(0.0, seconds["seconds"] - generating - idle)
        times[*key, "idle"] = idle
    yield _counters("penstock_worker_time_seconds_total", ["worker", "state"], times)
    yield _counters("penstock_worker_cpu_seconds_total", ["worker"], {key: s["cpu_seconds"] for key, s in spent})
    waits = {key: s["cpu_wait_seconds"] for key, s in spent}
    yield _counters("penstock_worker_cpu_wait_seconds_total", ["worker"], waits)
    nbytes = {key: worker["memory"] for key, worker in numbered if worker["memory"] is not None}
    yield _gauges("penstock_worker_memory_bytes", ["worker"], nbytes)


def _hosts(hosts: list[dict[str, Any]]) -> Iterator[Metric]:
    def of(value: Callable[[dict[str, Any]], float | None]) -> dict[tuple[str, ...], float]:
        found = {(host["name"],): value(host) for host in hosts}
        return {key: figure for key, figure in found.items() if figure is not None}  # it has not reported yet

    def memory(name: str) -> Callable[[dict[str, Any]], float | None]:
        return lambda host: None if host["memory"] is None else host["memory"][name]

    yield _gauges("penstock_host_workers", ["host"], of(lambda host: host["workers"]))
    yield _gauges("penstock_host_ready_workers", ["host"], of(lambda host: host["ready"]))
    yield _gauges("penstock_host_cpus", ["host"], of(lambda host: host["cpus"]))
    yield _gauges("penstock_host_memory_allowed_bytes", ["host"], of(memory("allowed")))
    yield _gauges("penstock_host_memory_used_bytes", ["host"], of(memory("used")))
    yield _counters("penstock_host_received_bytes_total", ["host"], of(lambda host: host["received_bytes"]))
    yield _counters("penstock_host_fetched_bytes_total", ["host"], of(lambda host: host["fetched_bytes"]))
    yield _counters("penstock_host_lent_bytes_total", ["host"], of(lambda host: host["lent_bytes"]))
    yield _gauges("penstock_host_unsent_bytes", ["host"], of(lambda host: host["unsent_bytes"]))
    yield _gauges("penstock_host_lanes", ["host"], of(lambda host: host["lanes"]))
    yield _counters("penstock_host_awaited_seconds_total", ["host"], of(lambda host: host["awaited_seconds"]))
    yield _gauges("penstock_host_silent_seconds", ["host"], of(lambda host: host["silent_seconds"]))


def _gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, METRICS[name], value)


def _counter(name: str, value: float) -> Metric:
    return CounterMetricFamily(name, METRICS[name], value)


def _gauges(name: str, labels: list[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, METRICS[name], labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _counters(name: str, labels: list[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = CounterMetricFamily(name, METRICS[name], labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
