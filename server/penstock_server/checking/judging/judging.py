"""Judges the facts about a feed: what is wrong with it, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_proto.status.figures import size
from penstock_proto.text import named_split

from ...coordinator.stream.budget import enough
from ...feed.feed_warnings import mixing_warning, workers_warning
from ...feed.options.plan_sizes import pooled_lanes
from ..findings.findings import ERROR, NOTE, WARNING, Finding, by_severity
from ..observing.messages import Done, Failed, Imported, Library, Looked
from ..observing.recording import Recording
from ..observing.repeats import PIECES, REPEATS, UNEVEN, UNKNOWN
from .carried import lost, repeating
from .collecting import Facts
from .culprit import HASH
from .culprit_words import cause
from .runs import Outcome
from .sizes import Memory, fastest, pace_of, rate_text

_HEAVY = 150 << 20
"""Bytes of a library from which it is worth a note."""

_ENOUGH = 16
"""Samples that must be equal, over all segments, before segments count as equal."""

_MOST_DROPPED = 0.5
"""The share of the workers' time that may go into samples which other workers or lanes keep."""

_SAID_BY_REPEATING = (REPEATS, PIECES, UNEVEN)
"""What a plain loop shows of segments that repeat: the finding that they do gives the same advice."""


def judged(facts: Facts, memory: Memory | None, workers: int) -> list[Finding]:
    """Return the findings, the most severe first.

    Args:
        facts: the facts about the feed.
        memory: the memory of a stream; None if it is unknown.
        workers: how many workers the user wants to run.
    """
    first = facts.first
    found = [*_failures(first)]
    if first.imported is not None:
        found += _imports(first.imported)
    if first.imported is not None and first.looked is not None:
        found += _plan(first.imported, first.looked, workers)
    if memory is not None and memory.least > memory.allowed:
        found.append(
            Finding(
                ERROR,
                "memory",
                f"a stream needs at least {size(memory.least)}, and the daemon takes {size(memory.allowed)}",
                fix=f"give --memory {enough(memory.wanted)}, or make batches, turn= or shuffle= smaller",
            )
        )
    if first.imported is not None and first.done is not None:
        found += _reading(first.imported, first.done, facts, workers)
    if first.imported is not None:
        found += _carried(facts, first.imported)
        found += _undivided(facts, first.imported, workers)
    found += _runs(facts)
    return by_severity(found)


def _failures(first: Outcome) -> Iterator[Finding]:
    if first.failed is not None:
        yield _failure(first.failed)
    if first.hung:
        yield Finding(
            ERROR,
            "hang",
            f"nothing happened for {first.hung:.0f} s{_doing(first)}",
            first.site,
            "if it needs this long, give a longer --hang-timeout; a worker waits forever, unless penstock serve has "
            "--hang-timeout",
            first.output,
        )
    if first.ended:
        yield Finding(
            ERROR,
            "crash",
            f"the process {first.ended}{_doing(first)}",
            first.site,
            "a library has crashed, or your code ended the process: run that line on its own",
            first.output,
        )
    in_parts = first.imported is not None and first.imported.plan.items is not None
    for skipped in first.skipped[:3]:
        what = f"{skipped.split}: the rest is left out after {skipped.samples} samples"
        yield Finding(
            WARNING,
            "skipped",
            f"{skipped.split if in_parts else what}: {skipped.why}",
        )


def _doing(first: Outcome) -> str:
    """Return the words for what user code was doing, or an empty text if that is unknown."""
    if not first.doing:
        return ""
    if first.doing.startswith("importing "):
        return f" while {first.doing}"
    looked, plan = first.looked, None if first.imported is None else first.imported.plan
    is_split = looked is not None and looked.splits > 1 and plan is not None and plan.length is None
    return f" while it read {named_split(first.doing) if is_split else first.doing}"


def _failure(failed: Failed) -> Finding:
    error = failed.error
    split = f" ({named_split(error.split)})" if error.split else ""
    about = {"importing": "import", "listing": "splits", "looking": "first sample"}.get(failed.doing, "sample")
    return Finding(ERROR, about, f"{error.message}{split}", failed.site, traceback=error.remote_traceback or "")


