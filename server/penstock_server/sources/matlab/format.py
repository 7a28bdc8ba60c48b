"""What Penstock knows about MATLAB files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files


class Matlab(Format):
    """MATLAB files of versions 5 to 7.3, whose arrays are leaves."""

    name = "MATLAB"
    endings = (".mat",)
    magic = b"MATLAB "
    facts = Facts(
        splits="ranges of samples",
        random_access="yes",
        checksums="of compressed variables",
        remote="by ranges",
        bounds="2 GiB a sample; 1 GiB a file before 7.3",
    )

    def source(
        self,
        files: Files,
        leaves: Any,
        *,
        axis: int | None = None,
        rows: tuple[int, int | None] | None = None,
        split_rows: int | None = None,
    ) -> Source:
        """See `Format`. `axis` is 0 if the first dimension of each array counts the samples, and -1 if the last one
        does; by default, it is the one whose length all arrays share."""
        from .reader import MatFiles, MatRows, MatSplits

        found = MatFiles(files, leaves, axis)
        return Source(MatSplits(found, rows, split_rows), MatRows(found))

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
