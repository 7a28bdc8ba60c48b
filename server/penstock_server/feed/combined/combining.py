"""`Feed.zip` and `Feed.mix`: feeds that combine other feeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from .mixing import mixed
from .zipping import zipped


class Combining:
    """The constructors of `Feed` that combine feeds."""

    @classmethod
    def zip(cls, *feeds: Any, uneven: str = "warn", **options: Any) -> Self:
        """Return a feed that joins samples of several feeds, side by side: `Feed.zip(images, labels)` yields pairs.

        Split k of one feed is read together with split k of the others, and together they are one split. Segments are
        paired by their number, and items of indexable objects by their index. The shortest list of splits ends the
        epoch, and within a pair the shortest split ends the pair. Each feed has its own generator, arguments,
        transforms and `rng`.

        Args:
            feeds: two feeds or more. A sample is a tuple of their samples. With one dict of feeds, as in
                `Feed.zip({"image": images, "label": labels})`, it is a dict with the same keys.
            uneven: what happens if the lists of splits, or the samples of a pair, differ in number. "warn": the log
                says so, and the status lists what is left out. "raise": it is an error. "allow": nothing. (To learn
                whether there are more samples, the longer generator makes one sample more, except with "allow".)
            options: other attributes of `Feed`, such as `shuffle`, `seed` and `lanes`, which apply to the combined
                feed. By default `batch_size` is that of the feeds. If they yield whole batches of the same sizes,
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
        any number of workers, after faults and from a state, and different in each epoch. Each lane has splits of each
        feed. So there are at most as many lanes as splits or segments in the feed that has the fewest.

        Args:
            feeds: two feeds or more, by name. They have splits or segments, or take `shard`, and may be endless;
                indexable objects are refused. The feeds of a mix take its place, as "its name/their name", with the
                weights multiplied. Their samples have the same structure, dtypes and shapes. Each may have
                its own `cache` and `rebatch`; the mix has none.
            weights: how often each feed is drawn, by name: any numbers greater than 0. By default all are equal.
            stop: what happens when a drawn feed has no more samples. "first": the lane ends. So the weights hold to the
                end, and the rest of the other feeds is not read. "all": the feed is no longer drawn, and the epoch ends
                when all feeds have ended; each of their samples is served once.
            options: other attributes of `Feed`, such as `shuffle`, `seed`, `lanes` and `transform`, which apply to the
                combined feed. By default `batch_size` is that of the feeds. With stop="all", `samples` follows from
                those of the feeds. The `interleave` of `Shuffle` is the number of splits of each feed that a lane reads
                at once: by default 4, or more if all feeds together then have at most 16.

        Raises:
            TypeError, ValueError: the feeds cannot be mixed, or one sets an option that must be given here; the message
                says what to do.
        """
        make: Any = cls  # a Feed
        feed: Self = make(**mixed(feeds, weights, stop, options))
        return feed
