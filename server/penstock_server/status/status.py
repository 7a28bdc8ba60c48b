"""Fills in the figures of the status: describes the daemon, its feeds, workers, hosts and consumers.

penstock_proto/status/status_shape.py declares the figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import TypeVar

from msgspec.structs import asdict, replace

from penstock_proto import PenstockError
from penstock_proto.messages import WorkerReport
from penstock_proto.status import stream_status
from penstock_proto.status.feed_status import Checks, Feed, FeedWaits, Sent, Skipped
from penstock_proto.status.host_status import Host, HostMemory
from penstock_proto.status.status_shape import Failing, Memory, Status
from penstock_proto.status.stream_status import Production
from penstock_proto.status.worker_status import Worker

from ..consumers.greeted import Greeted
from ..consumers.session import Session
from ..coordinator import CoordinatorView
from ..coordinator.model.consumer import Consumer
from ..coordinator.model.feeds import ServedFeed
from ..coordinator.stream.stream import Stream
from ..hosts.joined_host import JoinedHost
from ..machine import orphans, process_stat
from ..shared_memory.arena import Arena
from ..worker_state.cache_usage import CacheUsages
from ..workers.dropped_samples import DroppedSamples
from ..workers.worker_handle import WorkerHandle
from .json_text import json_text
from .waits import Looks, Waits

AnyWaits = TypeVar("AnyWaits", bound=FeedWaits)

_MOST_STREAMS = 200
_MOST_SPEC = 1000
_MOST_TEXT = 200
_MOST_PROCESSES = 100


_MOST_A_SECOND = 10
"""Most status texts that are made per second. Further requests get a copy that is at most `_OLD` seconds old."""
_OLD = 0.2


MOST_WORKERS = 400
"""Maximum number of workers in a status: its own first, then those of hosts. With more it would not fit a message."""
MOST_HOSTS = 100
"""Maximum number of joined hosts in a status."""
_CHEAP = 0.005
"""CPU seconds that a status takes in most daemons. A large cluster's takes longer, some 40 us for each worker."""
SHARE = 0.05
"""Maximum share of the thread's time for statuses that take longer."""


