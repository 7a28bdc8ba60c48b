"""What Penstock knows about MDS datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files


class Mds(Format):
    """Folders with an index.json and shards, as mosaicml-streaming writes them. Their columns are leaves."""

    name = "MDS"
    endings = ()
    folder_of = (".mds", ".mds.zstd", ".mds.gz", ".mds.bz2", ".mds.br", ".mds.snappy")
    facts = Facts(
        splits="ranges of samples; a compressed shard is one",
        random_access="yes",
        checksums="hashes of the index, once in each worker",
        remote="by ranges",
        bounds="2 GiB a compressed shard",
    )

    def source(
        self,
        files: Files,
        leaves: Any = None,
        *,
        decode: Mapping[str, Callable[[bytes], Any]] | None = None,
        rows: tuple[int, int | None] | None = None,
        split_rows: int | None = None,
    ) -> Source:
        """See `Format`. `decode` has functions that turn the bytes of a column into a value, by column."""
        from .reader import MdsRows, MdsSplits

        return Source(MdsSplits(files, rows, split_rows), MdsRows(leaves, decode or {}))

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
