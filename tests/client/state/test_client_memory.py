"""Memory under arrays: its owner learns when the last array dies, whatever happens at that moment."""

from __future__ import annotations

import collections
import contextlib
import os
import resource
import socket
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from penstock._state.memory import Gone, Mapping, Pool, Root, address_of
from penstock_proto import ProtocolError
from penstock_proto.transport import seqpacket
from tests.fakes.fake_daemon import sealed_memfd

NBYTES = 8192


def calls_when_it_dies(arrays: list[npt.NDArray[np.uint8]]) -> list[str]:
    """Return the Python functions that are called while the arrays die."""
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        arrays.clear()
    finally:
        sys.setprofile(None)
    return called


def test_no_python_runs_when_an_array_dies_so_no_ctrl_c_can_be_swallowed_there() -> None:
    memory = np.zeros(64, np.uint8)
    gone: collections.deque[Gone] = collections.deque()
    arrays = [np.asarray(Root(memory, address_of(memory), 64, gone.append, "it"))]
    arrays.append(arrays[0][3:])
    assert calls_when_it_dies(arrays) == []
    assert [left.token for left in gone] == ["it"]

    pool = Pool(keep=1)
    arrays = [np.asarray(pool.take(100))]
    before = address_of(arrays[0])
    assert calls_when_it_dies(arrays) == []
    assert address_of(np.asarray(pool.take(100))) == before


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def maps() -> str:
    with open("/proc/self/maps") as file:
        return file.read()


@contextlib.contextmanager
def most_files(most: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def slot() -> int:
    fd = sealed_memfd(NBYTES)
    os.pwrite(fd, b"x" * NBYTES, 0)
    return fd


def test_a_slot_takes_one_descriptor_and_arrays_over_it_none() -> None:
    gone: collections.deque[Gone] = collections.deque()
    fd, before = slot(), files()
    mapping = Mapping(fd, NBYTES)
    shared = np.asarray(mapping.root(NBYTES, gone.append, "shared"))
    private = np.asarray(mapping.private_root(NBYTES, gone.append, "private"))
    assert files() == before + 1
    private[:] = 1
    assert bytes(shared[:2]) == b"xx"
    shared[:] = 2
    assert os.pread(fd, 2, 0) == b"\2\2"
    address = f"{address_of(shared):x}-"
    del mapping
    assert files() == before
    assert address in maps()
    assert shared[-1] == 2
    arrays = [shared, private]
    del shared, private
    assert calls_when_it_dies(arrays) == []
    assert {left.token for left in gone} == {"shared", "private"}
    assert address not in maps()
    os.close(fd)


@pytest.mark.parametrize("spare", [40, 0])
def test_slots_take_only_half_of_the_files_that_a_process_may_have(spare: int) -> None:
    fd = slot()
    used = max(map(int, os.listdir("/proc/self/fd")))
    kept = []
    with most_files(2 * used if spare else used):
        kept = [Mapping(fd, NBYTES) for _ in range(40 + used)]
        before = files() if spare else 0
        roots = [one.private_root(NBYTES, print, None) for one in kept]
        arrays = [np.asarray(root) for root in roots]
        for number, array in enumerate(arrays):
            assert array[0] == ord("x")
            array[:] = number % 7
        assert [int(array[-1]) for array in arrays] == [number % 7 for number in range(len(arrays))]
        if spare:
            assert before <= used + 3
    assert os.pread(fd, 1, 0) == b"x"
    os.close(fd)


def test_a_descriptor_that_cannot_come_is_an_error_that_says_what_to_do() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = slot()
    seqpacket.send(theirs, b"it", fd)
    with most_files(1), pytest.raises(ProtocolError, match=r"no more open files: raise the limit .*ulimit -n"):
        seqpacket.receive(ours)
    for one in (ours, theirs):
        one.close()
    os.close(fd)
