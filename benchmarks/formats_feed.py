"""The feeds of formats.py: of the files of one case, and of a batch that is ready."""

from collections.abc import Iterator
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

from formats_cases import chosen

from penstock_server import Feed

case, folder = chosen()


@cache
def first() -> Any:
    """Return the first batch of the case."""
    return tuple(part.copy() for part in next(iter(case.read(Path(folder)))))


def same(split: int) -> Iterator[Any]:
    """Yield one batch of the case again and again: what Penstock could deliver if reading took no time."""
    return repeat(first(), 256)


feed = case.feed(folder)
ready = Feed(same, splits=range(4096), batch_size=None)
