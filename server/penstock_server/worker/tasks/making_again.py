"""Answers a spot check: makes samples again that another worker has made (spot_checks.py), and says what differs.

If they differ, this worker looks for the other worker's samples in other splits. If they are there, the workers divide
or shuffle the rows differently, so rows are lost. Errors that user code raises meanwhile are ignored: they come up
again when the feed is read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from penstock_proto import messages as m

from ...feed.combined.feed_kinds import is_shared
from ...feed.feed_warnings import MAY_LOSE_ROWS
from ...feed.options.plan_sizes import segment_count
from ...worker_state.activity import ActivityPage
from ..batch.sample_spec import DIGEST, digests_of, paths_of
from ..batch.shares import stretch_of_share
from ..failures import pass_on
from ..isolation.randomness import GlobalRandomness
from ..items.keras_items import KerasItems
from ..reading.indexed import IndexRun
from ..reading.loaded_feed import LoadedFeed
from ..reading.opening import opener_of
from ..reading.split_list import SharedSplits, SplitSequence
from ..reading.split_opener import SplitOpener
from ..reading.transforming import transform_of
from .mixed_feed import lists_of_parts

SEARCH_SECONDS = 1.0
"""How long to look for the other worker's samples in other splits."""

_MOST_REPEATED = 0.05
_EXPECTED = 5
"""Samples are rows of a data set if at most this share of them comes twice, or if none comes twice within a split,
although so many would if they were drawn at random."""

_NO_RUN = 0
"""Shown on the activity page, as no run is to blame if user code ends this process now."""


class _Splits:
    """Makes samples of the splits of a feed, or of one part of a mix."""

    def __init__(
        self, feed: LoadedFeed, part: LoadedFeed, splits: SplitSequence, opener: SplitOpener, epoch: int
    ) -> None:
        self._named = part.declared.splits is not None
        self._splits = splits
        self._opener = opener
        self._epoch = epoch
        self.rows_move_within = is_shared(part.declared)
        """Whether a sample at another place of its own split is another row of the data."""

    def __len__(self) -> int:
        return len(self._splits)

    def samples(self, index: int, count: int | None) -> Generator[Any, None, None]:
        """Yield the first `count` samples of a split; all of them if that is None."""
        opened = self._opener.open(self._splits[index], index, self._epoch)
        try:
            number = 0
            while number != count and (found := opened.first()):
                yield found[0]
                number += 1
        finally:
            opened.close()

    def show(self, index: int) -> str:
        """Return a short text for a split."""
        text = self._opener.show(self._splits[index])
        return f"split {text}" if self._named else text

    def checked_at(self, index: int, number: int) -> tuple[int, int]:
        """Return the place and the number by which `penstock check` knows a sample."""
        return index, number


