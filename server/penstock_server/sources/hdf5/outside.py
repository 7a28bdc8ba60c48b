"""Finds the files on which the datasets of an HDF5 file depend: through external links, virtual datasets and external
storage.

HDF5 serves zeros where the source of a virtual dataset is missing, or a file of external storage is too short. So all
are found and checked before any row is read. Files in other folders are refused unless the feed allows them: an HDF5
file can name any file of the host as its storage.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from .. import files as fs
from .opening import opened
from .views import fields_of, parts_of

_LINKS = 100
"""Links that the path of a dataset goes through, at most: links can form a loop."""

_SOURCES = 10_000
"""Datasets that one dataset depends on, at most."""

_UNLIMITED = 2**64 - 1


class OutsideFiles:
    """The files on which the datasets of HDF5 files depend. Once found, they are found again only when one has changed.

    Args:
        names: the datasets of each file.
        anywhere: whether they may be in any folder.
        locking: as in `h5py.File`.
    """

    def __init__(self, names: Sequence[str], anywhere: bool, locking: bool | None) -> None:
        self._names = names
        self._anywhere = anywhere
        self._locking = locking
        self._known: dict[str, tuple[Any, list[str]]] = {}

    def remembered(self, file: str) -> list[str] | None:
        """Return the files on which a file depends, or None if they are not known as they are now."""
        stamp, found = self._known.get(file, (None, []))
        return found if stamp is not None and stamp == fs.stamp_of(file, *found) else None

    def of(self, h5: Any, file: str) -> list[str]:
        """Return the files on which an open file depends. Check that each is there, and has the dataset.

        Raises:
            OSError: one is missing, too short, in another folder, or cannot be read; the message names both files.
        """
        found = None if fs.is_url(file) else self.remembered(file)
        if found is None:
            found = outside_files(h5, file, self._names, anywhere=self._anywhere, locking=self._locking)
            self._known[file] = fs.stamp_of(file, *found), found
        return found


def outside_files(
    h5: Any, file: str, names: Sequence[str], *, anywhere: bool = False, locking: bool | None = None
) -> list[str]:
    """Return the files on which these datasets of an open file depend; see `OutsideFiles`. Datasets that do not exist
    are passed over."""
    walk = _Walk(file, anywhere, locking)
    for name in names:
        walk.follow(h5, file, name, repr(name))
    return walk.files()


class _Walk:
    """Follows datasets of one file to all others.

    Args:
        file: the first file. All others must be in its folder.
        anywhere, locking: see `OutsideFiles`.
    """

    def __init__(self, file: str, anywhere: bool, locking: bool | None) -> None:
        self._first = file
        self._anywhere = anywhere
        self._locking = locking
        self._files: dict[str, None] = {}
        self._seen: dict[tuple[str, str], bool | None] = {}
        self._links = 0
        real = os.path.realpath
        self._folders = {real(os.path.dirname(os.path.abspath(file))), os.path.dirname(real(file))}

    def files(self) -> list[str]:
        """Return all files that were found, without the first."""
        return [file for file in self._files if file != os.path.abspath(self._first)]

    def follow(self, h5: Any, file: str, name: str, what: str) -> bool:
        """Add the files on which a dataset depends. Return whether there is such a dataset.

        Args:
            h5: the open file that has the dataset.
            file: its path.
            name: the path of the dataset in it.
            what: the dataset of the first file that led here, for messages.

        Raises:
            OSError: see `OutsideFiles.of`.
        """
        key = os.path.abspath(file), name.strip("/")
        if key in self._seen:
            known = self._seen[key]
            if known is None:
                raise OSError(f"{self._first}: {what} depends on itself: remove the loop of links, or leave it out")
            return known
        self._seen[key] = None
        self._seen[key] = found = self._follow(h5, file, name, what)
        return found

    def _follow(self, h5: Any, file: str, name: str, what: str) -> bool:
        if len(self._seen) > _SOURCES:
            raise OSError(
                f"{self._first}: {what} depends on more than {_SOURCES:,} datasets: copy the data into one file"
            )
        group, parts = h5["/"], deque(name.split("/"))
        while parts:
            part = parts.popleft()
            if part in ("", "."):
                continue
            if not hasattr(group, "visititems"):
                if parts or part not in fields_of(group):
                    return False  # a dataset has no members
                break
            link = group.get(part, getlink=True)
            path = getattr(link, "path", None)
            if link is None:
                return False
            if path is None:
                group = group[part]
                continue
            self._links += 1
            if self._links > _LINKS:
                raise OSError(f"{self._first}: {what} is reached through more than {_LINKS} links: leave it out")
            parts.extendleft(reversed(path.split("/")))
            if not hasattr(link, "filename"):
                group = h5["/"] if path.startswith("/") else group
                continue
            where = f"{what} is a link to {path!r} in {link.filename}"
            with self._opened(_candidates(link.filename, file, "HDF5_EXT_PREFIX"), where) as (other, target):
                if not self.follow(other, target, "/".join(parts), what):
                    raise OSError(
                        f"{self._first}: {where}, and that is no dataset: correct the link, or name a dataset below it"
                    )
                return True
        if parts_of(group):
            return all(self.follow(h5, file, f"{group.name}/{one}", what) for one in parts_of(group))
        if hasattr(group, "chunks"):
            self._add_storage(group, file, what)
            if group.is_virtual:
                self._add_sources(h5, group, file, what)
        return hasattr(group, "chunks")

    def _add_storage(self, dataset: Any, file: str, what: str) -> None:
        if not dataset.external:
            return
        left = dataset.nbytes
        for name, offset, nbytes in dataset.external:
            prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace(
                "${ORIGIN}", os.path.dirname(os.path.abspath(file))
            )
            path = os.path.abspath(os.path.join(prefix, name))
            wants = min(left, left if nbytes == _UNLIMITED else nbytes)
            where = f"{what} is stored in {name}"
            self._check_place(path, where)
            if not os.path.isfile(path):
                raise FileNotFoundError(
                    f"{self._first}: {where}, and there is no file {path}: copy it there, or set HDF5_EXTFILE_PREFIX "
                    "to its folder"
                )
            has = os.path.getsize(path) - offset
            if has < wants:
                raise OSError(
                    f"{self._first}: {where}, from byte {offset} on, and {path} has {max(0, has)} of {wants} bytes "
                    "there: copy it again"
                )
            self._files[path] = None
            left -= wants

    def _add_sources(self, h5: Any, dataset: Any, file: str, what: str) -> None:
        for source in dataset.virtual_sources():
            for number in _numbers(source):
                name = _numbered(source.file_name, number)
                inner = _numbered(source.dset_name, number)
                if name == ".":
                    if not self.follow(h5, file, inner, what) and number is None:
                        raise OSError(f"{self._first}: {what} takes rows from {inner!r}, and there is no such dataset")
                    continue
                paths = _candidates(name, file, "HDF5_VDS_PREFIX")
                if number is not None and not any(map(os.path.isfile, paths)):
                    self._files[paths[0]] = None  # the dataset will be longer when this file is there
                    break
                where = f"{what} takes rows from {inner!r} in {name}"
                with self._opened(paths, where) as (other, target):
                    if not self.follow(other, target, inner, what):
                        raise OSError(f"{self._first}: {where}, which has no such dataset, so they would be zeros")

    @contextmanager
    def _opened(self, paths: list[str], where: str) -> Iterator[tuple[Any, str]]:
        """Open the first of these files that exists."""
        path = next(filter(os.path.isfile, paths), None)
        if path is None:
            raise FileNotFoundError(
                f"{self._first}: {where}, and there is no file {paths[0]}: copy it there, or leave the dataset out"
            )
        self._check_place(path, where)
        self._files[path] = None
        with ExitStack() as stack:
            try:
                h5 = stack.enter_context(opened(path, self._locking))
            except OSError as error:
                raise OSError(f"{self._first}: {where}, which cannot be read: {error}") from None
            yield h5, path

    def _check_place(self, path: str, where: str) -> None:
        if fs.is_url(self._first):
            raise OSError(
                f"{self._first}: {where}, which cannot be reached from a URL: copy all files to a local folder"
            )
        real = os.path.realpath(path)
        if not self._anywhere and not any(_is_in(real, folder) for folder in self._folders):
            raise PermissionError(
                f"{self._first}: {where}, which is outside the file's folder ({real}). If you trust the file, give "
                "allow_outside=True to Feed.from_hdf5; or copy the data into its folder"
            )


def _candidates(name: str, file: str, variable: str) -> list[str]:
    """Return where HDF5 looks for a file that another one names, best first."""
    folder = _folder(file)
    prefixes = [one for one in os.environ.get(variable, "").split(":") if one]
    found = [name] if os.path.isabs(name) else []
    last = os.path.basename(name) if os.path.isabs(name) else name
    found += [os.path.join(one.replace("${ORIGIN}", folder), last) for one in prefixes]
    found += [os.path.join(folder, last), last, os.path.join(os.path.dirname(os.path.realpath(file)), last)]
    return [os.path.abspath(path) for path in found]


def _folder(file: str) -> str:
    return os.path.dirname(os.path.abspath(file))


def _numbers(source: Any) -> Iterator[int | None]:
    """Yield the numbers of the files of a source, if it stands for many (%b); else None."""
    if "%b" in source.file_name.replace("%%", "") or "%b" in source.dset_name.replace("%%", ""):
        yield from range(_SOURCES)
    else:
        yield None


def _numbered(text: str, number: int | None) -> str:
    return "%".join(part if number is None else part.replace("%b", str(number)) for part in text.split("%%"))


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
