"""The report of `penstock peek` about a feed: as lines of text, or as values for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock_proto.messages import FeedInfo
from penstock_proto.spec import leaf_list, unflatten

from ..leaves.leaf_report import leaf_lines, leaves_json
from ..leaves.summary import Summary, leaves
from ..leaves.words import counted, wrapped


def feed_lines(url: str, info: FeedInfo, summary: Summary, seconds: float, *, blocks: bool) -> Iterator[str]:
    """Yield the lines of the report about a feed and its leaves.

    Args:
        url: the feed's URL, or MODULE:ATTR.
        info: the feed's own description.
        summary: the summary of its samples.
        seconds: how long reading the samples took.
        blocks: draw with block characters, not with ASCII.
    """
    words = [f"{url}: feed {info.name}"]
    words.append(f"batches of {info.batch_size}" if info.batch_size else "batches as its generator makes them")
    if info.endless:
        words.append("endless")
    if info.batches is not None:
        words.append(f"{info.batches:,} in an epoch")
    if info.samples is not None:
        words.append(counted(info.samples, "sample"))
    if info.shuffle:
        words.append(f"shuffle {info.shuffle:,}")
    yield from wrapped(", ".join(words), "")
    yield f"  the first {counted(summary.samples, 'sample')} of epoch 0, read in {seconds:.1f} s"
    yield from leaf_lines(summary, dict.fromkeys(_padded(info), _PADDED), blocks=blocks)


def feed_json(url: str, info: FeedInfo, summary: Summary, seconds: float, error: str) -> dict[str, Any]:
    """Return the contents of `feed_lines`, and the error, as values for JSON."""
    return {
        "feed": info.name,
        "url": url,
        "batch_size": info.batch_size,
        "batches": info.batches,
        "samples": info.samples,
        "shuffle": info.shuffle,
        "spec": str(info.spec),
        "read": summary.samples,
        "seconds": round(seconds, 3),
        "leaves": leaves_json(summary),
        "padded": sorted(_padded(info)),
        "error": error or None,
    }


_PADDED = "padded: the shapes are those of whole batches, and the range includes the padding"


def _padded(info: FeedInfo) -> list[str]:
    """Return the paths of the leaves whose samples are padded to the largest one of their batch."""
    if info.batch_size is None:
        return []
    specs = dict(leaves(unflatten(info.spec, leaf_list(info.spec))))
    return [path for path, leaf in specs.items() if not (leaf.static or leaf.ragged)]
