"""What Penstock knows about NumPy's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description


class Numpy(Format):
    """NumPy's files: .npy files with an array each, or .npz files, whose arrays are leaves.

    A .npz file is recognized only by its ending, since other ZIP files begin with the same bytes.
    """

    name = "NumPy"
    endings = (".npy", ".npz")
    magic = b"\x93NUMPY"
    constructor = "from_numpy"
    facts = Facts(
        splits="ranges of rows; a compressed .npz is one",
        random_access="yes, but for a compressed .npz",
        checksums=".npz: CRC-32, once for mapped arrays",
        remote="by ranges",
        bounds="2 GiB a row",
    )

    def source(
        self,
        files: Any,
        leaves: Any = None,
        *,
        rows: tuple[int, int | None] | None = None,
        split_rows: int | None = None,
    ) -> Source:
        """See `Format`. `Feed.from_numpy` describes the options."""
        from .reader import NumpyRows, NumpySource, NumpySplits

        source = NumpySource(files, leaves)
        return Source(NumpySplits(source, rows, split_rows), NumpyRows(source))

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
