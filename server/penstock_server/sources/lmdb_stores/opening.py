"""Opens LMDB stores. A process can have each open once, so all splits of a worker share it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock_proto import distribution

from .. import files as fs

_open: dict[tuple[int, str], tuple[Any, int]] = {}
"""The open stores, with the number of those who use them, by process and path."""


@contextmanager
def opened(file: str) -> Iterator[Any]:
    """Open a store for reading, and yield a transaction.

    Raises:
        ImportError: lmdb is not installed.
        OSError: it cannot be opened; the message says why.
    """
    key = os.getpid(), os.path.realpath(file)
    env, users = _open.get(key, (None, 0))
    if env is None:
        env = _environment(file)
    _open[key] = env, users + 1
    try:
        with damage_of(file), env.begin(buffers=True) as transaction:
            yield transaction
    finally:
        env, users = _open.pop(key)
        if users > 1:
            _open[key] = env, users - 1
        else:
            env.close()


@contextmanager
def damage_of(file: str) -> Iterator[None]:
    """Name a store that lmdb cannot read.

    Raises:
        OSError: instead of lmdb's errors.
    """
    import lmdb

    try:
        yield
    except lmdb.Error as error:
        raise OSError(f"{file} cannot be read as an LMDB store ({error}): copy it again") from None


def data_file(file: str) -> str:
    """Return the file that has the data of a store."""
    return os.path.join(file, "data.mdb") if os.path.isdir(file) else file


def _environment(file: str) -> Any:
    try:
        import lmdb
    except ImportError:
        raise ImportError(f"{file} is an LMDB store, which needs lmdb: {distribution.pip_install('lmdb')}") from None
    if fs.is_url(file):
        raise OSError(f"{file} is a URL, and LMDB stores are mapped into memory: copy it to a local disk")
    path = data_file(file)
    nbytes = fs.size_of(path) or 0
    with damage_of(file):
        env = lmdb.open(file, subdir=os.path.isdir(file), readonly=True, lock=False, readahead=False, create=False)
    wanted = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if nbytes < wanted:  # reading beyond the end would end the process
        env.close()
        raise OSError(f"{path} is truncated ({nbytes:,} of {wanted:,} bytes): copy it again")
    return env
