"""Tar files in the layout of WebDataset: the files of a sample are adjacent and differ only in their extensions."""

from __future__ import annotations

import io
import json
import math
import re
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto.status.figures import size
from penstock_proto.value_text import shown

from .. import files as fs
from ..bounds import check_at_once
from ..inflating import Rejoined, inflated
from ..names_on_disk import on_disk_as
from ..reader import Reader
from ..splits.whole_files import Shard
from ..structure import Columns

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
"""A sample's key, which ends at the first dot of the last part, and the extension."""

_LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_LONGEST = 1 << 20
"""Bytes of a long name or of further attributes. Paths have 4096 at most."""

_COMPRESSED = (b"\x1f\x8b", b"BZ", b"\xfd7")
"""The first bytes of gzip, bzip2 and xz files."""

_FILES = 1000
"""Files of a sample, if all are read."""

_SHOWN = 8
_SECONDS = 5.0
"""The longest time that is spent on the cause of an error."""

TOGETHER = "Write the archive in order of names, such as with tar --sort=name"

PICKLED = ("pyd", "pickle", "pkl", "pth", "pt")
"""Extensions of files that are refused, because reading them can run any code."""


@on_disk_as("penstock_server.sources.webdataset.TarSamples")
class TarSamples(Reader):
    """Yields the samples of a shard.

    Args:
        leaves: extensions in the structure of a sample; "jpg;png" takes the one that is there.
        decode: functions that decode bytes, by extension, besides those for numbers, text, JSON and NumPy's files.
    """

    def __init__(self, leaves: Any, decode: Mapping[str, Callable[[bytes], Any]]) -> None:
        self.__name__ = "Feed.from_webdataset"
        self._columns = Columns(leaves, "extension")
        self._wanted = [tuple(part.strip(". ").lower() for part in name.split(";")) for name in self._columns.names]
        if not isinstance(decode, Mapping) or not all(callable(function) for function in decode.values()):
            raise TypeError(f"decode must be a dict of functions by extension, got {shown(decode)}")
        self._decode = {name.strip(".").lower(): function for name, function in decode.items()}
        pickled = [one for names in self._wanted for one in names if one in PICKLED and one not in self._decode]
        if pickled:
            raise ValueError(
                f".{pickled[0]} files are pickles, which run any code when they are read: store .npy or .json instead, "
                "or, if you trust the shards, give decode={...} with a function of your own"
            )

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._columns, self._decode

    def __call__(self, split: Shard) -> Iterator[Any]:
        """Yield the samples of a split.

        Raises:
            LookupError, ValueError: a sample lacks a file, or one of its files cannot be decoded.
            OSError: the shard is damaged or truncated, or has changed since the splits were listed.
        """
        every = {one for names in self._wanted for one in names}
        with fs.open_binary(split.file, split.size) as opened:
            for key, members in tar_samples(split.file, opened, every):
                yield self._sample(split.file, key, members)

    def _sample(self, file: str, key: str, members: dict[str, bytes]) -> Any:
        where = f"{file}: sample {key!r}"
        values = []
        for names in self._wanted:
            name = next((one for one in names if one in members), None)
            if name is None:
                raise LookupError(f"{where} has no .{' and no .'.join(names)} file{why_missing(file, key, names)}")
            try:
                values.append(self._decoded(name, members[name]))
            except MemoryError:
                raise
            except Exception as error:
                raise ValueError(f"{where}: cannot decode its .{name} file: {type(error).__name__}: {error}") from error
        return self._columns.maker()(values)

    def _decoded(self, name: str, data: bytes) -> Any:
        for ending in (name, name.rpartition(".")[2]):  # "npy" of "left.npy"
            if ending in self._decode:
                return self._decode[ending](data)
        return decoded(name, data)


def decoded(name: str, data: bytes) -> Any:
    """Decode a file with the extension `name`, if the user gives no function for it.

    Raises:
        ValueError: its bytes are not those of such a file.
    """
    return _DECODERS.get(name.rpartition(".")[2], bytes)(data)


def tar_samples(file: str, opened: Any, wanted: set[str] | None) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the key and the wanted files (None: all) of each sample.

    Raises:
        OSError: the tar file is damaged or truncated.
        ValueError: the archive has a file twice, or a link in place of a file, or a sample is larger than any that is
            read.
    """
    members: dict[str, bytes] = {}
    key, complete, nbytes = "", False, 0
    try:
        stream, compressed = _decompressed(opened)
        with tarfile.open(fileobj=stream, mode="r|*", tarinfo=StrictTarInfo) as tar:
            for info in tar:
                _check_link(file, info, wanted)
                found = key_and_extension(info)
                if found is None:
                    continue
                if found[0] != key:
                    if complete:
                        yield key, members
                    key, members, complete, nbytes = found[0], {}, True, 0
                name = found[1]
                if name in members:
                    raise ValueError(f"{file}: {info.name} is there twice: give each sample a name of its own")
                if wanted is None or name in wanted:
                    nbytes += info.size
                    check_at_once(nbytes, f"{file}: sample {key!r}", "files")
                    data = tar.extractfile(info)
                    assert data is not None  # it is a regular file
                    members[name] = data.read()
                    if wanted is None and len(members) > _FILES:
                        raise ValueError(f"{file}: sample {key!r} has more than {_FILES} files: {dots(info.name)}")
        while compressed and stream.read(1 << 20):  # up to the checksum, which comes last
            pass
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise OSError(f"{file}: the tar file is truncated or damaged: copy it again ({error})") from None
    if complete:
        yield key, members


def key_and_extension(info: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return the key of the sample that a file belongs to, and its extension; None if it belongs to none."""
    match = _NAME.fullmatch(info.name) if info.isfile() else None
    return None if match is None else (match[1], match[2].lower())


