"""What user modules see of the trainer's process, so that they see the same in workers: `sys.argv`, `sys.path`, the
working directory, the environment, and the options of the interpreter.

A trainer takes it when it opens a feed. The working directory, the environment and the options become those of its
private daemon, which passes them on. The rest goes to the workers in a memfd, which each process inherits from the
one before: it has no bound, as the words of a command line have, and leaves nothing behind.
"""

from __future__ import annotations

import os
import sys

import msgspec
from msgspec import Struct

VARIABLE = "PENSTOCK_WORLD"
"""The environment variable with the fd of the memfd, until a worker has read it."""

_X_OPTIONS = ("dev", "utf8", "int_max_str_digits", "warn_default_encoding", "no_debug_ranges")


class Carried(Struct, frozen=True):
    """A feed that workers cannot import.

    Attributes:
        feed: its pickle.
        lines: the lines of the sources that are in no file.
        files: those of the user's modules that were loaded when it was pickled; it may import them.
    """

    feed: bytes
    lines: dict[str, list[str]]
    files: tuple[bytes, ...]


class World(Struct, frozen=True):
    """What modules see in a process.

    Attributes:
        argv, path: `sys.argv` and `sys.path`. They are bytes, because names of files need not be text.
        main: the file of `__main__`; None if it has none, as in a notebook.
        directory: the working directory; None if it was deleted.
        environment: the environment variables.
        carried: the feed, if workers cannot import it.
    """

    argv: tuple[bytes, ...]
    path: tuple[bytes, ...]
    main: bytes | None
    directory: bytes | None
    environment: dict[bytes, bytes]
    carried: Carried | None = None

    @classmethod
    def here(cls, first: str | None = None, carried: Carried | None = None) -> World:
        """Return that of this process, at this moment.

        Args:
            first: a directory that comes first in `path`, unless `path` has it.
            carried: the feed, if workers cannot import it.
        """
        path = [place for place in sys.path if isinstance(place, str)]
        if first is not None and first not in path:
            path.insert(0, first)
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        try:
            directory = os.getcwdb()
        except FileNotFoundError:
            directory = None
        return cls(
            argv=tuple(map(_packed, sys.argv)),
            path=tuple(map(_packed, path)),
            main=None if main is None else _packed(main),
            directory=directory,
            environment=dict(os.environb),
            carried=carried,
        )

    def write(self) -> int:
        """Write it to a memfd, and return its fd."""
        fd = os.memfd_create("penstock-world", os.MFD_CLOEXEC)
        with open(fd, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(self))
        return fd

    @staticmethod
    def read(fd: int) -> World:
        """Return what `write` wrote to this memfd."""
        return msgspec.msgpack.decode(os.pread(fd, os.fstat(fd).st_size, 0), type=World)

    def enter(self) -> None:
        """Give this process its `sys.argv`, `sys.path` and `__main__.__file__`."""
        sys.argv = list(map(_unpacked, self.argv))
        main = vars(sys.modules["__main__"])
        main.pop("__file__", None)
        if self.main is not None:
            main["__file__"] = _unpacked(self.main)
        self.enter_path()

    def enter_path(self) -> None:
        """Give this process its `sys.path`."""
        sys.path[:] = map(_unpacked, self.path)


def inherited() -> list[int]:
    """Return the fd that processes of user code must inherit, in a list; none if there is no such trainer."""
    fd = os.environ.get(VARIABLE)
    return [] if fd is None else [int(fd)]


def interpreter() -> list[str]:
    """Return the command of a Python process with the options of this one that user code can notice: asserts,
    warnings, development mode."""
    flags = sys.flags
    options = ["-" + "O" * flags.optimize] if flags.optimize else []
    options += ["-" + "b" * flags.bytes_warning] if flags.bytes_warning else []
    options += ["-B"] if sys.dont_write_bytecode else []
    options += [f"-W{option}" for option in sys.warnoptions]
    for name, value in sys._xoptions.items():
        if name in _X_OPTIONS:
            options += ["-X", name if value is True else f"{name}={value}"]
    return [sys.executable, *options]


def _packed(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _unpacked(data: bytes) -> str:
    return data.decode(errors="surrogatepass")
