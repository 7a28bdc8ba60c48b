"""What Penstock knows about LMDB stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..format import Facts, Format, Source

if TYPE_CHECKING:
    from ..description import Description
    from ..files import Files

_MAGIC = b"\xde\xc0\xef\xbe"


class Lmdb(Format):
    """LMDB stores: a folder with data.mdb, or a single file. Values are leaves, by patterns of their keys."""

    name = "LMDB"
    endings = (".lmdb", ".mdb")
    folder_of = ("data.mdb",)
    facts = Facts(
        splits="ranges of keys",
        random_access="yes",
        checksums="none",
        remote="no",
        bounds="2 GiB a value",
    )

    def recognizes(self, head: bytes) -> bool:
        """See `Format`."""
        return head[16:20] == _MAGIC

    def source(
        self, files: Files, leaves: Any, *, decode: Mapping[str, Callable[[bytes], Any]] | None = None
    ) -> Source:
        """See `Format`. `decode` has functions that turn values into leaves, by pattern."""
        from .reader import LmdbFiles, LmdbRows, LmdbSplits

        stores = LmdbFiles(files, leaves, decode or {})
        return Source(LmdbSplits(stores), LmdbRows(stores))

    def describe(self, file: str) -> Description:
        """See `Format`."""
        from .describe import describe

        return describe(file)
