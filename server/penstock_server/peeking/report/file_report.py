"""The report of `penstock peek` about data files: as lines of text, or as values for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock_proto.status.figures import size

from ..files.data_files import PeekedFile
from ..files.proposal import MODULE, Proposal, unfit
from ..leaves.leaf_report import leaf_lines, leaves_json
from ..leaves.words import counted, wrapped

_NOTHING_LEFT = (
    "Nothing is left to serve as it is. Write a module with a Feed that does what the reasons above ask for, or with a "
    "generator that reads the file."
)


def file_lines(peeked: PeekedFile, *, blocks: bool) -> Iterator[str]:
    """Yield the lines of the report about a data file and its leaves."""
    found = peeked.description
    words = [f"{peeked.first}: {peeked.kind}"]
    if peeked.nbytes is not None:
        words.append(size(peeked.nbytes))
    if found.rows is not None:
        words.append(counted(found.rows, "sample"))
    yield from wrapped(", ".join(words), "")
    if peeked.count > 1:
        yield from wrapped(f"the first of {peeked.count} files, and the only one that was read", "  ")
    for fact in found.facts:
        yield from wrapped(fact, "  ")
    count = peeked.summary.samples
    where = f", from {peeked.places} places of the file" if peeked.places > 1 else ", the first ones"
    yield f"  {counted(count, 'sample')} read in {peeked.seconds:.1f} s{'' if count == found.rows else where}"
    storage = {column.leaf: column.storage for column in found.columns}
    yield from leaf_lines(peeked.summary, storage, blocks=blocks)


def left_out_lines(left_out: dict[str, str]) -> Iterator[str]:
    """Yield the lines with the columns that are left out, and the reasons."""
    if left_out:
        yield ""
        yield "Left out:"
        for name, why in left_out.items():
            yield from wrapped(f"{name!r} {why}", "  ")


def proposal_lines(proposal: Proposal | None) -> Iterator[str]:
    """Yield the lines with the command and the module, not indented, so that they can be copied."""
    if proposal is None:
        yield ""
        yield from wrapped(_NOTHING_LEFT, "")
        return
    module = f'# {MODULE}, for this command or for penstock.dataset("{MODULE}:feed", workers=2)'
    if proposal.command_needs_module:
        yield from ("", f"Serve it (save the lines below as {MODULE}):", "", proposal.command, "")
    else:
        yield from ("", "Serve it:", "", proposal.command, "", "or write a module:", "")
        module = module.replace("this command or for ", "")
    yield module
    yield from proposal.module.rstrip("\n").split("\n")
    if proposal.notes:
        yield ""
    for note in proposal.notes:
        yield from wrapped(note, "")


def file_json(peeked: PeekedFile, proposal: Proposal | None) -> dict[str, Any]:
    """Return the whole report, and the error, as values for JSON."""
    found = peeked.description
    return {
        "file": peeked.first,
        "files": peeked.count,
        "kind": peeked.kind,
        "bytes": peeked.nbytes,
        "samples": found.rows,
        "facts": list(found.facts),
        "read": peeked.summary.samples,
        "seconds": round(peeked.seconds, 3),
        "leaves": leaves_json(peeked.summary),
        "storage": {column.leaf: column.storage for column in found.columns},
        "left_out": unfit(peeked),
        "command": proposal.command if proposal else None,
        "module": proposal.module if proposal else None,
        "notes": list(proposal.notes) if proposal else [],
        "error": peeked.error or None,
    }
