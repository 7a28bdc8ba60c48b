"""The figures of a feed."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from ..declarations import figure


class Sent(Struct, frozen=True, kw_only=True):
    """How much was sent."""

    batches: Annotated[int, figure("Batches that were sent to consumers.", "penstock_feed_sent_batches_total")]
    samples: Annotated[
        int, figure("Samples that were sent to consumers (rows of their batches).", "penstock_feed_sent_samples_total")
    ]
    bytes: Annotated[
        int,
        figure(
            "Bytes of the batches that were sent, in shared memory or over the network.",
            "penstock_feed_sent_bytes_total",
        ),
    ]


class Rates(Struct, frozen=True, kw_only=True):
    """How much is sent in a second."""

    batches: Annotated[float, figure("Batches a second.")]
    samples: Annotated[float, figure("Samples a second.")]
    bytes: Annotated[float, figure("Bytes of batches a second.")]


class FeedWaits(Struct, frozen=True, kw_only=True):
    """How consumers spent their time, in seconds."""

    reading: Annotated[float, figure("Seconds of reading an epoch. The waits are parts of that.")]
    production: Annotated[float, figure("Seconds without a batch to take, because none was made.")]
    ranks: Annotated[float, figure("Seconds without a batch to take, because another rank had no room.")]
    sending: Annotated[
        float,
        figure("Seconds in which the connection took no more, while there may have been no batch to take."),
    ]


class Cache(Struct, frozen=True, kw_only=True):
    """The use of a cache."""

    directory: Annotated[str, figure("Its directory.")]
    bytes: Annotated[int, figure("Bytes of the cached splits.", "penstock_cache_bytes")]
    hits: Annotated[int, figure("Splits that were read from the cache.", "penstock_cache_hit_splits_total")]
    misses: Annotated[
        int,
        figure(
            "Splits for which the generator ran, because the cache did not have them.",
            "penstock_cache_missed_splits_total",
        ),
    ]
    written: Annotated[int, figure("Splits that were written to the cache.")]
    problem: Annotated[str | None, figure("Why a split was not written or not read. None if one was written since.")]


class Checks(Struct, frozen=True, kw_only=True):
    """The spot checks of a feed's samples."""

    samples: Annotated[int, figure("Samples that were made again and compared.")]
    different: Annotated[int, figure("Checks that found samples different.")]


class Skipped(Struct, frozen=True, kw_only=True):
    """A split that was skipped."""

    epoch: Annotated[int | None, figure("Epoch, from 0.")]
    split: Annotated[str | None, figure("Name of the split.")]
    samples: Annotated[int, figure("Samples of the split before its rest was left out.")]
    why: Annotated[str, figure("The error, or how its worker ended.")]


class Feed(Struct, frozen=True, kw_only=True):
    """A feed."""

    name: Annotated[str, figure("Its name.")]
    url: Annotated[str, figure("Its URL.")]
    params: Annotated[
        str,
        figure("Parameters of the function that returns it that are not the defaults, such as `size=128`; or empty."),
    ]
    spec: Annotated[str, figure("Names, dtypes and shapes of a sample's arrays.")]
    batch_size: Annotated[int | None, figure("Samples of a batch. None if the generator yields whole batches.")]
    batches: Annotated[int | None, figure("Batches of an epoch. None if unknown.")]
    samples: Annotated[int | None, figure("Samples of an epoch. None if unknown.")]
    turn: Annotated[int, figure("Batches that a lane gives in a row, at most.")]
    stripe: Annotated[int, figure("Batches of several lanes or ranges that share a slot; 1 if each turn has one.")]
    lanes: Annotated[int, figure("Lanes of an epoch.")]
    undivided: Annotated[
        bool, figure("Whether each worker runs the whole generator, and transforms the samples of its lanes.")
    ] = False
    order: Annotated[str, figure("`exact` or `fast`.")]
    splits: Annotated[int | None, figure("Splits of an epoch. None if each epoch lists its own, or has no end.")]
    segment: Annotated[int | None, figure("Samples of a segment, if the feed has segments.")]
    indexable: Annotated[
        bool, figure("Whether samples have an index. Then any number of workers can work on an epoch.")
    ]
    on_error: Annotated[str, figure("What happens if user code raises: `raise`, `retry` or `skip`.")]
    consumers: Annotated[int, figure("Consumers that have a stream of the feed open.", "penstock_feed_consumers")]
    slots: Annotated[int, figure("Slots that the streams of the feed hold now.", "penstock_feed_slots")]
    made: Annotated[int, figure("Batches that workers have made.", "penstock_feed_made_batches_total")]
    sent: Annotated[Sent, figure("How much was sent.")]
    errors: Annotated[
        int,
        figure(
            "How often user code raised in a run, including attempts that were repeated.", "penstock_feed_errors_total"
        ),
    ]
    replays: Annotated[
        int,
        figure("How often a lane began at a restart record: a worker died, the lane moved, or a consumer resumed."),
    ]
    waits: Annotated[FeedWaits, figure("Seconds of all its consumers together, including those that are gone.")]
    cache: Annotated[Cache | None, figure("Its cache, if it has one.")]
    part_caches: Annotated[
        dict[str, Cache | None], figure("Of a mix: the caches of its feeds by their names, each like `cache`.")
    ]
    checks: Annotated[Checks, figure("Its spot checks.")]
    dropped: Annotated[
        int,
        figure(
            "Samples that transforms dropped, and items that were left out, in the lanes of its streams.",
            "penstock_feed_dropped_samples_total",
        ),
    ]
    skipped_count: Annotated[
        int,
        figure(
            "Splits whose rest was left out, as user code raised or ended its worker.",
            "penstock_feed_skipped_splits_total",
        ),
    ]
    skipped: Annotated[list[Skipped], figure("The latest of these splits, up to 100.")]
    rates: Annotated[Rates, figure("Averages of the last `window_seconds`.")] = Rates(
        batches=0.0, samples=0.0, bytes=0.0
    )
