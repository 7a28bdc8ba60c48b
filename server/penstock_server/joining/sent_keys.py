"""A host's keys as a line on its standard input, so that no file of the machine ever holds them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from penstock_proto import StartError
from penstock_proto.keys import SERVER, ClientKeys, read_pair, read_public, require_zmq, secret_name

OPTION = "--keys-from-stdin"


def write(files: dict[str, bytes], stdin: IO[bytes]) -> None:
    """Send the files of a host's folder of keys, by name, to the `penstock join` that reads `stdin`."""
    with contextlib.suppress(BrokenPipeError):  # the process has ended, and has said why
        os.write(stdin.fileno(), msgspec.json.encode(files) + b"\n")  # the kernel's buffer holds it


def read() -> ClientKeys:
    """Read the keys from standard input, and nothing after them.

    Raises:
        StartError: the keys are missing or damaged, or pyzmq is missing.
    """
    require_zmq(OPTION)
    name = secret_name("host")
    try:
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            files = msgspec.json.decode(stdin.readline(), type=dict[str, bytes])
        with _file(files[name]) as own, _file(files[SERVER]) as server:
            return ClientKeys(Path("stdin"), read_pair(own), read_public(server), "host")
    except (msgspec.MsgspecError, KeyError):
        raise StartError(f"{OPTION}: expected a line with {name} and {SERVER} on standard input") from None


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[Path]:
    """Yield the path of a file in memory with this content, because the keys are read from files."""
    fd = os.memfd_create("penstock-key", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, data)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
