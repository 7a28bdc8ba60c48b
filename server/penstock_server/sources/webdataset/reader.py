"""Tar files in the layout of WebDataset: the files of a sample are adjacent and differ only in their extensions."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from penstock_proto.value_text import shown

from .. import files as fs
from ..names_on_disk import on_disk_as
from ..reader import Reader
from ..structure import Columns
from ..whole_files import Shard

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
"""A sample's key, which ends at the first dot of the last part, and the extension."""

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
                yield self._sample(f"{split.file}: sample {key!r}", members)

    def _sample(self, where: str, members: dict[str, bytes]) -> Any:
        values = []
        for names in self._wanted:
            name = next((one for one in names if one in members), None)
            if name is None:
                raise LookupError(
                    f"{where} has no .{' and no .'.join(names)} file: correct leaves=, or remove the sample"
                )
            try:
                values.append([self._decoded(name, members[name])])
            except Exception as error:
                raise ValueError(f"{where}: cannot decode its .{name} file: {type(error).__name__}: {error}") from error
        return next(self._columns.samples(values))

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
        ValueError: the archive has a file twice.
    """
    members: dict[str, bytes] = {}
    key, complete = "", False
    try:
        with tarfile.open(fileobj=opened, mode="r|*", tarinfo=_StrictTarInfo) as tar:
            for info in tar:
                found = key_and_extension(info)
                if found is None:
                    continue
                if found[0] != key:
                    if complete:
                        yield key, members
                    key, members, complete = found[0], {}, True
                name = found[1]
                if name in members:
                    raise ValueError(f"{file}: {info.name} is there twice: give each sample a name of its own")
                if wanted is None or name in wanted:
                    stream = tar.extractfile(info)
                    assert stream is not None  # it is a regular file
                    members[name] = stream.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise OSError(f"{file}: the tar file is truncated or damaged: copy it again ({error})") from None
    if complete:
        yield key, members


def key_and_extension(info: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return the key of the sample that a file belongs to, and its extension; None if it belongs to none."""
    match = _NAME.fullmatch(info.name) if info.isfile() else None
    return None if match is None else (match[1], match[2].lower())


class _StrictTarInfo(tarfile.TarInfo):
    """Reports an archive that ends too soon, which tarfile would take for a complete one."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _StrictTarInfo:
        ends: Any = tarfile
        try:
            return super().fromtarfile(tarfile_)
        except ends.EOFHeaderError:  # the block of zeros at the end
            raise
        except ends.HeaderError as error:
            raise tarfile.ReadError(f"no end of archive after {tarfile_.offset} bytes: {error}") from None


def _load(data: bytes) -> Any:
    loaded = np.load(io.BytesIO(data), allow_pickle=False)
    return loaded if isinstance(loaded, np.ndarray) else dict(loaded)


def _text(data: bytes) -> str:
    return data.decode()


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "id", "index", "inx"), int),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("npy", "npz"), _load),
}
