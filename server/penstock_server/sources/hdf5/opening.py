"""Opens HDF5 files by path or URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .. import files as fs
from .superblock import why_not_opened


@contextmanager
def opened(file: str, locking: bool | None) -> Iterator[Any]:
    """Open an HDF5 file by path or URL.

    Raises:
        OSError: it cannot be opened; the message names it, and says what to do.
    """
    import h5py

    if fs.is_url(file):
        with fs.open_binary(file) as stream:
            with _opening(file):
                h5 = h5py.File(stream, "r")
            with h5:
                yield h5
        return
    with fs.errors_that_name(file), _opening(file):
        h5 = h5py.File(file, "r", locking=locking)
    with h5:
        yield h5


@contextmanager
def _opening(file: str) -> Iterator[None]:
    """Say why HDF5 does not open a file, and what to do."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except OSError as error:
        raise OSError(f"{file}: {why_not_opened(file, error)} ({error})") from None
