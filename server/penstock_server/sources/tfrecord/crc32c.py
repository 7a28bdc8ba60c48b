"""CRC32C, the checksum of TFRecord files: computed by google-crc32c if it is installed, else with NumPy.

A CRC is linear: the CRC of a block is the XOR of one term for each byte, which depends only on the byte and its place.
So with a table of all terms, a block takes a look-up and an XOR of NumPy arrays, at about 200 MB/s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_BLOCK = 1024  # bytes; the table takes 1 MiB
_FEW = 64  # bytes for which a loop is faster


def masked(crc: int) -> int:
    """Return the CRC as TFRecord files store it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def crc32c() -> Callable[[bytes], int]:
    """Return the fastest function that computes the CRC32C of bytes."""
    try:
        import google_crc32c
    except ImportError:
        return in_numpy
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def in_numpy(data: bytes) -> int:
    """Return the CRC32C of `data`, without google-crc32c."""
    table = _table()
    rest = bytearray(data)
    crc = 0xFFFFFFFF
    for start in range(0, len(rest) - _FEW, _BLOCK):
        block = np.frombuffer(rest, np.uint8)[start : start + _BLOCK]
        block[:4] ^= np.frombuffer(crc.to_bytes(4, "little"), np.uint8)  # the CRC so far affects only these four
        places = _places()[_BLOCK - len(block) :]
        crc = int(np.bitwise_xor.reduce(table.take(places + block)))
    covered = -(-max(0, len(rest) - _FEW) // _BLOCK) * _BLOCK
    bytewise = _bytewise()
    for byte in data[covered:]:
        crc = bytewise[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@functools.cache
def _bytewise() -> list[int]:
    """Return the CRC of each byte."""
    one: list[int] = _table()[-256:].tolist()
    return one


@functools.cache
def _places() -> npt.NDArray[np.intp]:
    return np.arange(_BLOCK, dtype=np.intp) * 256


@functools.cache
def _table() -> npt.NDArray[np.uint32]:
    """Return the term of each byte value at each place of a block, one place after another."""
    one: npt.NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        one = one >> np.uint32(1) ^ np.where(one & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    terms = [one]
    while len(terms) < _BLOCK:  # one more byte follows
        terms.append(one[terms[-1] & 255] ^ terms[-1] >> np.uint32(8))
    return np.concatenate(terms[::-1])
