"""Notices that a file has changed after its splits were listed, before an epoch mixes two versions of it.

The worker that lists the splits of an epoch notes the version of each file: its size, and the time of its last change
or its ETag. The versions go to all workers with the list. They are no part of its digest, so a state can still be
loaded after a file was copied or touched. A worker compares them when it opens a split and when it has read it, which
costs two looks at the file.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...feed.combined.zipped import Zipped
from ...feed.options.feed_options import FeedOptions
from ...sources import files as fs
from ...sources.reader import Reader


@dataclass(frozen=True, slots=True)
class FileVersions:
    """The versions of files when their splits were listed.

    Attributes:
        paths: `paths_here` of the worker that listed them. Versions of local files say nothing elsewhere.
        versions: by path or URL.
    """

    paths: str
    versions: dict[str, fs.Version]

    @classmethod
    def of(cls, listed: Iterable[tuple[FeedOptions, Sequence[Any]]]) -> FileVersions:
        """Note the versions of all files that have splits of these feeds."""
        files = {file for feed, splits in listed if _has_reader(feed) for file in _files_of_all(feed, splits)}
        found = {file: fs.version_of(file) for file in sorted(files)}
        return cls(fs.paths_here(), {file: version for file, version in found.items() if version is not None})

    def check(self, feed: FeedOptions, split: Any) -> None:
        """Compare the files of a split of this feed with what they were.

        Raises:
            OSError: one has changed.
        """
        if not self.versions:
            return
        for file in _files_of(feed, split):
            listed = self.versions.get(file)
            if listed is not None and (fs.is_url(file) or self.paths == fs.paths_here()):
                fs.check_version(file, listed)

    def dumps(self) -> bytes:
        """Return these as bytes, for `loads`; none if there are no files."""
        return pickle.dumps((self.paths, self.versions)) if self.versions else b""

    @classmethod
    def loads(cls, data: bytes) -> FileVersions:
        """Return what `dumps` made."""
        return cls(*pickle.loads(data)) if data else cls("", {})


def _has_reader(feed: FeedOptions) -> bool:
    if isinstance(feed.generate, Zipped):
        return any(map(_has_reader, feed.generate.parts.values()))
    return isinstance(feed.generate, Reader)


def _files_of_all(feed: FeedOptions, splits: Sequence[Any]) -> set[str]:
    return {file for split in splits for file in _files_of(feed, split)}


def _files_of(feed: FeedOptions, split: Any) -> Sequence[str]:
    """Return the files of a split, as far as Penstock's readers read it."""
    source = feed.generate
    if isinstance(source, Zipped):
        if not source.wants.split or not isinstance(split, tuple):
            return ()
        parts = zip(source.parts.values(), split, strict=False)
        return [file for part, own in parts for file in _files_of(part, own)]
    if not isinstance(source, Reader):
        return ()
    if type(source).files_of is Reader.files_of and not hasattr(split, "file"):
        return ()  # a format of its own, whose splits do not say their files
    return source.compared_files(split)