def _imports(imported: Imported) -> Iterator[Finding]:
    for library in imported.libraries:
        if library.name == "tensorflow":
            yield _tensorflow(library, imported.keras)
    heavy = [one for one in imported.libraries if one.nbytes >= _HEAVY or one.name == "tensorflow"]
    for library in heavy:
        brings_another = any(library.name in one.chain for one in heavy)
        if library.name != "tensorflow" and not brings_another:
            yield Finding(
                NOTE,
                "import",
                f"{library.name} is imported: {library.seconds:.1f} s and {size(library.nbytes)} in a worker",
                " -> ".join(library.chain),
                "if the generator does not need it, keep the feed in a module that does not import it",
            )
    indexable = imported.plan.length is not None or imported.plan.items is not None
    where = "in __getitem__, for the first item that needs it" if indexable else "in the generator, once per split"
    for file in imported.files:
        held = f" ({', '.join(file.holders)})" if file.holders else ""
        yield Finding(
            WARNING if file.hdf5 else NOTE,
            "open file",
            f"{file.path} is opened at import and stays open{held}. Each worker opens it for itself, but processes "
            f"that your code forks would share it{', and HDF5 reads wrong data then' if file.hdf5 else ''}",
            fix=f"open it {where}: then on_error= covers it too",
        )


def _tensorflow(library: Library, keras: bool) -> Finding:
    return Finding(
        NOTE if keras else WARNING,
        "import",
        f"the module imports TensorFlow: {library.seconds:.1f} s and {size(library.nbytes)} in each worker, or once "
        "for all if only definitions and constants come before",
        " -> ".join(library.chain),
        "" if keras else "keep the generator in a module of its own that does not import it",
    )


def _plan(imported: Imported, looked: Looked, workers: int) -> Iterator[Finding]:
    plan = imported.plan
    for text in (*plan.warnings, *looked.warnings):
        yield Finding(WARNING, "feed", text)
    if plan.length is None:
        for about, warning in (
            ("mixing", mixing_warning(plan, looked.splits, pooled_lanes(plan, looked.spec))),
            ("workers", workers_warning(plan, looked.splits, workers)),
        ):
            if warning and not (about == "workers" and plan.warnings):
                yield Finding(WARNING if about == "mixing" else NOTE, about, warning)


def _reading(imported: Imported, done: Done, facts: Facts, workers: int) -> Iterator[Finding]:
    plan, recording = imported.plan, facts.recording
    for path in done.gpu.files[:1]:
        yield Finding(
            WARNING,
            "gpu",
            f"the feed has opened a GPU ({path}): each worker takes some of its memory away from the trainer",
            fix="hide the GPU from workers (as the default does: look at env=, --env or os.environ), or use the CPU",
        )
    for name, count in () if done.gpu.files else done.gpu.visible:
        yield Finding(
            WARNING,
            "gpu",
            f"{name} can see {count} GPU{'s' if count > 1 else ''} in a worker",
            fix="leave CUDA_VISIBLE_DEVICES as Penstock sets it (-1), unless the feed needs the GPU",
        )
    if done.processes:
        yield Finding(
            WARNING,
            "processes",
            f"{done.processes} processes that generators have started still run after their generators have ended, so "
            "each split that is read leaves more of them, until the worker ends",
            fix="end them in the generator, in a finally block, or start them once, at the top of the module",
        )
    elif done.started and plan.lanes > 1:
        once = facts.undivided is not None and not facts.undivided.uncopied
        splits = 0 if facts.first.looked is None else facts.first.looked.splits
        count, places = (workers, "workers") if once else (min(plan.lanes, splits or plan.lanes), "lanes")
        yield Finding(
            NOTE,
            "processes",
            f"a generator starts {done.started} process{'es' * (done.started > 1)} of its own. In each of {count} "
            f"{places} a generator is open, so up to {done.started * count} such processes run beside the workers",
            fix="let the generator make its samples itself: workers run in parallel anyway. Or give fewer lanes=",
        )
    for library in done.late:
        if library.nbytes >= _HEAVY or library.name == "tensorflow":
            yield Finding(
                WARNING,
                "import",
                f"{library.name} is imported while samples are made: {library.seconds:.1f} s and "
                f"{size(library.nbytes)} in each worker",
                " -> ".join(library.chain),
                "import it at the top of the module, where workers share it, or not at all",
            )
    if recording is not None and done.empty:
        yield from _empty(done, recording)
    if recording is not None and done.whole and plan.samples is not None and plan.length is None:
        samples = plan.samples if plan.batch_size is not None else None
        if samples is not None and recording.samples != samples:
            yield Finding(
                ERROR,
                "samples",
                f"samples={samples}, but an epoch has {recording.samples}",
                fix=f"give samples={recording.samples}, or leave it out",
            )


def _empty(done: Done, recording: Recording) -> Iterator[Finding]:
    """Yield a finding if a few splits have no samples, and most have some."""
    count = done.empty
    if 2 * count >= len(recording.names):
        return
    named = ", ".join(done.without_samples)
    more = f" and {count - len(done.without_samples)} more" if count > len(done.without_samples) else ""
    yield Finding(
        NOTE,
        "splits",
        f"the generator yields no sample for {count} of {len(recording.names)} splits that were read: {named}{more}",
        fix="if they should have some, look at what they name: some libraries say nothing of a file that is missing or "
        "damaged (cv2.VideoCapture() has no frames then). Let the generator raise an error for it",
    )


