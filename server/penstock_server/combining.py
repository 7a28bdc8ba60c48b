"""`Feed.zip` and `Feed.mix`: feeds that are made of other feeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from .mixing import mixed
from .zipping import zipped


class Combining:
    """The constructors of `Feed` that combine feeds."""

    @classmethod
    def zip(cls, *feeds: Any, uneven: str = "warn", **options: Any) -> Self:
        """Return a feed whose samples are those of other feeds side by side: `Feed.zip(images, labels)` yields pairs.

        Split k of one feed is read together with split k of the others, and together they are one split. Segments are
        paired with those of the same number, and items of indexable objects with those of the same index. It ends with
        the shortest: of the lists of splits, and within each pair. Each feed has its own generator, arguments,
        transforms and `rng`.

        Args:
            feeds: two feeds or more. A sample is a tuple of theirs. With one dict of feeds, as in
                `Feed.zip({"image": images, "label": labels})`, it is a dict with the same keys.
            uneven: what happens if the lists of splits, or the samples of a pair, differ in number. "warn": the log
                says so, and what is left out is listed in the status. "raise": it is an error. "allow": nothing. (To
                learn whether there is more, one sample more is made of the longer generator, except with "allow".)
            options: other attributes of `Feed`, such as `shuffle`, `seed` and `lanes`, which hold for all of them
                together. By default `batch_size` is that of the feeds. If they yield whole batches of the same sizes,
                `rebatch` takes these apart. `cache` is refused, here and in the feeds.

        Raises:
            TypeError, ValueError: the feeds cannot be zipped, or one sets an option that must be given here; the
                message says what to do.
        """
        make: Any = cls  # a Feed
        feed: Self = make(**zipped(feeds, uneven, options))
        return feed

    @classmethod
    def mix(
        cls,
        feeds: Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
        stop: str = "first",
        **options: Any,
    ) -> Self:
        """Return a feed whose samples are drawn from other feeds: `Feed.mix({"web": a, "books": b}, weights=...)`.

        For each sample a feed is drawn with the probability of its weight, and its next sample is taken. The draws
        depend on the seed, the epoch, the lane and the number of the sample in the lane. So the mix is the same with
        any number of workers, after faults and from a state, and other in each epoch. Each lane has splits of each
        feed. So there are at most as many lanes as the feed with the fewest splits or segments has.

        Args:
            feeds: two feeds or more, by name. They have splits, segments, or take `shard`, perhaps without end; objects
                that can be indexed are refused. Their samples have the same structure, dtypes and shapes. Each may have
                `cache`, `cache_version` and `rebatch` of its own; the mix has none.
            weights: how often each is drawn, by name: any numbers greater than 0. By default all are equal.
            stop: what happens when a feed that is drawn has no more samples. "first": the lane ends, so that the
                weights hold to the end, and what is left of the other feeds is not read. "all": the feed is left out
                from then on, and the epoch ends when all have ended; each of their samples comes once.
            options: other attributes of `Feed`, such as `shuffle`, `seed`, `lanes` and `transform`, which hold for all
                of them together. By default `batch_size` is that of the feeds. `samples` follows from those of the
                feeds with stop="all". `interleave` counts the splits of each feed that a lane reads at once when it
                shuffles: by default 4, or more as long as all feeds together have at most 16.

        Raises:
            TypeError, ValueError: the feeds cannot be mixed, or one sets an option that must be given here; the message
                says what to do.
        """
        make: Any = cls  # a Feed
        feed: Self = make(**mixed(feeds, weights, stop, options))
        return feed
