"""Lists the splits of a mix, and reads the first sample of each component.

The list that workers share holds a description of the mix, and then the splits of all components one after another. So
the digest of the list changes with the weights, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock_proto import PenstockError, SpecError
from penstock_proto.messages import MAX_SHAPES, FirstSample
from penstock_proto.spec import Leaf, Spec, leaves

from ...feed.combined.zipped import zip_warnings
from ...feed.options.plan_sizes import ENDLESS, segment_count
from ...worker_state.activity import ActivityPage
from ..batch.sample_spec import DIGEST
from ..isolation.randomness import GlobalRandomness
from ..lane.mixed_lane import live_lanes
from ..reading.first_sample import Probe
from ..reading.loaded_feed import LoadedFeed
from ..reading.reproducibility import Comparison, check_reproducibility
from ..reading.split_list import ListPart, SharedSplits, SplitSequence, list_splits
from ..verification.file_versions import FileVersions

_INDEX = 8
"""Bytes of a split's index, which precedes the digests of its first sample."""


class MixedLists:
    """The splits of each component in one epoch, listed in this process.

    Args:
        feed: the mix.
        epoch: from 0.
        randomness: the random numbers of this process.
        page: the activity page, on which calls of user code are announced for `run`.
        run: the daemon's number of the run.

    Raises:
        FeedError, GeneratorError: as `list_splits`, with the component's name.
    """

    def __init__(
        self, feed: LoadedFeed, epoch: int, randomness: GlobalRandomness, page: ActivityPage, run: int
    ) -> None:
        self._feed = feed
        self._lists: dict[str, Sequence[Any]] = {}
        for label, part in feed.parts.items():
            if part.cache is not None:
                part.cache.tidy()
            with naming(label):
                if part.plan.segment is not None:
                    self._lists[label] = range(segment_count(part.plan))
                else:
                    self._lists[label] = list_splits(part.declared, part.plan, epoch, randomness, page, run)
        self._counts = {label: len(splits) for label, splits in self._lists.items()}

    @property
    def shared(self) -> list[Any]:
        """The contents of the list that workers share."""
        feed = self._feed
        parts = [
            (label, feed.mixed.weights[label], part.plan.segment, part.plan.samples, self._counts[label])
            for label, part in feed.parts.items()
        ]
        listed = [split for splits in self._lists.values() if not isinstance(splits, range) for split in splits]
        return [(feed.mixed.stop, parts), *listed]

    @property
    def versions(self) -> FileVersions:
        """The versions of the files that the splits name."""
        return FileVersions.of((part.declared, self._lists[label]) for label, part in self._feed.parts.items())

    @property
    def count(self) -> int:
        """The number of splits to report to the coordinator. If a component has too few splits for all lanes, it is
        that component's number, and so the number of live lanes."""
        least, lanes = min(self._counts.values()), self._feed.plan.lanes
        return least if least < lanes else min(ENDLESS, sum(self._counts.values()))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the lists, for the log."""
        found = [text for part in self._feed.parts.values() for text in zip_warnings(part.declared, part.plan.name)]
        label, least = min(self._counts.items(), key=lambda item: item[1])
        plan = self._feed.plan
        if live_lanes(plan, self._counts.values()) < plan.lanes:
            piece = self._feed.parts[label].plan.piece
            found.append(
                f"feed {plan.name}: each lane of a mix needs {piece}s of each feed, and {label} has {least}, so there "
                f"are {least} lanes instead of {plan.lanes}, and no more workers than that have work. Divide {label} "
                f"more finely, or give lanes={least}"
            )
        return tuple(text[:1024] for text in found[:16])

    def look(self, epoch: int, randomness: GlobalRandomness, page: ActivityPage, run: int) -> tuple[Spec | None, int]:
        """Read the first sample of each component; see `Probe.look_at_splits`.

        Raises:
            FeedError, GeneratorError: as `look_at_splits`, for example if a component has no sample.
            SpecError: the samples of two components differ in structure, dtype or shape.
        """
        feed, sizes, specs, firsts = self._feed, [], {}, {}
        feed.set_first(None)
        for label, part in feed.parts.items():
            with naming(label):
                spec, nbytes = Probe(part, randomness, page, run).look_at_splits(self._lists[label], epoch)
            sizes.append(nbytes)
            if spec is not None:
                specs[label] = spec
            elif part.spec is not None:
                specs[label] = part.spec
            if part.first is not None:
                firsts[label] = part.first
        found = _same(specs)
        spec = found if feed.spec is None else None
        feed.learn(found)
        if len(firsts) == len(feed.parts):
            feed.set_first(_joined(list(firsts.values())))
        return spec, max(sizes)


def lists_of_parts(feed: LoadedFeed, shared: SharedSplits) -> list[SplitSequence]:
    """Return the splits of each component, from the list that `MixedLists` made in some worker.

    Raises:
        FeedError: the list cannot be unpickled.
    """
    _, parts = shared[0]
    found: list[SplitSequence] = []
    start = 1
    for part, (*_, count) in zip(feed.parts.values(), parts, strict=True):
        if part.plan.segment is not None:
            found.append(range(count))
        else:
            found.append(ListPart(shared, start, count))
            start += count
    return found


def check_mixed(
    feed: LoadedFeed, shared: SharedSplits, digests: bytes, randomness: GlobalRandomness, page: ActivityPage, run: int
) -> Comparison:
    """Compare the first sample of each component with that of another worker; see `check_reproducibility`."""
    each = len(digests) // len(feed.parts)
    for k, (part, splits) in enumerate(zip(feed.parts.values(), lists_of_parts(feed, shared), strict=True)):
        seen = digests[k * each : (k + 1) * each]
        index = int.from_bytes(seen[:_INDEX], "little")
        found = check_reproducibility(part, splits, index, seen[_INDEX:], randomness, page, run)
        if any(found):
            return found
    return Comparison()


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Add the component's name to errors that are raised in this context."""
    try:
        yield
    except PenstockError as error:
        error.args = (f"{label}: {error.message}", *error.args[1:])
        raise


def _joined(firsts: Sequence[FirstSample]) -> FirstSample:
    """Join the reports on the components' first samples. Their digests have one length, as their samples have one
    structure."""
    digests = b"".join(first.index.to_bytes(_INDEX, "little") + first.digests for first in firsts)
    if not all(first.digests for first in firsts) or len(digests) > DIGEST * MAX_SHAPES:
        digests = b""
    warnings = tuple(dict.fromkeys(text for first in firsts for text in first.warnings))
    return FirstSample(0, digests, sum(first.seconds for first in firsts), warnings[:16])


def _same(specs: dict[str, Spec]) -> Spec:
    """Return the spec that all components have.

    Raises:
        SpecError: two of them differ.
    """
    (label, spec), *others = specs.items()
    for other, theirs in others:
        if theirs != spec:
            raise SpecError(
                f"the samples of {label} and {other} differ, but all samples of a mix must be alike: "
                f"{_difference(label, spec, other, theirs)}. Let a transform= of {other} make samples like those of "
                f"{label}"
            )
    return spec


def _difference(label: str, spec: Spec, other: str, theirs: Spec) -> str:
    mine, their = dict(leaves(spec)), dict(leaves(theirs))
    for path in [*mine, *their]:
        one, two = mine.get(path), their.get(path)
        if one != two:
            return f"sample{path} is {_shown(one)} in {label}, and {_shown(two)} in {other}"
    return f"{label} yields {type(spec).__name__}, and {other} {type(theirs).__name__}"


def _shown(leaf: Leaf | None) -> str:
    return "missing" if leaf is None else str(leaf)
