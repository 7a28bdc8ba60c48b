"""Spot checks: samples that one worker has made and another one makes again, to see whether they differ."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ..spec import Spec, check_size
from .base import Count, Digests, Line, Message, Name

MOST_CHECKED = 64
"""Most samples of a split in one spot check."""


class SpotCheck(Message, frozen=True):
    """The first samples of a split (or of a batch of an indexable feed) that the sender has made in `run`, for another
    worker to make again.

    `index`: of the split in its list, or of the batch in its epoch. `samples`: how many samples were made. `ended`: the
    split has no more. `first`: the end of the epoch waits for the answer. `digests`: 8 bytes for each leaf of each
    sample. `splits` as in StartRun. `part`: which of the feeds of a mix, by name. The daemon adds the `spec` and passes
    the message on. SpotChecked answers it.
    """

    run: Count
    feed: Name
    splits: Count
    epoch: Count
    index: Count
    samples: Annotated[int, Meta(ge=1, le=MOST_CHECKED)]
    digests: Digests
    ended: bool = False
    first: bool = False
    part: Line = ""
    spec: Spec | None = None

    def __post_init__(self) -> None:
        check_size(self.spec)


class SpotChecked(Message, frozen=True):
    """Answers SpotCheck. `warning`: what differs, and why, or empty. `lost`: that rows are lost, because each worker
    divides them differently, or empty. `place` and `number`: where `penstock check` finds the first sample that
    differs."""

    run: Count
    warning: Line = ""
    lost: Line = ""
    place: Count = 0
    number: Count = 0
