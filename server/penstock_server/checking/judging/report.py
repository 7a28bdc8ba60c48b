"""The report of `penstock check`: the facts about the feed, then the findings; as lines, or as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_proto.messages import FeedPlan
from penstock_proto.status.figures import size
from penstock_proto.text import printable

from ...coordinator.stream.budget import enough
from ...targets.file_target import shown_target
from ..findings.findings import ERROR, Finding
from .collecting import Facts
from .mixing import mixing
from .sizes import Memory, fastest, pace_of, rate_text, speed, useful_workers

_WIDTH = 110
_INDENT = 10
_BUSY = 0.15
"""The report says it if others use this share of the CPUs."""

_TRACEBACK = 12
"""Lines of a traceback that are shown, at most."""


@dataclass(frozen=True, slots=True)
class Report:
    """The contents of a report.

    Attributes:
        target: the target that was checked.
        facts, memory, findings: see their classes; `memory` is None if there was no first sample.
        workers: how many workers the user wants to run.
        cpus: CPUs that this host can use.
    """

    target: str
    facts: Facts
    memory: Memory | None
    findings: Sequence[Finding]
    workers: int
    cpus: int


def lines(report: Report) -> Iterator[str]:
    """Yield the report, line by line."""
    yield from shown(_about(report), report.findings)


def shown(about: Iterable[tuple[str, str]], findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of a report: named facts, then the findings."""
    for name, text in about:
        yield from _wrapped(f"{name:<{_INDENT}}", text)
    yield ""
    for finding in findings:
        yield from _wrapped(f"{finding.severity:<{_INDENT}}", finding.what)
        if finding.where:
            yield from _wrapped("", f"at {finding.where}")
        if finding.fix:
            yield from _wrapped("", f"-> {finding.fix}")
        if finding.traceback:
            last = finding.traceback.rstrip().splitlines()[-_TRACEBACK:]
            yield from (f"{'':{_INDENT}}| {printable(line)}" for line in last)
    yield _verdict(findings)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as a value for JSON."""
    facts, memory = report.facts, report.memory
    first = facts.first
    plan = None if first.imported is None else first.imported.plan
    looked, done = first.looked, first.done
    known: dict[str, Any] = {"target": shown_target(report.target)}
    if first.imported is not None:
        known |= {
            "feed": first.imported.plan.name,
            "import_seconds": first.imported.seconds,
            "import_nbytes": first.imported.nbytes,
            "libraries": [
                {"name": one.name, "seconds": one.seconds, "nbytes": one.nbytes, "chain": list(one.chain)}
                for one in first.imported.libraries
            ],
            "open_files": [file.path for file in first.imported.files],
        }
    if plan is not None and looked is not None:
        useful = useful_workers(plan, looked.splits)
        known |= {
            "spec": str(looked.spec),
            "splits": looked.splits if plan.length is None and not plan.endless else None,
            "useful_workers": useful,
            "mixing": mixing(plan, looked.spec, looked.splits),
        }
    if memory is not None:
        known["memory"] = dataclasses.asdict(memory)
    if done is not None:
        known |= {
            "samples": done.samples,
            "seconds": done.seconds,
            "cpu_seconds": done.cpu_seconds,
            "others_cpus": done.others,
            "gpu": {"files": list(done.gpu.files), "visible": dict(done.gpu.visible)},
        }
    known["compared"] = facts.compared
    known["agree"] = None if facts.second is None else not facts.differ
    known["findings"] = [dataclasses.asdict(finding) for finding in report.findings]
    return known


def _about(report: Report) -> Iterator[tuple[str, str]]:
    facts, memory = report.facts, report.memory
    imported, looked, done = facts.first.imported, facts.first.looked, facts.first.done
    if imported is None:
        yield "feed", f"{shown_target(report.target)}: not imported"
        return
    plan = imported.plan
    yield "feed", f"{plan.name}: {shown_target(report.target)}{_splits(plan, looked.splits if looked else None)}"
    if looked is not None and memory is not None:
        yield "spec", str(looked.spec)
        yield "batch", _batch(plan, memory)
        yield "memory", _memory(memory, report.workers)
        yield "workers", _workers(plan, looked.splits)
        yield "mixing", mixing(plan, looked.spec, looked.splits)
    yield "imports", _imports(report)
    if done is not None and done.samples and looked is not None:
        yield "speed", _speed(report, plan, looked.splits)
    if facts.second is not None:
        yield "two runs", _two_runs(facts)


def _splits(plan: FeedPlan, count: int | None) -> str:
    items = plan.items if plan.length is None else plan.length
    if items is not None:
        return f", {_number(items, 'item')}"
    if plan.endless:
        what = "batch" if plan.batch_size is None else "sample"
        return f", endless, segments of {_number(plan.segment or 0, what)}"
    return "" if count is None else f", {_number(count, plan.piece)}"


def _batch(plan: FeedPlan, memory: Memory) -> str:
    about = "about " if memory.varies else ""
    if plan.batch_size is None:
        return f"made by the feed, {about}{size(memory.batch)}"
    return f"{_number(plan.batch_size, 'sample')}, {about}{size(memory.batch)}"


def _memory(memory: Memory, workers: int) -> str:
    blocks = f" and {size(memory.blocks)} of shuffle blocks" if memory.blocks else ""
    return (
        f"{size(memory.wanted)} for a stream with {_number(workers, 'worker')}: {memory.slots} slots of "
        f"{size(memory.slot)}{blocks}; --memory {enough(memory.least)} is the least"
    )


def _workers(plan: FeedPlan, n_splits: int) -> str:
    useful = useful_workers(plan, n_splits)
    if useful is None:
        return "any number is useful: each batch can be made by any worker"
    if useful == [1]:
        return "1 is useful"
    shown = useful if len(useful) <= 12 else [*useful[:6], *useful[-4:]]
    text = ", ".join(map(str, shown[:-1])) + f" or {shown[-1]} are useful"
    lanes = useful[-1]
    if not plan.endless and n_splits < plan.lanes:
        return f"{text}: {_number(n_splits, plan.piece)}, so {_number(lanes, 'lane')}"
    return f"{text}: {_number(lanes, 'lane')}"


def _imports(report: Report) -> str:
    imported = report.facts.first.imported
    assert imported is not None
    text = f"{imported.seconds:.2f} s, {size(imported.nbytes)}"
    slow = [library for library in imported.libraries if library.seconds >= 0.02][:6]
    return f"{text}: {', '.join(f'{one.name} {one.seconds:.2f} s' for one in slow)}" if slow else text


def _speed(report: Report, plan: FeedPlan, n_splits: int) -> str:
    done = report.facts.first.done
    assert done is not None
    seconds = max(done.seconds, 1e-9)
    pace, share = pace_of(plan, done, report.facts.undivided), done.cpu_seconds / seconds
    unit = "samples" if plan.batch_size is not None else "batches"
    busy = fastest(plan, n_splits, report.workers)
    others = min(done.others, report.cpus)
    could = speed(pace, share, busy, report.cpus - others)
    text = f"1 worker makes {rate_text(pace.rate(1))} {unit}/s, and takes {100 * share:.0f} % of a CPU"
    if report.workers > 1:
        text += f"; {report.workers} workers could make up to {rate_text(could)}"
        text += f" on {_number(report.cpus, 'CPU')}, one of which trainer and daemon keep busy"
    if others >= _BUSY * report.cpus:
        text += f". Other processes used {others:.1f} CPUs meanwhile: on an idle machine the feed is faster"
    return text


def _two_runs(facts: Facts) -> str:
    if facts.differ:
        return "differ, see below"
    if facts.second is not None and (facts.second.failed is not None or facts.second.broke):
        return "the second one failed, see below"
    hashes = " and with another PYTHONHASHSEED" if facts.hashes is None else ", but only with one PYTHONHASHSEED"
    imported = facts.first.imported
    unit = "batch" if imported is not None and imported.plan.batch_size is None else "sample"
    return f"agree in {_number(facts.compared, unit)}, in another order{hashes}"


def _verdict(findings: Sequence[Finding]) -> str:
    if not findings:
        return "nothing is wrong"
    counts = [(kind, sum(finding.severity == kind for finding in findings)) for kind in (ERROR, "warning", "note")]
    return ", ".join(_number(count, kind) for kind, count in counts if count)


def _wrapped(head: str, text: str) -> Iterator[str]:
    indent = " " * _INDENT
    for paragraph in printable(text).splitlines() or [""]:
        yield from textwrap.wrap(
            paragraph, _WIDTH, initial_indent=head or indent, subsequent_indent=indent, break_on_hyphens=False,
            break_long_words=False,
        ) or [head]  # fmt: skip
        head = ""


def _number(count: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("tch") else f"{word}s"
    return f"{count:,} {word if count == 1 else plural}"
