"""A host's keys as a line on its standard input, so that no file of the machine ever holds them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

import msgspec

from penstock_proto import StartError
from penstock_proto.security.key_files import pair_in, public_in
from penstock_proto.security.keys import SERVER, ClientKeys, require_zmq, secret_name

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
        return ClientKeys(Path("stdin"), pair_in(files[name], name), public_in(files[SERVER], SERVER), "host")
    except (msgspec.MsgspecError, KeyError):
        raise StartError(f"{OPTION}: expected a line with {name} and {SERVER} on standard input") from None
