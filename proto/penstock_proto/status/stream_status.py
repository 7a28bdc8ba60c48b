"""The figures of a consumer, and of the stream that it reads."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from ..declarations import figure
from .feed_status import FeedWaits


class Waits(FeedWaits, frozen=True, kw_only=True):
    """How one consumer spent its time, in seconds."""

    holding_up: Annotated[float, figure("Seconds in which other ranks waited for this one.")]
    listing: Annotated[float, figure("The part of `production` in which the splits of the epoch were not known.")]
    interrupted: Annotated[
        float,
        figure(
            "The part of `production` in which nobody made the next batch: its lane waited after an error or the end "
            "of a worker, or no worker was ready."
        ),
    ]
    without_lane: Annotated[
        float, figure("Seconds of `production`, times the share of the workers that had no lane to work on.")
    ]
    ahead: Annotated[
        float,
        figure(
            "Seconds of `production`, times the share of the workers that had made all that there were slots for, and "
            "waited for an earlier batch."
        ),
    ]


class Production(Struct, frozen=True, kw_only=True):
    """The slots that a stream has for production."""

    slots: Annotated[int, figure("Slots in which batches can be made at once.")]
    used: Annotated[int, figure("How many of these are in use.")]


class Stream(Struct, frozen=True, kw_only=True):
    """A consumer, and the stream that it reads."""

    stream: Annotated[int, figure("Number of the stream. Ranks, groups, and jobs that are near each other share one.")]
    feed: Annotated[str, figure("Name of the feed.")]
    client: Annotated[str, figure("Host and process of the consumer, and its rank.")]
    key: Annotated[str | None, figure("Name of the consumer's key. None without keys.")]
    transport: Annotated[str, figure("`local` or `tcp`.")]
    epoch: Annotated[int | None, figure("The epoch that it reads, or read last. None before the first.")]
    reading: Annotated[bool, figure("Whether it reads an epoch.")]
    batches: Annotated[
        int, figure("Batches of this epoch that the stream has sent (of several jobs: to the first of them).")
    ]
    sent: Annotated[int, figure("Slabs that the consumer was sent.")]
    handed: Annotated[int, figure("Slabs that the consumer has taken.")]
    slots: Annotated[int, figure("Slots that the stream holds.")]
    production: Annotated[Production, figure("Its slots for production.")]
    slot_bytes: Annotated[int, figure("Bytes of a slot.")]
    rank: Annotated[int | None, figure("The consumer's rank, if it is one.")]
    world_size: Annotated[int, figure("How many ranks its job has. 0 without ranks.")]
    group: Annotated[str, figure("The group of the consumer, or of its ranks.")]
    jobs: Annotated[int, figure("How many jobs share the stream. Each gets all of it, at its own pace.")]
    behind: Annotated[int, figure("Batches that were sent to the first of these jobs, and not yet to this one.")]
    window_slots: Annotated[int, figure("Slots that are kept for jobs that are behind.")]
    apart_because: Annotated[
        str, figure("Why it shares its stream with no other job of the feed. Empty if it does, or if there is none.")
    ]
    made_near: Annotated[bool, figure("Whether workers on the machines of its ranks make their batches.")]
    made_anywhere_because: Annotated[
        str, figure("Why others make them, although hosts have joined from such machines.")
    ]
    error: Annotated[str | None, figure("Why the stream has failed.")]
    unsent: Annotated[bool, figure("Whether bytes wait for its connection over TCP.")]
    waits: Annotated[Waits, figure("How it spent its time.")]
    cpu_seconds: Annotated[
        float | None, figure("CPU time of the consumer's process; None unless it shares memory with the daemon.")
    ]
    waiting: Annotated[
        float | None,
        figure(
            "Share of the reading time of the last `window_seconds` in which it waited. None before there is a second "
            "of that."
        ),
    ] = None
    limit: Annotated[str, figure("What limits the consumer, in a word. Empty without `waiting`.")] = ""
    headline: Annotated[str, figure("The same in half a sentence.")] = ""
    verdict: Annotated[str, figure("The same with advice.")] = ""