def _check_link(file: str, info: tarfile.TarInfo, wanted: set[str] | None) -> None:
    """Check that a member is not a link in place of a wanted file. Its data are elsewhere, perhaps behind it.

    Raises:
        ValueError: it is one.
    """
    match = _NAME.fullmatch(info.name) if info.issym() or info.islnk() else None
    if match is not None and (wanted is None or match[2].lower() in wanted):
        raise ValueError(
            f"{file}: {info.name} is a link to {info.linkname}, and links are not followed: write the archive with "
            "the files themselves, such as with tar --dereference --hard-dereference"
        )


def dots(name: str) -> str:
    """Explain which sample a file belongs to whose name has several dots."""
    key, _, extension = name.rpartition("/")[2].partition(".")
    return (
        f"{name!r} is the file .{extension} of sample {key!r}, as a sample's name ends at the first dot (the rule of "
        "WebDataset). If it should be a sample of its own, write names without other dots"
    )


def why_missing(file: str, key: str, names: Sequence[str]) -> str:
    """Return, as the rest of a sentence, where a file of a sample is, if not beside the sample's other files."""
    correct = ": correct leaves=, or remove the sample"
    if fs.is_url(file):
        return correct
    base = key.rpartition("/")[2]
    has: list[str] = []
    deadline = time.monotonic() + _SECONDS
    with suppress(OSError, tarfile.TarError, EOFError, zlib.error):
        for info in infos(file):
            found = key_and_extension(info)
            if found is None or found[0].rpartition("/")[2] != base:
                pass
            elif found[0] != key and found[1] in names:
                return f": {info.name} is in another folder of the archive, so it is another sample"
            elif found[0] == key and found[1] in names:
                return f": {info.name} is in the archive, but not beside its other files. {TOGETHER}"
            elif found[0] == key and found[1].rpartition(".")[2] in names:
                return f": {dots(info.name)}"
            elif found[0] == key and len(has) < _SHOWN:
                has.append(f".{found[1]}")
            if time.monotonic() > deadline:
                break
    return f", only {', '.join(has)}{correct}" if has else correct


def infos(file: str) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of a local archive.

    Raises:
        Exception: it is damaged: OSError, TarError, EOFError, zlib.error.
    """
    with fs.open_binary(file) as opened:
        compressed = fs.read_exactly(opened, 2) in _COMPRESSED
        opened.seek(0)
        mode: Any = "r|*" if compressed else "r:"  # which skips the files' data
        source = _decompressed(opened)[0] if compressed else opened
        with tarfile.open(fileobj=source, mode=mode, tarinfo=StrictTarInfo) as tar:
            yield from tar


def _decompressed(opened: Any) -> tuple[Any, bool]:
    """Return a stream of the archive, and whether it is gzip. That is decompressed, as tarfile compares no checksum."""
    head = fs.read_exactly(opened, 2)
    stream = Rejoined(head, opened)
    return (inflated(stream, "GZIP"), True) if head == b"\x1f\x8b" else (stream, False)


class StrictTarInfo(tarfile.TarInfo):
    """Reports an archive that ends too soon, which tarfile would take for a complete one, and long names that are none.

    A header may claim that its long name, or its further attributes, have any size.
    """

    def _proc_member(self, tarfile_: tarfile.TarFile) -> Any:
        if self.type in _LONG and self.size > _LONGEST:
            raise tarfile.ReadError(f"a name of {size(self.size)} at byte {self.offset}")
        process: Any = super()
        return process._proc_member(tarfile_)

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> StrictTarInfo:
        ends: Any = tarfile
        try:
            return super().fromtarfile(tarfile_)
        except ends.EOFHeaderError:  # the block of zeros at the end
            raise
        except ends.HeaderError as error:
            raise tarfile.ReadError(f"no end of archive after {tarfile_.offset} bytes: {error}") from None


def _load(data: bytes) -> Any:
    if not data.startswith(b"PK"):
        return _array(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        check_at_once(sum(info.file_size for info in archive.infolist()), "it", "arrays")
        return {info.filename.removesuffix(".npy"): _array(archive.read(info)) for info in archive.infolist()}


def _array(data: bytes) -> npt.NDArray[Any]:
    """Return the array of a .npy file. NumPy would allocate what its header claims."""
    stream = io.BytesIO(data)
    read = np.lib.format.read_array_header_1_0
    if np.lib.format.read_magic(stream) != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > len(data) and not dtype.hasobject:
        raise ValueError(f"its header says {dtype}{list(shape)}, which is {size(nbytes)}, and it has {size(len(data))}")
    loaded: npt.NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    return loaded


def _text(data: bytes) -> str:
    return data.decode()


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "id", "index", "inx"), int),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("npy", "npz"), _load),
}
