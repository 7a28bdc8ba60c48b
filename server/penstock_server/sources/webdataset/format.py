"""What Penstock knows about tar files in the layout of WebDataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files


class WebDataset(Format):
    """Tar files, whose extensions are leaves."""

    name = "tar (WebDataset)"
    things = "tar files"
    endings = (".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".tgz")
    constructor = "from_webdataset"
    facts = Facts(
        splits="files",
        random_access="no",
        checksums="of headers, and of gzip",
        remote="from the beginning",
        bounds="2 GiB a sample",
    )

    def recognizes(self, head: bytes) -> bool:
        """See `Format`."""
        return head[257:262] == b"ustar"

    def source(
        self, files: Files, leaves: Any, *, decode: Mapping[str, Callable[[bytes], Any]] | None = None
    ) -> Source:
        """See `Format`. `Feed.from_webdataset` describes the options."""
        from ..splits.whole_files import WholeFiles
        from .reader import TarSamples

        reader = TarSamples(leaves, decode or {})
        return Source(WholeFiles(files, "Feed.from_webdataset"), reader)

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
