"""The names with which users write formats of data files: base classes, and parts of Penstock's own formats."""

from .sources.description import Column, Description
from .sources.files import open_binary
from .sources.format import Facts, Format, Indexable, Source
from .sources.reader import Reader
from .sources.splits.row_ranges import RowRange
from .sources.splits.whole_files import Shard, WholeFiles
from .sources.structure import Columns

__all__ = [
    "Column",
    "Columns",
    "Description",
    "Facts",
    "Format",
    "Indexable",
    "Reader",
    "RowRange",
    "Shard",
    "Source",
    "WholeFiles",
    "open_binary",
]
