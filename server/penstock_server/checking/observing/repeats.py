"""Compares digests of samples: what a plain loop over a generator yields, and what a feed's segments and epochs yield.

The digest of a sample consists of the digests of its leaves. Does no I/O.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from ...worker.batch.sample_spec import DIGEST
from .messages import Carried

EPOCHS, SEGMENTS, UNEVEN, ENDLESS, PIECES = "epochs", "segments", "uneven", "endless", "pieces"
REPEATS, RESTARTS, BEGINS, UNKNOWN = "repeats", "restarts", "begins", "unknown"

FEWEST = 8
"""Fewer samples would agree or differ by chance."""

_TINY_PASSES = 16
"""So many passes over fewer samples do not have the same order by chance."""

_FEWEST_OF_A_LEAF = 16
"""The same for one leaf of several: it may have few different values."""


def unknown(why: str) -> Carried:
    """Return the report that a feed could not be compared with a plain loop."""
    return Carried(UNKNOWN, 0, 0, why=why)


def as_whole(sample: bytes) -> bytes:
    """Return the digest of a sample as one leaf."""
    return hashlib.blake2b(sample, digest_size=DIGEST).digest()


def bits(pieces: Iterable[Hashable]) -> float:
    """Return how many bits of evidence it is that two of these agree: 0 if all are the same."""
    counts = Counter(pieces)
    total = counts.total()
    return -math.log2(sum((count / total) ** 2 for count in counts.values())) if total else 0.0


def one_pass(plain: Sequence[bytes], *, each_leaf: bool = False) -> int:
    """Return after how many samples a loop has gone through its data, if it then does so again and again; otherwise 0.

    Args:
        plain: the digests of the loop's samples.
        each_leaf: leaves may go through their data on their own, while others have random numbers.
    """
    passes = [0]
    for of_leaf in leaves_of(plain) if each_leaf else [plain]:
        period = _before_a_repeat(of_leaf)
        if period >= FEWEST and _is_each_pass(of_leaf, period):
            passes.append(period)
    return max(passes)


def tiny_pass(plain: Sequence[bytes]) -> int:
    """Return the number of samples of a pass that is too short for `one_pass`, if all passes have the same order;
    otherwise 0, also for a constant."""
    period = _before_a_repeat(plain)
    exact = all(one == other for one, other in zip(plain, plain[period:], strict=False))
    return period if 1 < period < FEWEST and len(plain) >= _TINY_PASSES * period and exact else 0


def leaves_of(samples: Sequence[bytes]) -> list[list[bytes]]:
    """Return the digests of each leaf."""
    width = min(map(len, samples), default=0)
    return [[sample[leaf : leaf + DIGEST] for sample in samples] for leaf in range(0, width, DIGEST)]


def agreeing(one: Sequence[bytes], other: Sequence[bytes]) -> set[int]:
    """Return the numbers of the leaves in which two runs agree, as far as both were read."""
    count = min(len(one), len(other))
    pairs = zip(leaves_of(one[:count]), leaves_of(other[:count]), strict=False)
    return {number for number, (ours, theirs) in enumerate(pairs) if ours == theirs}


def is_alike(one: Sequence[bytes], other: Sequence[bytes]) -> bool:
    """Return whether two runs of a generator go through the same samples in the same order, at least in a leaf."""
    leaves = leaves_of(one[: len(other)])
    return any(len(set(leaves[number])) > 1 for number in agreeing(one, other))


def reordered(plain: Sequence[bytes], rows: int) -> set[int]:
    """Return the numbers of the leaves that have the same values in the first and the second pass of `rows` samples, in
    another order."""
    first, second = leaves_of(plain[:rows]), leaves_of(plain[rows : 2 * rows])
    pairs = enumerate(zip(first, second, strict=False))
    return {number for number, (one, other) in pairs if one != other and sorted(one) == sorted(other)}


def lost_by_segments(plain: Sequence[bytes], reads: Sequence[tuple[int, bytes]], rows: float = 1) -> Carried | None:
    """Compare the samples of a plain loop with those of an epoch in segments: their digests, and their numbers in their
    segments.

    If the loop goes through its data before it repeats any of it, and segments repeat some much sooner, an order is
    lost. Each leaf is compared on its own, since others may have random numbers.

    Args:
        plain: the digests of the loop.
        reads: the numbers and the digests of the segments.
        rows: how many of them a batch has: a generator may draw batches at random.
    """
    numbers = [number for number, _ in reads]
    found = None
    for of_leaf, read in zip(leaves_of(plain), leaves_of([sample for _, sample in reads]), strict=False):
        repeats = _lost(of_leaf, [*zip(numbers, read, strict=True)], rows)
        if repeats is not None and (found is None or repeats.compared > found.compared):
            found = repeats
    return found


def lost_by_epochs(
    passes: tuple[Sequence[bytes], Sequence[bytes]],
    epochs: tuple[Sequence[bytes], Sequence[bytes]],
    *,
    shuffled: bool,
) -> tuple[int, int] | None:
    """Compare two passes of a plain loop with two epochs of a feed.

    If the epochs are the same, and the passes differ, return how many samples were compared, and how many differ. It is
    enough if a leaf has another order in the second pass, as others may have random numbers.

    Args:
        passes: the digests of the samples of both passes.
        epochs: those of both epochs.
        shuffled: whether the feed shuffles the samples, so it does not matter if only their order is lost.
    """
    first, second = passes
    count = min(map(len, (*passes, *epochs)))
    if count < FEWEST or (shuffled and sorted(first) == sorted(second)):
        return None
    if found := _differs(passes, epochs, count):
        return count, found
    if shuffled or count < _FEWEST_OF_A_LEAF:
        return None
    for leaf in zip(*map(leaves_of, (first, second, *epochs)), strict=False):
        if sorted(leaf[0]) == sorted(leaf[1]) and (found := _differs(leaf[:2], leaf[2:], count)):
            return count, found
    return None


def _differs(passes: Sequence[Sequence[bytes]], epochs: Sequence[Sequence[bytes]], count: int) -> int:
    """Return how many samples of two passes differ; 0 if the epochs differ, too."""
    if epochs[0][:count] != epochs[1][:count]:
        return 0
    return sum(one != other for one, other in zip(passes[0][:count], passes[1][:count], strict=True))


def _lost(plain: Sequence[bytes], reads: Sequence[tuple[int, bytes]], rows: float) -> Carried | None:
    period = _before_a_repeat(plain)
    compared = min(period, len(reads))
    if compared < FEWEST:
        return None
    seen: dict[bytes, int] = {}
    repeats = 0
    for number, digest in reads[:compared]:
        repeats += seen.setdefault(digest, number) != number  # generators may begin alike
    goes_through = _is_each_pass(plain, period)
    enough = max(2, compared // 20) if goes_through else FEWEST * rows
    return Carried(SEGMENTS, compared, repeats, period if goes_through else 0) if repeats >= enough else None


def _is_each_pass(plain: Sequence[bytes], period: int) -> bool:
    """Return whether a loop makes several passes of `period` samples, and each has the same samples."""
    passes = [set(plain[start : start + period]) for start in range(0, len(plain) - period + 1, period)]
    return len(passes) > 1 and all(one == passes[0] for one in passes)


def _before_a_repeat(plain: Sequence[bytes]) -> int:
    """Return how many samples come before the first one that came already."""
    seen: set[bytes] = set()
    for digest in plain:
        if digest in seen:
            break
        seen.add(digest)
    return len(seen)
