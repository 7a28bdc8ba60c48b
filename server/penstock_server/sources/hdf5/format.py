"""What Penstock knows about HDF5 files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files


class Hdf5(Format):
    """HDF5 files, whose datasets are leaves."""

    name = "HDF5"
    endings = (".h5", ".hdf5", ".h5ad")
    magic = b"\x89HDF\r\n\x1a\n"
    library = "h5py"
    constructor = "from_hdf5"
    facts = Facts(
        splits="ranges of rows, at chunks",
        random_access="yes",
        checksums="those of the file (Fletcher32)",
        remote="by ranges",
        bounds="2 GiB a row or a chunk",
    )

    def source(
        self,
        files: Files,
        leaves: Any,
        *,
        rows: tuple[int, int | None] | None = None,
        split_rows: int | None = None,
        locking: bool | None = None,
        allow_outside: bool = False,
    ) -> Source:
        """See `Format`. `Feed.from_hdf5` describes the options."""
        from .reader import Hdf5Rows, Hdf5Source, Hdf5Splits

        source = Hdf5Source(files, leaves, locking, allow_outside)
        return Source(Hdf5Splits(source, rows, split_rows), Hdf5Rows(source))

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
