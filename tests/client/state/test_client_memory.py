"""Memory under arrays: its owner learns when the last array dies, whatever happens at that moment."""

from __future__ import annotations

import collections
import sys

import numpy as np
import numpy.typing as npt

from penstock._state.memory import Gone, Pool, Root, address_of


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
