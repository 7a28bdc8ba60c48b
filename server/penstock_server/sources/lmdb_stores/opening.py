"""Opens LMDB stores. A process can have each open once, so all splits of a worker share it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from penstock_proto import distribution

from .. import files as fs

_DATABASE_BYTES = 48
_LOOKED_AT = 1000
"""Keys among which named databases are looked for. A store of databases has few other keys."""

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
        env = lmdb.open(
            file, subdir=os.path.isdir(file), readonly=True, lock=False, readahead=False, create=False, max_dbs=1
        )
    _check_readable(env, path, nbytes)
    _check_named(env, file)
    return env


def _check_readable(env: Any, path: str, nbytes: int) -> None:
    wanted = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if nbytes < wanted:  # reading beyond the end would end the process
        env.close()
        raise OSError(f"{path} is truncated ({nbytes:,} of {wanted:,} bytes): copy it again")


def _check_named(env: Any, file: str) -> None:
    """Refuse a store with named databases, which lmdb shows as keys with values for itself (MDB_db, of 48 bytes)."""
    import lmdb

    named = []
    with damage_of(file), env.begin(buffers=True) as transaction:
        for key, value in itertools.islice(transaction.cursor(), _LOOKED_AT):
            if len(value) == _DATABASE_BYTES:
                with suppress(lmdb.Error):
                    env.open_db(bytes(key), txn=transaction, create=False)
                    named.append(bytes(key).decode(errors="backslashreplace"))
                    break
    if named:
        env.close()
        raise OSError(
            f"{file} has named databases, such as {named[0]!r}, and Penstock reads only the unnamed one: write "
            "their keys to a store of their own"
        )
