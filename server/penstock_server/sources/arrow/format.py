"""What Penstock knows about Arrow files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files


class Arrow(Format):
    """Arrow files (and Feather files of version 2), and Arrow streams, as in folders that `datasets` saves.

    Workers import pyarrow after they are forked, since its threads do not survive a fork.
    """

    name = "Arrow"
    endings = (".arrow", ".feather")
    magic = b"ARROW1"
    facts = Facts(
        splits="record batches",
        random_access="yes, but for streams with dictionaries",
        checksums="none",
        remote="by ranges",
        bounds="none: files are mapped into memory",
    )

    def source(self, files: Files, leaves: Any = None) -> Source:
        """See `Format`."""
        from .reader import ArrowRows, ArrowSplits

        return Source(ArrowSplits(files), ArrowRows(leaves))

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
