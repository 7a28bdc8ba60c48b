"""A signal, such as Ctrl-C, interrupts `next` on the batches of NumPy. Who reads on gets every batch once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import penstock
from tests.conftest import Serve

FEEDS = """
from penstock_server import Feed

def samples(split):
    yield from range(100 * split, 100 * split + 12)

single = Feed(samples, splits=[0, 1, 2], batch_size=3)
many = Feed(samples, splits=[0, 1, 2], batch_size=1, turn=4, epochs=3)
"""
MOST = 3000


class Interrupt:
    """Raises KeyboardInterrupt in this thread, at place number `at` of those where Python runs the handlers of signals:
    when a function of Python begins, and when one of C has ended. (Loops are left out.)"""

    def __init__(self, at: int) -> None:
        self.at = at
        self.left = at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "c_return") or frame.f_code in NOT_IN:
            return
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


NOT_IN = [Interrupt.__exit__.__code__, threading.Condition.wait.__code__]
"""Functions within which no interrupt comes: an interrupt in CPython's own `wait` loses its lock."""


def read(batches: Iterator[Any], interrupt: int, after: int) -> tuple[list[list[int]], bool]:
    """Read an epoch. Interrupt `next` once, after `after` batches, at place number `interrupt`. Return the batches, and
    whether there was such a place."""
    found: list[list[int]] = []
    signal = Interrupt(interrupt)
    for _ in range(after):
        found.append(next(batches).tolist())
    try:
        with signal:
            batch = next(batches)
        found.append(batch.tolist())
    except KeyboardInterrupt:
        pass
    return found + [batch.tolist() for batch in batches], signal.left <= 0


def sweep(url: str, after: int, step: int) -> None:
    with penstock.connect(url) as connection:
        expected = [batch.tolist() for batch in connection.batches()]
    for interrupt in range(1 + after % step, MOST, step):
        with penstock.connect(url) as connection:
            found, interrupted = read(connection.batches(), interrupt, after)
            assert found == expected, f"call {interrupt}"
            assert connection.stats()["batches"] == len(expected), f"call {interrupt}"
            state = connection.state_dict()
            if not interrupted:
                break
        if interrupt % 8 == 0:
            with penstock.connect(url, state=state) as connection:
                assert len(list(connection.batches())) == len(expected), "the next epoch is another one"
    else:
        pytest.fail("it never ends")
    assert interrupt > step, "the interrupts come elsewhere"


NOT_IN.append(read.__code__)


PLACES = pytest.mark.parametrize(
    ("name", "after"), [("single", 0), ("single", 3), ("many", 0), ("many", 2), ("many", 4)]
)


@PLACES
def test_reading_goes_on_after_an_interrupt_anywhere(serve: Serve, name: str, after: int) -> None:
    sweep(serve(FEEDS, name, workers=1).urls[name], after, step=11)


@pytest.mark.soak
@PLACES
def test_reading_goes_on_after_an_interrupt_at_every_place(serve: Serve, name: str, after: int) -> None:
    sweep(serve(FEEDS, name, workers=1).urls[name], after, step=1)


def test_an_interrupted_reader_that_has_been_replaced_disturbs_no_other(serve: Serve) -> None:
    url = serve(FEEDS, "many", workers=1).urls["many"]
    with penstock.connect(url) as connection:
        quiet, follows = ([batch.tolist() for batch in connection.batches()] for _ in range(2))
    for interrupt in range(1, MOST):
        with penstock.connect(url) as connection:
            old = connection.batches()
            first = [next(old).tolist() for _ in range(2)]
            new = connection.batches()
            found = [next(new).tolist() for _ in range(6)]
            signal = Interrupt(interrupt)
            try:
                with signal:
                    next(old)
            except (KeyboardInterrupt, StopIteration, penstock.StreamClosed):
                pass
            found += [batch.tolist() for batch in new]
            assert (first, found) == (quiet[:2], follows)
        if signal.left > 0:
            break
    assert interrupt > 1


def test_each_batch_goes_to_one_of_several_threads_that_read_an_iterator(tmp_path: Path, serve: Serve) -> None:
    source = FEEDS + "\nslow = Feed(samples, splits=range(30), batch_size=2, turn=8)\n"
    (tmp_path / "feeds.py").write_text(source)
    urls = [(serve(source, "slow", workers=1).urls["slow"], None), (f"{tmp_path}/feeds.py:slow", 0)]
    for url, workers in urls:
        with penstock.connect(url, workers=workers) as connection:
            batches = connection.batches()
            found: list[int] = []

            def run(batches: Any = batches, found: Any = found) -> None:
                for batch in batches:
                    found.extend(batch.tolist())
                    time.sleep(0.001)

            threads = [threading.Thread(target=run) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert len(found) == 360
            assert len(set(found)) == 360
            assert connection.stats()["batches"] == 180
