"""Splits that are whole files, for formats whose files cannot be divided."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from .. import files as fs
from ..names_on_disk import on_disk_as


@on_disk_as("penstock_server.sources.webdataset.Shard")
@dataclass(frozen=True, slots=True, repr=False)
class Shard:
    """A file that has `size` bytes (None: not known)."""

    file: str
    size: int | None

    def __repr__(self) -> str:
        return self.file


class WholeFiles:
    """Lists files, each as a split.

    Args:
        files: paths, patterns and URLs.
        name: the name of the constructor, for messages.
    """

    def __init__(
        self, files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], name: str = "Feed.from_files"
    ) -> None:
        self.__name__ = name
        self._files = fs.checked(files)

    def __call__(self) -> list[Shard]:
        """Find the files.

        Raises:
            OSError: a file is missing.
        """
        return [Shard(file, fs.size_in_splits(file)) for file in fs.expand(self._files)]
