"""What Penstock knows about Parquet files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files


class Parquet(Format):
    """Parquet files, whose columns are leaves.

    Workers import pyarrow after they are forked, since its threads do not survive a fork.
    """

    name = "Parquet"
    endings = (".parquet",)
    magic = b"PAR1"
    constructor = "from_parquet"
    facts = Facts(
        splits="row groups",
        random_access="by row group",
        checksums="those of pages, if the file has them",
        remote="by ranges",
        bounds="2 GiB a row group, in `penstock peek`",
    )

    def source(self, files: Files, leaves: Any = None) -> Source:
        """See `Format`."""
        from .reader import ParquetRows, ParquetSplits

        reader = ParquetRows(leaves)
        return Source(ParquetSplits(files), reader)

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
