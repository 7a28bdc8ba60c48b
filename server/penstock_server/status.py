"""What `penstock status` shows of feeds, workers and streams, as JSON types."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_proto import PenstockError

from .coordinator import Coordinator
from .coordinator.consumer import Consumer
from .coordinator.feeds import ServedFeed
from .coordinator.stream import Stream
from .host.worker_handle import WorkerHandle
from .session import Session

_MOST_STREAMS = 200
_MOST_SPEC = 1000
_MOST_TEXT = 200


def of_feed(feed: ServedFeed, url: str) -> dict[str, object]:
    """Describe a feed, whose URL is `url`."""
    return {
        "name": feed.name,
        "url": url,
        "spec": str(feed.info.spec)[:_MOST_SPEC],
        "batch_size": feed.info.batch_size,
        "batches": feed.info.batches,
        "samples": feed.info.samples,
        "turn": feed.info.turn,
        "lanes": feed.info.lanes,
        "order": feed.info.order,
        "splits": feed.static_splits.count if feed.static_splits and not feed.plan.endless else None,
        "segment": feed.plan.segment,
        "indexable": feed.plan.length is not None,
        "on_error": feed.plan.on_error,
        "skipped_count": feed.skipped_count,
        "skipped": [
            {"epoch": one.epoch, "split": one.split, "samples": one.samples, "why": one.why[:_MOST_TEXT]}
            for one in feed.skipped
        ],
    }


def of_worker(worker: WorkerHandle, *, leaving: bool) -> dict[str, object]:
    """Describe a worker, and what it is doing."""
    return {
        "number": worker.number,
        "pid": worker.pid,
        "restarts": worker.restarts,
        "ready": worker.ready,
        "leaving": leaving,
        "given_up": worker.given_up,
        "stopped": worker.stopped,
        "doing": worker.doing,
        "spent": worker.spent,
    }


def of_streams(sessions: Iterable[Session], coordinator: Coordinator) -> dict[str, object]:
    """Describe the first `_MOST_STREAMS` consumers that read a stream, and count the others."""
    consumers = coordinator.consumers
    reading = [(session, consumers[session.consumer]) for session in sessions if session.consumer in consumers]
    return {
        "streams": [
            _stream(session, consumer, coordinator.stream_read_by(consumer))
            for session, consumer in reading[:_MOST_STREAMS]
        ],
        "more_streams": max(0, len(reading) - _MOST_STREAMS),
    }


def _stream(session: Session, consumer: Consumer, stream: Stream) -> dict[str, object]:
    return {
        "feed": session.feed,
        "client": session.client,
        "transport": session.transport,
        "epoch": consumer.begun,
        "reading": consumer.reading,
        "batches": stream.epoch_batches,
        "sent": consumer.sent,
        "handed": consumer.handed,
        "slots": len(stream.slots),
        "slot_bytes": stream.production.slot_nbytes,
        "rank": consumer.rank if stream.share.consumers > 1 else None,
        "error": _short(stream.error),
    }


def _short(error: PenstockError | None) -> str | None:
    return None if error is None else error.message[:_MOST_TEXT]