class _Batches:
    """Makes samples of the batches of an indexable feed."""

    rows_move_within = True

    def __init__(self, run: IndexRun, length: int, rows: int) -> None:
        self._run = run
        self._length = length
        self._rows = rows

    def __len__(self) -> int:
        return -(-self._length // self._rows)

    def samples(self, index: int, count: int | None) -> Generator[Any, None, None]:
        return self._run.first_samples(index, self._rows if count is None else count)

    def show(self, index: int) -> str:
        return f"batch {index}"

    def checked_at(self, index: int, number: int) -> tuple[int, int]:
        return divmod(self._run.item(index, number), self._rows)


def make_again(
    check: m.SpotCheck,
    feed: LoadedFeed,
    lists: Mapping[int, SharedSplits],
    randomness: GlobalRandomness,
    page: ActivityPage,
) -> m.SpotChecked:
    """Make the samples of `check` again, and return the answer. `lists`: the lists of splits, by number."""
    with _errors_ignored():
        if check.spec is not None:
            feed.learn(check.spec)
        source = _source(check, feed, lists, randomness, page)
        if source is not None and check.index < len(source):
            return _Again(check, feed, source).answer()
    return m.SpotChecked(check.run)


def _source(
    check: m.SpotCheck,
    feed: LoadedFeed,
    lists: Mapping[int, SharedSplits],
    randomness: GlobalRandomness,
    page: ActivityPage,
) -> _Splits | _Batches | None:
    """Return where to make the samples; None if this worker cannot make them now."""
    plan = feed.plan
    if plan.length is not None:
        items = feed.items
        if isinstance(items, KerasItems) and not items.is_at(check.epoch):
            return None  # computing the state of another epoch may take long
        run = IndexRun(
            plan,
            items,
            epoch=check.epoch,
            collate=feed.collate,
            randomness=randomness,
            page=page,
            run=_NO_RUN,
            transform=transform_of(feed.declared, plan.seed, randomness),
            weights=feed.declared.weights,
        )
        return _Batches(run, plan.length, plan.batch_size or 1)
    shared, part = lists.get(check.splits), feed.parts.get(check.part, feed)
    splits: SplitSequence
    if feed.parts:
        if shared is None or part is feed:
            return None
        splits = lists_of_parts(feed, shared)[list(feed.parts).index(check.part)]
    elif plan.segment is not None:
        splits = range(segment_count(plan))
    elif shared is not None:
        splits = shared
    else:
        return None
    stretch = 1 if feed.parts else stretch_of_share(plan, feed.layout)
    opener = opener_of(part, randomness, page, _NO_RUN, stretch=stretch, drops=feed.drops, beside=True)
    return _Splits(feed, part, splits, opener, check.epoch)


class _Again:
    def __init__(self, check: m.SpotCheck, feed: LoadedFeed, source: _Splits | _Batches) -> None:
        self._check = check
        self._feed = feed
        self._source = source
        self._paths: list[str] = []
        width = len(check.digests) // check.samples
        self._made = [check.digests[at : at + width] for at in range(0, len(check.digests), width or 1)]

    def answer(self) -> m.SpotChecked:
        check = self._check
        found = self._make()
        number = next((n for n, (a, b) in enumerate(zip(self._made, found, strict=False)) if a != b), None)
        if number is None and len(found) == len(self._made):
            return m.SpotChecked(check.run)
        name, place = self._feed.plan.name, self._source.show(check.index)
        if number is None:
            number = min(len(found), len(self._made))
            differs = f"feed {name}: {place} ended at another sample when it was made again"
        else:
            which = self._which(found[number], self._made[number])
            differs = f"feed {name}: {place} gave another sample {number}{which} when it was made again"
        elsewhere = self._found_elsewhere(found)
        lost = ""
        if elsewhere is not None:
            lost = (
                f"feed {name}: rows are lost, and others come twice, because they are divided or shuffled differently "
                f"each time: what {place} gave once, {elsewhere} gives another time. Give what shuffles or "
                "divides them a seed that is the same in every process; `penstock check` finds the line"
            )
        at, number = self._source.checked_at(check.index, number)
        warning = f"{differs}. {MAY_LOSE_ROWS}"
        return m.SpotChecked(check.run, warning[:1024], lost[:1024], at, number)

    def _make(self) -> list[bytes]:
        """Return the digests of the samples, made here. There is one more if the split should have ended there."""
        count = self._check.samples + self._check.ended
        digests = []
        for sample in self._source.samples(self._check.index, count):
            self._paths = paths_of(sample)
            digests.append(digests_of(sample))
        return digests

    def _which(self, found: bytes, made: bytes) -> str:
        """Name the leaves that differ, if not all do."""
        if len(found) != len(made) or len(found) != len(self._paths) * DIGEST:
            return ""
        starts = range(0, len(made), DIGEST)
        differ = [
            f"sample{path}"
            for path, at in zip(self._paths, starts, strict=True)
            if found[at : at + DIGEST] != made[at : at + DIGEST]
        ]
        if len(self._paths) == 1:
            return ""
        return f" ({', '.join(differ[:4])}{', ...' if len(differ) > 4 else ''})"

    def _found_elsewhere(self, found: list[bytes]) -> str | None:
        """Look for samples of the other worker in other splits of this one. Return the name of such a split if enough
        of them are there."""
        wanted = {a: n for n, (a, b) in enumerate(zip(self._made, found, strict=False)) if a != b}
        if self._feed.plan.segment is not None or len(wanted) < 2:
            return None
        rows, until, index = Rows(), time.monotonic() + SEARCH_SECONDS, 0
        while index < len(self._source) and time.monotonic() < until:
            samples = self._source.samples(index, None)
            with _errors_ignored(), contextlib.closing(samples):
                for number, sample in enumerate(samples):
                    rows.add(index, number, digests_of(sample))
                    if time.monotonic() > until:
                        break
            index += 1
        here, elsewhere = self._check.index, []
        for digest, number in wanted.items():
            at = rows.places.get(digest, (here, number))
            if at[0] != here or (at[1] != number and self._source.rows_move_within):
                elsewhere.append(at)
        if len(elsewhere) < max(2, len(wanted) / 4) or not rows.are_rows:
            return None
        return self._source.show(min(elsewhere)[0])


@contextlib.contextmanager
def _errors_ignored() -> Iterator[None]:
    """Ignore errors of user code, unless the user asked for them."""
    try:
        yield
    except Exception as error:
        pass_on(error)


class Rows:
    """The samples that a search has read.

    Attributes:
        places: the last place of each, by digest: its split, and its number there.
    """

    def __init__(self) -> None:
        self.places: dict[bytes, tuple[int, int]] = {}
        self._total = 0
        self._splits = 0
        self._again = 0
        """How many samples came twice within a split."""

    def add(self, index: int, number: int, digest: bytes) -> None:
        """Add a sample. The samples of a split come one after another."""
        self._total += 1
        self._splits += number == 0
        self._again += self.places.get(digest, (-1, 0))[0] == index
        self.places[digest] = index, number

    @property
    def are_rows(self) -> bool:
        """Whether the samples are rows of a data set, each of which a split yields once, and not drawn from a few
        values, or from a data set at random.

        Drawn at random, a number of them would come twice within a split.
        """
        if self._total - len(self.places) <= _MOST_REPEATED * self._total:
            return True
        each = self._total / max(1, self._splits)
        return self._again == 0 and self._total * each / (2 * len(self.places)) >= _EXPECTED
