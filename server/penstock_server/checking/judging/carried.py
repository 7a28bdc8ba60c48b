"""Findings about what a feed loses or repeats, compared with a plain loop over its generator."""

from __future__ import annotations

from penstock_proto.messages import FeedPlan

from ..findings.findings import NOTE, WARNING, Finding
from ..observing.messages import Carried
from ..observing.repeats import BEGINS, ENDLESS, PIECES, REPEATS, RESTARTS, SEGMENTS, UNEVEN, UNKNOWN

_SEVERAL = 10
"""Passes of an epoch in the advice."""

_AS_SPLITS = "give what the generator goes through as splits= (files, or ranges of rows)"


def lost(carried: Carried, plan: FeedPlan) -> Finding:
    """Return the finding about what a generator carries on."""
    if carried.kind == SEGMENTS:
        return _lost_order(carried)
    if carried.kind == UNEVEN:
        return _uneven(carried)
    if carried.kind == PIECES:
        return _pieces(carried, plan.lanes)
    if carried.kind == ENDLESS:
        return _endless(carried)
    if carried.kind == REPEATS:
        return repeating("0 and 1", carried)
    if carried.kind == RESTARTS:
        return _restarts(carried, plan.segment)
    if carried.kind == BEGINS:
        return _begins(carried, plan.segment or 0)
    if carried.kind == UNKNOWN:
        return _unknown(carried)
    return _epochs(carried)


def repeating(segments: str, carried: Carried | None) -> Finding:
    """Return the finding that all segments are the same.

    Args:
        segments: the numbers of those that were compared.
        carried: what the comparison with a plain loop has found, or None.
    """
    fix = (
        "let the generator draw from `rng`, or from random or numpy.random without a seed of its own, or take the "
        "segment's number as its first parameter. If it goes through its data in order, give the data as splits= "
        f"(files, or ranges of rows), or give {_one_pass(carried)}"
    )
    what = f"segments {segments} have the same samples, so every segment repeats them"
    return Finding(WARNING, "segments", what, fix=fix)


def _one_pass(carried: Carried | None) -> str:
    """Return the advice to make an epoch one pass."""
    count = 0 if carried is None else carried.one_pass
    numbers = f"segment={count} and samples={count}" if count else "segment= and samples= of one pass"
    return f"{numbers}: each epoch is then a whole pass, which one worker makes"


def _passes(carried: Carried) -> str:
    """Return the same advice, and what lets several workers share the work."""
    count, text = carried.one_pass, _one_pass(carried)
    if carried.alike:
        return f"{text}. The generator makes all passes alike, so only splits= let several workers share the work"
    several = f"samples={_SEVERAL * count} ({_SEVERAL} passes in an epoch)" if count else "samples= of several passes"
    return f"{text}. With {several}, several workers make whole passes at a time, and the stream mixes them"


def _again(carried: Carried) -> str:
    return f"the generator goes through the same {carried.compared} {carried.unit} again and again"


def _lost_order(carried: Carried) -> Finding:
    count, unit = carried.compared, carried.unit
    return Finding(
        WARNING,
        "segments",
        f"{count} {unit} of an epoch have only {count - carried.different} different ones, and a plain "
        f"loop over the generator yields {count}: each segment starts the generator again, so {unit} come twice "
        "and others are left out",
        fix=f"{_AS_SPLITS}, or serve an object with __len__ and __getitem__, and let shuffle= shuffle; or give "
        f"{_passes(carried)}. With other segments, a generator must draw each sample at random",
    )


def _uneven(carried: Carried) -> Finding:
    return Finding(
        WARNING,
        "segments",
        f"{_again(carried)}. Each segment starts it again and ends within a pass, so the first {carried.unit} of a "
        "pass come more often than the others",
        fix=f"give {_passes(carried)}",
    )


def _begins(carried: Carried, segment: int) -> Finding:
    passes = segment // carried.one_pass
    return Finding(
        WARNING,
        "segments",
        f"each segment begins with the same {carried.compared} {carried.unit} in the same order, as the generator "
        "shuffles after a pass over its data, not before the first one. A plain loop has that order once, the feed in "
        f"{'each pass' if passes == 1 else f'one of {passes} passes'}",
        fix="shuffle before each pass, so before the first one, too",
    )


def _pieces(carried: Carried, lanes: int) -> Finding:
    return Finding(
        NOTE,
        "segments",
        f"{_again(carried)}. Segments are whole passes, but the stream is made of up to {lanes} of them at a time: "
        f"{carried.compared} {carried.unit} in a row are parts of several passes",
        fix=f"if they must be a whole pass, as in an evaluation, give samples={carried.one_pass}: each epoch is then "
        "one, which one worker makes",
    )


def _endless(carried: Carried) -> Finding:
    return Finding(
        WARNING,
        "epochs",
        f"{_again(carried)}, so an epoch may never end, and only one worker reads each split",
        fix=f"let it end after one pass; or leave splits= out and give {_passes(carried)}",
    )


def _restarts(carried: Carried, segment: int | None) -> Finding:
    count, unit = carried.compared, carried.unit
    is_pass = carried.one_pass > 0 and segment == carried.one_pass
    in_order = f". If it goes through its data in order, give {_passes(carried)}"
    return Finding(
        WARNING,
        "epochs",
        f"each epoch has the same samples in the same order, and in a plain loop over the generator "
        f"{carried.different} of the next {count} {unit} differ from the first {count}: the feed starts the generator "
        "again for each epoch, and with it a random generator of its own, and its place in the data",
        fix="draw from random or numpy.random, which are seeded for each segment and epoch, or let the generator (or "
        f"the constructor) take `epoch` and add it to the seed{'' if is_pass else in_order}",
    )


def _unknown(carried: Carried) -> Finding:
    return Finding(
        NOTE,
        "plain loop",
        f"the feed could not be compared with a plain loop over its generator: {carried.why}. So it is unknown whether "
        "segments or epochs repeat samples that such a loop does not repeat",
    )


def _epochs(carried: Carried) -> Finding:
    return Finding(
        WARNING,
        "epochs",
        f"each epoch has the same samples in the same order, and in a plain loop over one object {carried.different} "
        f"of {carried.compared} {carried.unit} differ from one pass to the next: the feed makes the object again for "
        "each split and epoch, and its own random generator begins again with it",
        fix="draw from random or numpy.random, which are seeded for each split and epoch, or let the constructor take "
        "`epoch` and add it to the seed. If only the order differs, shuffle= can shuffle",
    )
