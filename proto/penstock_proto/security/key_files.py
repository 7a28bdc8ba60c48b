"""Reads and checks one key file: a ZeroMQ certificate (Z85 text), which libzmq's other tools read too."""

from __future__ import annotations

import os
import re
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from ..errors import StartError
from .only_ours import check_file

MOST_NBYTES = 64 << 10
"""Maximum size of a key file in bytes. `penstock keygen` writes some 200."""

_KEY = re.compile(rb"^[ \t]*(public|secret)-key[ \t]*=[ \t]*[\"']?([^\"'\s]*)", re.MULTILINE)


class KeyPair(NamedTuple):
    """A public key and its secret key, in Z85."""

    public: bytes
    secret: bytes


def read_pair(path: Path) -> KeyPair:
    """Read a file with a public and a secret key.

    Raises:
        StartError: it cannot be read or is damaged, or others can read or change it.
    """
    return pair_in(_content(path, secret=True), path)


def read_public(path: Path) -> bytes:
    """Read the public key in a file.

    Raises:
        StartError: it cannot be read or is damaged, or others can change it.
    """
    return public_in(_content(path), path)


def pair_in(content: bytes, name: object) -> KeyPair:
    """Return the two keys in the content of the file `name`.

    Raises:
        StartError: it is damaged.
    """
    import zmq

    public, secret = public_in(content, name), _keys(content).get(b"secret")
    if secret is None:
        raise StartError(f"{name} has no secret key: it must be the file that `penstock keygen` made")
    if not _is_key(secret) or zmq.curve_public(secret) != public:
        raise StartError(f"{name} is damaged: its public key does not belong to its secret key")
    return KeyPair(public, secret)


def public_in(content: bytes, name: object) -> bytes:
    """Return the public key in the content of the file `name`.

    Raises:
        StartError: it is damaged.
    """
    public = _keys(content).get(b"public", b"")
    if not _is_key(public):
        raise StartError(f"{name} is not a key file, or is damaged")
    return public


def _keys(content: bytes) -> dict[bytes, bytes]:
    return dict(_KEY.findall(content))


def _is_key(text: bytes) -> bool:
    """Return whether this is a key of 32 bytes in Z85."""
    from zmq.utils import z85

    try:
        return len(z85.decode(text)) == 32
    except (ValueError, KeyError, struct.error):  # the last two: it is not Z85
        return False


def _content(path: Path, *, secret: bool = False) -> bytes:
    """Return the content of a key file, after the check that only this user and root can change it."""
    try:
        check_file(path, secret=secret)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StartError(f"{path} is not a regular file: give the file that `penstock keygen` made")
            content = file.read(MOST_NBYTES + 1)
    except OSError as error:
        raise StartError(f"cannot read the key {path}: {error.strerror or error}") from None
    if len(content) > MOST_NBYTES:
        raise StartError(f"{path} has more than {MOST_NBYTES} bytes, so it is not a key file")
    return content
