"""Draws a histogram of whole numbers as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

_BARS = 10
_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bars(counts: Counter[int], *, blocks: bool) -> Iterator[str]:
    """Yield a line for each of up to 10 ranges of equal width, at most 64 columns wide.

    Args:
        counts: how often each number occurs.
        blocks: draw with block characters, not with ASCII.
    """
    low, high = min(counts), max(counts)
    step = max(1, -(-(high - low + 1) // _BARS))
    binned: Counter[int] = Counter()
    for number, count in counts.items():
        binned[(number - low) // step] += count
    most = max(binned.values())
    starts = range(low, high + 1, step)
    wide = len(str(high))
    for place, start in enumerate(starts):
        stop = min(high, start + step - 1)
        label = f"{start:>{wide}}" if step == 1 else f"{start:>{wide}} to {stop:>{wide}}"
        yield f"{label}  {_bar(binned[place] / most, blocks)}  {binned[place]}"


def _bar(share: float, blocks: bool) -> str:
    if not blocks:
        return "#" * max(1 if share else 0, round(share * _WIDTH))
    eighths = max(1 if share else 0, round(share * _WIDTH * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
