"""What Penstock knows about a format of data files. One subclass says all of it; registry.py finds the subclasses."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from .description import Description
    from .reader import Reader


class Source(NamedTuple):
    """Reads the files of one feed. Both parts run in workers.

    Attributes:
        splits: returns the splits of an epoch, in order. It is called at the start of each epoch. Splits are small,
            can be pickled, and have a `repr` that says which part of which file they are.
        reader: yields the samples of a split.
    """

    splits: Callable[[], Sequence[Any]]
    reader: Reader


class Facts(NamedTuple):
    """What users want to know about a format, in words, for the table of formats in the documentation.

    Attributes:
        splits: the parts into which files are divided, so that several workers can read them.
        random_access: whether any sample can be read without those before it.
        checksums: what tells damaged data from others.
        remote: how files at a URL are read; "no" if they are not.
        bounds: the largest piece that is read.
    """

    splits: str
    random_access: str
    checksums: str
    remote: str
    bounds: str


class Indexable(Protocol):
    """The samples of one feed by index. Workers call it, so it can be pickled, and opens files when it is called."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Format(ABC):
    """A format of data files, for `Feed.from_files` and for `penstock serve`, `check` and `peek` with FILE.

    A subclass has no state, and its constructor takes no arguments. The command line imports its module, so import the
    format's library only in the functions that need it.

    Attributes:
        name: the format's name in messages. No two formats share one.
        things: what its readers read, in the words of a profile, such as "HDF5 files"; by default NAME files.
        endings: the endings of its file names, in lower case, such as (".h5", ".hdf5").
        magic: the first bytes of its files, to recognize local files that have another ending; by default no bytes.
        folder_of: endings in lower case, if a folder of such files is one dataset of this format.
        library: a module that its readers use. Workers are forked after it is imported, so it must survive a fork.
        constructor: the method of `Feed` that makes its feeds.
        facts: facts for the documentation; None if it has none.
        needs_module: why options of `penstock serve` cannot describe its feeds; "" if they can.
    """

    name: str
    things: str = ""
    endings: tuple[str, ...]
    magic: bytes = b""
    folder_of: tuple[str, ...] = ()
    library: str = "numpy"
    constructor: str = "from_files"
    facts: Facts | None = None
    needs_module: str = ""

    def matches(self, name: str) -> bool:
        """Return whether a file name, pattern or URL in lower case has an ending of this format."""
        return bool(self.endings) and name.removesuffix("*").endswith(self.endings)

    def recognizes(self, head: bytes) -> bool:
        """Return whether a file that begins with these 512 bytes has this format."""
        return bool(self.magic) and head.startswith(self.magic)

    @abstractmethod
    def source(self, *args: Any, **kwargs: Any) -> Source | Indexable:
        """Return the source of a feed, or an object with all samples by index. Open no files yet.

        The parameters are `files`, `leaves` and keyword-only options. `files` is a path, a pattern, a URL or a list of
        these. `leaves` is the structure of a sample, as for `Columns`. If it has a default, `penstock serve` needs no
        --leaf. The options are those of `Feed.from_files` for this format. An option `rows` is --rows of
        `penstock serve`, a tuple (start, stop). An option `decode` is a dict of functions, by column.

        Raises:
            TypeError, ValueError: an argument cannot work; the message says what to do.
        """

    @abstractmethod
    def describe(self, file: str) -> Description:
        """Describe a file for `penstock peek`. Read little of it: `peek` reads samples with the source.

        Raises:
            ImportError: the format's library is missing; the message says what to install.
            OSError, ValueError: the file cannot be read; the message names it, and says what to do.
        """

    def takes(self, option: str) -> bool:
        """Return whether `source` has this option."""
        return option in inspect.signature(self.source).parameters

    def needs_leaves(self) -> bool:
        """Return whether `leaves` has no default in `source`."""
        return inspect.signature(self.source).parameters["leaves"].default is inspect.Parameter.empty
