"""Detects feeds that are not reproducible: makes a first sample again in another worker, and compares the two.

The worker that looks at a feed's first sample keeps a digest of each leaf. Another worker then makes the first samples
of another split and of the same split. If they differ, the feed depends on something that Penstock does not control. If
two segments are equal, every segment repeats the same samples. Either causes a warning. Errors that user code raises
meanwhile do not: they come up again when the feed is read.

Workers of a host that joins do the same. There an error, or a sample that differs in the same way each time, shows that
this host is unfit: it has other files, or other versions of libraries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock_proto import PenstockError

from ...feed.feed_warnings import MAY_LOSE_ROWS
from ...worker_state.activity import ActivityPage
from ..batch.sample_spec import DIGEST, digests_of, paths_of
from ..failures import describe
from ..isolation.randomness import GlobalRandomness
from .first_sample import Probe
from .loaded_feed import LoadedFeed
from .opening import opener_of
from .split_list import SplitSequence

_ENOUGH = 16
"""Samples that must be equal before two segments count as equal."""


class Comparison(NamedTuple):
    """The result of a comparison: a warning, and why this host is unfit if the sample was made on another one. Each may
    be empty."""

    warning: str = ""
    unfit: str = ""


class ReproducibilityCheck:
    """Makes samples of a feed again in this process. `splits` is its list of splits; an indexable feed has none."""

    def __init__(
        self,
        feed: LoadedFeed,
        splits: Sequence[Any] | SplitSequence,
        randomness: GlobalRandomness,
        page: ActivityPage,
        run: int,
    ) -> None:
        self._feed = feed
        self._splits = splits
        self._randomness = randomness
        self._page = page
        self._run = run
        self._probe = Probe(feed, randomness, page, run)
        self._paths: list[str] = []

    def with_what_was_seen(self, index: int, digests: bytes) -> Comparison:
        """Compare a sample that another worker has made with the same one made here.

        Args:
            index: the index of the split (or item) whose first sample another worker has made.
            digests: the digests of that sample's leaves, and of a batch that `batch_transform=` has made of it.
        """
        if self._feed.plan.length is not None:
            return self._item(digests)
        count, other = len(self._splits), None
        if count > 1:
            with contextlib.suppress(PenstockError):
                other = self._first_samples((index + 1) % count, 1)
        found = self._first_samples(index, 1)
        if found != [digests]:
            constant = self._first_samples(index, 1) == found
            return self._differs(self._place(index), found, digests, constant)
        if self._feed.plan.segment is not None and other == found:
            return Comparison(self._equal_segments())
        return Comparison()

    def _item(self, digests: bytes) -> Comparison:
        used = self._feed.items.is_at(0)
        first = before = self._item_digests(0)
        again = self._item_after_another()
        if again != first:  # it may draw random numbers at its first use, with which no stream begins
            before, again = again, self._item_after_another()
        if first != digests and not used:
            return self._differs("item 0", [first], digests, again == before)
        return Comparison() if again == before else self._differs("item 0", [again], before, False)

    def _item_after_another(self) -> bytes:
        if self._feed.plan.length != 1:
            self._item_digests(1)
        return self._item_digests(0)

    def _item_digests(self, index: int) -> bytes:
        return self._digests(self._probe.item(index, warm=index != 0))

    def _equal_segments(self) -> str:
        """Compare more segments, because two different ones may begin alike: a game has one opening, a coin two
        sides."""
        compared, first = 0, 0
        while compared < _ENOUGH and first + 1 < min(len(self._splits), _ENOUGH + 1):
            one, other = (self._first_samples(segment, _ENOUGH) for segment in (first, first + 1))
            if one != other:
                return ""
            compared += len(one)
            first += 1
        if compared < _ENOUGH:
            return ""
        of = "" if self._feed.component is None else f" of {self._feed.component}"
        return (
            f"feed {self._feed.plan.name}: segments 0 and {first}{of} have the same samples, as far as these were "
            "compared, so every segment repeats them. Let the generator draw from `rng`, or from random or "
            "numpy.random without a seed of its own (Penstock seeds them for each segment), or take the segment's "
            "number as its first parameter. If it goes through its data in order, give the data as splits= (files, or "
            "ranges of rows), or give segment= and samples= of one pass"
        )

    def _first_samples(self, index: int, count: int) -> list[bytes]:
        """Return the digests of the first samples of a split."""
        opener = opener_of(self._feed, self._randomness, self._page, self._run, beside=True)
        opened = opener.open(self._splits[index], index, 0)
        found = []
        try:
            for _ in range(count):
                for sample in opened.first():
                    found.append(self._digests(sample))
        finally:
            opened.close()
        return found

    def _digests(self, sample: Any) -> bytes:
        self._paths = [f"sample{path}" for path in paths_of(sample)]
        digests, made = digests_of(sample), self._probe.transformed(sample)
        if made is None:
            return digests
        self._paths += [f"batch{path} after batch_transform=" for path in paths_of(made)]
        return digests + digests_of(made)

    def _place(self, index: int) -> str:
        opener = opener_of(self._feed, self._randomness, self._page, self._run)
        piece = "" if self._feed.declared.splits is None else "split "
        return f"{piece}{opener.show(self._splits[index])}"

    def _differs(self, place: str, found: list[bytes], digests: bytes, constant: bool) -> Comparison:
        """Report that a sample differs from the one that was seen. `constant`: this process makes the same one each
        time."""
        which = ""
        if found and len(found[0]) == len(digests) == len(self._paths) * DIGEST > DIGEST:
            paths = [
                path
                for path, start in zip(self._paths, range(0, len(digests), DIGEST), strict=True)
                if found[0][start : start + DIGEST] != digests[start : start + DIGEST]
            ]
            which = f" ({', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''})"
        differs = f"feed {self._feed.plan.name}: {place} gave a different first sample{which}"
        unfit = (
            f"{differs} there, each time that it was made: make sure that both hosts have the same files and the same "
            "versions of the libraries that the feed uses"
        )
        return Comparison(f"{differs} when it was made again. {MAY_LOSE_ROWS}", unfit if constant else "")


def check_reproducibility(
    feed: LoadedFeed,
    splits: Sequence[Any] | SplitSequence,
    index: int,
    digests: bytes,
    randomness: GlobalRandomness,
    page: ActivityPage,
    run: int,
) -> Comparison:
    """Compare the feed's first sample with `digests`."""
    try:
        return ReproducibilityCheck(feed, splits, randomness, page, run).with_what_was_seen(index, digests)
    except BaseException as error:
        if not isinstance(error, PenstockError):
            return Comparison(unfit=f"feed {feed.plan.name}: it {describe(error)}")
        return Comparison(unfit=f"feed {feed.plan.name}, {feed.plan.piece} {error.split}: {error.message}")
