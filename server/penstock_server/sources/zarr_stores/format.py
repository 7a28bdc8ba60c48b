"""What Penstock knows about Zarr stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files


class Zarr(Format):
    """Zarr stores of versions 2 and 3, whose arrays are leaves.

    Workers import zarr after they are forked, since its threads do not survive a fork.
    """

    name = "Zarr"
    endings = (".zarr", ".zarr.zip")
    constructor = "from_zarr"
    facts = Facts(
        splits="ranges of rows, at chunks or shards",
        random_access="yes",
        checksums="those of its codecs",
        remote="by chunks",
        bounds="2 GiB a row or a chunk",
    )

    def source(
        self,
        files: Files,
        leaves: Any = None,
        *,
        rows: tuple[int, int | None] | None = None,
        split_rows: int | None = None,
    ) -> Source:
        """See `Format`. `Feed.from_zarr` describes the options."""
        from .reader import ZarrRows, ZarrSplits, ZarrStores

        stores = ZarrStores(files, leaves)
        return Source(ZarrSplits(stores, rows, split_rows), ZarrRows(stores))

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