def _carried(facts: Facts, imported: Imported) -> Iterator[Finding]:
    """Yield the finding of the comparison with a plain loop, and that segments repeat, once."""
    found, first = facts.carried, facts.first
    equal = 0
    if imported.plan.segment is not None and facts.recording is not None:
        equal = _equal_segments(facts.recording)
    if equal:
        yield repeating(f"0 to {equal}" if equal > 1 else "0 and 1", found)
    if found is None or (equal and found.kind in _SAID_BY_REPEATING):
        return
    if found.kind != UNKNOWN or not (first.failed or first.skipped or first.broke):
        yield lost(found, imported.plan)


def _undivided(facts: Facts, imported: Imported, workers: int) -> Iterator[Finding]:
    """Yield a finding if most of the workers' time goes into samples that others keep."""
    done, whole, plan = facts.first.done, facts.undivided, imported.plan
    if whole is None or done is None or not done.samples:
        return
    pace = pace_of(plan, done, whole)
    unit = "batches" if plan.batch_size is None else "samples"
    fix = (
        "divide the generator: give segment=N if it makes up random samples, or splits= (files, or ranges), or let it "
        "take `shard`. Or move what takes its time to transform="
    )
    if whole.uncopied:
        share = (plan.lanes - 1) * whole.seconds / pace.divided
        if share >= _MOST_DROPPED:
            yield Finding(
                WARNING,
                "lanes",
                f"each of the {plan.lanes} lanes runs the whole generator, and drops what the others keep. That takes "
                f"about {100 * min(share, 0.99):.0f} % of the workers' time: a plain loop over the generator makes "
                f"{rate_text(1 / whole.seconds)} {unit}/s, and a worker {rate_text(pace.rate(1))}. A worker would run "
                f"it once for all lanes, but its samples have {whole.uncopied}, which cannot be kept for other lanes",
                fix=f"{fix}. Or yield arrays, numbers and text only, in tuples, lists, dicts and dataclasses",
            )
        return
    busy = fastest(plan, plan.lanes, workers)
    if busy > 1 and whole.seconds * pace.rate(busy) >= _MOST_DROPPED:
        yield Finding(
            WARNING,
            "lanes",
            f"each worker runs the whole generator, and they share only the work of transform=. The generator makes "
            f"{rate_text(1 / whole.seconds)} {unit}/s, so {busy} workers make {rate_text(pace.rate(busy))}, and one "
            f"makes {rate_text(pace.rate(1))}",
            fix=fix,
        )


def _equal_segments(recording: Recording) -> int:
    """Return the number of the last segment if all segments are equal, as far as they were read; otherwise 0."""
    places = sorted(place for place in recording.digests if recording.count(place))
    shared = min((recording.count(place) for place in places), default=0)
    if len(places) < 2 or shared * len(places) < _ENOUGH:
        return 0
    if all(len(set(recording.samples_of(place, recording.count(place)))) == 1 for place in places):
        return 0  # nothing of a constant can be lost
    first = recording.samples_of(places[0], shared)
    return places[-1] if all(recording.samples_of(place, shared) == first for place in places) else 0


def _runs(facts: Facts) -> Iterator[Finding]:
    second = facts.second
    if second is not None and (second.failed is not None or second.broke):
        why = second.failed.error.message if second.failed is not None else second.ended or "it hung"
        yield Finding(
            ERROR,
            "runs",
            f"a second run, in another order, failed where the first did not: {why}",
            second.site if second.failed is None else second.failed.site,
            "make each split independent of what was read before it",
            "" if second.failed is None else second.failed.error.remote_traceback or "",
        )
    for part in (facts, facts.hashes):
        if part is not None and part.differ:
            assert part.culprit is not None
            why, where, fix = cause(part.culprit, listing=part.lists_differ)
            severity = NOTE if part.culprit.kind == HASH else ERROR
            yield Finding(severity, "runs", f"{_differs(part)}: {why}", where, fix)


def _differs(facts: Facts) -> str:
    found = facts.difference
    if found is None:
        return "two runs list different splits"
    if not found.leaves:
        return f"{found.name} has {found.number} samples in one run and another number in the other"
    what = found.values or f"{found.leaves[0]} differs"
    more = f" (and {', '.join(found.leaves[1:4])})" if len(found.leaves) > 1 else ""
    return (
        f"two runs with the same seed differ in {found.samples} of {facts.compared} samples, first in {found.name}, "
        f"sample {found.number}: {what}{more}"
    )