class Text:
    """The status as text, which clients may request often.

    Args:
        status: returns the status.
        clock: returns the time in seconds.
        cpu: returns the CPU time of this thread in seconds.
    """

    def __init__(
        self,
        status: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._status = status
        self._clock = clock
        self._cpu = cpu
        self._text = ""
        self._made_at = -math.inf
        self._pause = 0.0
        """Seconds for which this text is used, however many requests come."""
        self._asked = 0
        """Number of requests in this second."""

    def get(self) -> str:
        """Return the status, or a recent copy if there are too many requests or it takes long."""
        self._asked += 1
        age = self._clock() - self._made_at
        if age >= self._pause and (self._asked <= _MOST_A_SECOND or age > _OLD):
            began = self._cpu()
            self._text = json_text(self._status())
            took = self._cpu() - began
            self._pause = took / SHARE if took > _CHEAP else 0.0
            self._made_at = self._clock()
        return self._text

    def another_second(self) -> None:
        """Begin to count the requests of the next second."""
        self._asked = 0


def shortened(status: Status) -> Status:
    """Return a status with at most `MOST_WORKERS` workers and `MOST_HOSTS` hosts, and the numbers of those left out."""
    return replace(
        status,
        workers=[_shortened_worker(worker) for worker in status.workers[:MOST_WORKERS]],
        more_workers=max(0, len(status.workers) - MOST_WORKERS),
        hosts=status.hosts[:MOST_HOSTS],
        more_hosts=max(0, len(status.hosts) - MOST_HOSTS),
    )


def _shortened_worker(worker: Worker) -> Worker:
    doing = worker.doing
    if doing is None or (len(doing.what) <= _MOST_TEXT and len(doing.split or "") <= _MOST_TEXT):
        return worker
    split = None if doing.split is None else doing.split[:_MOST_TEXT]
    return replace(worker, doing=replace(doing, what=doing.what[:_MOST_TEXT], split=split))


def of_memory(coordinator: CoordinatorView, arena: Arena, greeted: Greeted) -> Memory:
    """Count the bytes of all streams."""
    return Memory(
        allowed=coordinator.budget.memory,
        reserved=coordinator.budget.nbytes_reserved,
        arena=arena.nbytes,
        positions=greeted.nbytes,
    )


def of_failing(coordinator: CoordinatorView) -> list[Failing]:
    """Describe the feeds that cannot start yet."""
    return [
        Failing(feed=name, times=failing.times, error=failing.error.message)
        for name, failing in coordinator.starting.failing.items()
    ]


def of_feed(
    feed: ServedFeed,
    url: str,
    streams: Iterable[Stream],
    caches: CacheUsages,
    dropped: DroppedSamples,
    waits: Waits,
    checks: Checks,
) -> Feed:
    """Describe a feed with the URL `url`: its plan, its figures over all `streams`, the use of its caches, the samples
    that it has dropped, the waits of all its consumers, and the spot checks of its samples."""
    own = [stream for stream in streams if stream.feed is feed]
    return Feed(
        name=feed.name,
        url=url,
        params=feed.plan.params,
        spec=str(feed.info.spec)[:_MOST_SPEC],
        batch_size=feed.info.batch_size,
        batches=feed.info.batches,
        samples=feed.info.samples,
        turn=feed.info.turn,
        stripe=feed.turn if feed.ranges_vary else feed.info.stripe,
        lanes=feed.info.lanes,
        undivided=feed.plan.undivided,
        order=feed.info.order,
        splits=feed.static_splits.count if feed.static_splits and not feed.plan.endless else None,
        segment=feed.plan.segment,
        indexable=feed.plan.length is not None,
        on_error=feed.plan.on_error,
        consumers=sum(len(stream.consumers) for stream in own),
        slots=sum(len(stream.slots) for stream in own),
        made=feed.made,
        sent=Sent(batches=feed.sent.batches, samples=feed.sent.samples, bytes=feed.sent.nbytes),
        errors=feed.errors,
        replays=feed.replays,
        waits=_rounded(waits, FeedWaits),
        cache=caches.status(feed.name, "", feed.plan.cache),
        part_caches={part: caches.status(feed.name, part, path) for part, path in feed.plan.part_caches},
        checks=checks,
        dropped=dropped.of(feed.name),
        skipped_count=feed.skipped_count,
        skipped=[
            Skipped(epoch=one.epoch, split=one.split, samples=one.samples, why=one.why[:_MOST_TEXT])
            for one in feed.skipped
        ],
    )


def reported(worker: WorkerHandle, number: int) -> WorkerReport:
    """Return the figures of a worker that its own host knows, for the head, which calls the worker `number`."""
    return WorkerReport(
        number=number,
        pid=worker.pid,
        restarts=worker.restarts,
        ready=worker.ready,
        given_up=worker.given_up,
        stopped=worker.stopped,
        doing=worker.doing,
        spent=worker.spent,
    )


def of_worker(
    worker: WorkerHandle,
    *,
    leaving: bool = False,
    makes_batches: bool = True,
    memory: int | None = None,
    awaited: float = 0.0,
    awaited_at: str | None = None,
) -> Worker:
    """Describe a worker of the daemon, its activity, the memory of its process in bytes, how many seconds consumers
    have waited for its batches, and the split at which it was then."""
    return Worker(
        **asdict(reported(worker, worker.number)),
        name=str(worker.number),
        host=None,
        makes_batches=makes_batches,
        leaving=leaving,
        memory=memory,
        awaited_seconds=round(awaited, 3),
        awaited_at=awaited_at,
        processes=0 if worker.pid is None else _processes_of(worker.pid),
    )


def _processes_of(worker: int) -> int:
    found = islice(orphans.descendants(worker), _MOST_PROCESSES)
    return sum(not orphans.has_ended(pid) for pid in found)


def of_workers_of(host: JoinedHost, leaving: Collection[int], looks: Looks) -> list[Worker]:
    """Describe the workers of a joined host, as the host has reported them. `looks` knows how consumers waited for
    them."""
    return [
        Worker(
            **asdict(_as_of_now(*host.said[worker], ready=worker in host.there)),
            name=host.name_of(worker),
            host=host.name,
            makes_batches=True,
            leaving=worker in leaving,
            memory=host.view.memory.get(worker),
            awaited_seconds=round(looks.of_worker(worker), 3),
            awaited_at=looks.awaited_at(worker),
            processes=0,
        )
        for worker in sorted(host.workers & host.said.keys())
    ]


def _as_of_now(worker: WorkerReport, at: float, *, ready: bool) -> WorkerReport:
    """Return a report that arrived at `at`, in monotonic seconds: the worker's activity is that much older."""
    doing = worker.doing
    if doing is not None:
        doing = replace(doing, seconds=round(doing.seconds + time.monotonic() - at, 1))
    return replace(worker, doing=doing, ready=ready)


def of_host(host: JoinedHost, streams: Iterable[Stream]) -> Host:
    """Describe a joined host, and the lanes that it makes for these streams."""
    report = host.report
    return Host(
        name=host.name,
        address=host.address,
        state="leaving" if host.leaving else "working" if host.working else "starting",
        workers=len(host.workers),
        ready=len(host.there),
        lanes=sum(stream.view.lanes_of(host.workers) for stream in streams),
        slots=host.slots,
        awaited_seconds=round(host.awaited, 3),
        received_bytes=host.received,
        fetched_bytes=host.fetched,
        lent_bytes=0 if report is None else report.lent,
        silent_seconds=round(time.monotonic() - host.heard, 1),
        memory=None if report is None else HostMemory(used=report.memory, allowed=report.allowed),
        unsent_bytes=None if report is None else report.unsent,
        cpus=None if report is None else report.cpus,
        machine=None if report is None else report.machine,
    )


def of_streams(
    sessions: Iterable[Session],
    coordinator: CoordinatorView,
    waits: Callable[[int], Waits],
) -> tuple[list[stream_status.Stream], int]:
    """Describe the first `_MOST_STREAMS` consumers that read a stream, and count the others.

    `waits` returns a consumer's waits.
    """
    consumers = coordinator.consumers
    reading = [
        (session, consumers[session.consumer])
        for session in sessions
        if session.consumer is not None and session.consumer in consumers
    ]
    described = [
        _stream(
            session,
            consumer,
            coordinator.stream_read_by(consumer),
            apart_because=coordinator.apart_because(consumer),
            waits=waits(consumer.number),
        )
        for session, consumer in reading[:_MOST_STREAMS]
    ]
    return described, max(0, len(reading) - _MOST_STREAMS)


def _stream(
    session: Session, consumer: Consumer, stream: Stream, *, apart_because: str, waits: Waits
) -> stream_status.Stream:
    return stream_status.Stream(
        stream=stream.number,
        feed=session.feed,
        client=session.client,
        key=None if session.key is None else session.key.name,
        transport=session.link.transport,
        epoch=consumer.begun,
        reading=consumer.reading,
        batches=stream.view.batches,
        sent=consumer.sent,
        handed=consumer.handed,
        slots=len(stream.slots),
        production=Production(slots=stream.share.production, used=stream.production.turns.held),
        slot_bytes=stream.slots.slot_nbytes,
        rank=consumer.rank if consumer.world_size > 1 else None,
        world_size=consumer.world_size,
        group=consumer.group,
        jobs=stream.view.jobs,
        behind=stream.view.behind(consumer),
        window_slots=0 if stream.sharing is None else stream.sharing.window.slots,
        apart_because=apart_because,
        made_near=stream.view.made_near,
        made_anywhere_because=stream.view.why_made_anywhere,
        error=_short(stream.error),
        unsent=session.link.unsent,
        waits=_rounded(waits, stream_status.Waits),
        cpu_seconds=process_stat.cpu_seconds(session.link.pid),
    )


def _rounded(waits: Waits, kind: type[AnyWaits]) -> AnyWaits:
    return kind(**{name: round(getattr(waits, name), 3) for name in kind.__struct_fields__})


def _short(error: PenstockError | None) -> str | None:
    return None if error is None else error.message[:_MOST_TEXT]
