"""`DROP`, which a feed's transform returns to leave a sample out."""

from __future__ import annotations

from typing import Final, final


@final
class Drop:
    """The type of `DROP`. There is one object of it in each process, also after pickling and copying."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "penstock.DROP"

    def __reduce__(self) -> str:
        return "DROP"


DROP: Final = Drop()
"""Returned by a transform in place of a sample: the sample is left out, and counted in the status."""
