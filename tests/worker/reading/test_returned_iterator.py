"""A generator function may return an iterator of the user's own class. Its `__iter__` is called by user code only, and
an object that several calls return is never read by two of them at once."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import penstock
from penstock_proto import GeneratorError
from penstock_server.in_process import engine
from tests.conftest import Serve

MODULE = """
from penstock_server import Feed

class StartsOver:
    "Its __iter__ begins again, as that of many readers does."
    def __iter__(self):
        self.at = 0
        return self
    def __next__(self):
        if self.at == 100:
            raise StopIteration
        self.at += 1
        return self.at - 1

class GoesOn:
    "It begins again when it has ended, as batchers with queues do."
    at = -1
    def __iter__(self):
        return self
    def __next__(self):
        self.at += 1
        if self.at == 100:
            self.at = -1
            raise StopIteration
        return self.at

class Loader:
    def __init__(self):
        self.rows = StartsOver()
    def read(self):
        return iter(self.rows)
    def keep(self):
        self.latest = (row for row in range(100))
        return self.latest

def around():
    rows = GoesOn()
    return lambda: rows

def plus_one(sample):
    return sample + 1

starts_over, goes_on = StartsOver(), GoesOn()
generator = (row for row in range(100))

kept = Feed(Loader().keep, batch_size=10, name="kept")
new = Feed(lambda: iter(StartsOver()), batch_size=10, name="new")
shared_out = Feed(lambda: iter(StartsOver()), transform=plus_one, batch_size=10, name="shared_out")
of_module = Feed(lambda: iter(starts_over), batch_size=10, name="of_module")
of_object = Feed(Loader().read, batch_size=10, name="of_object")
of_closure = Feed(around(), batch_size=10, name="of_closure")
ends_itself = Feed(lambda: goes_on, batch_size=10, name="ends_itself")
generator_object = Feed(lambda: generator, batch_size=10, name="generator_object")
two_at_once = Feed(lambda split: iter(starts_over), splits=range(4), batch_size=10, shuffle=100, name="two_at_once")
"""
HELD = {"of_module": "StartsOver", "of_object": "StartsOver", "of_closure": "GoesOn", "ends_itself": "GoesOn"}


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(engine, "_warned", set())
    caplog.set_level(logging.WARNING, "penstock")
    return caplog


@pytest.mark.parametrize("workers", [1, 3])
def test_a_stream_has_the_samples_of_the_iterator_and_the_log_says_if_it_is_not_new(serve: Serve, workers: int) -> None:
    daemon = serve(MODULE, "new", "kept", "shared_out", *HELD, workers=workers)
    for name in ("new", "kept", "shared_out", *HELD):
        first = int(name == "shared_out")
        with penstock.connect(daemon.urls[name]) as connection:
            for _ in range(3):
                rows = [int(row) for batch in connection.batches() for row in batch]
                assert rows == list(range(first, first + 100)), name
    said = dict(re.findall(r"feed (\w+): \S+ returns an iterator \((\w+)\) that a variable holds", daemon.stderr()))
    assert said == HELD


@pytest.mark.parametrize("name", ["new", "kept", "shared_out", *HELD])
def test_so_does_a_stream_without_workers(tmp_path: Path, warned: pytest.LogCaptureFixture, name: str) -> None:
    path = tmp_path / f"returns_{name}.py"
    path.write_text(MODULE)
    first = int(name == "shared_out")
    with penstock.connect(f"{path}:{name}", workers=0) as connection:
        for _ in range(3):
            assert [int(row) for batch in connection.batches() for row in batch] == list(range(first, first + 100))
    assert ("that a variable holds" in warned.text) == (name in HELD)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_that_two_splits_would_read_at_once_is_an_error(tmp_path: Path, workers: int) -> None:
    path = tmp_path / f"twice_{workers}.py"
    path.write_text(MODULE)
    message = r"returned an iterator \(StartsOver\) that another split is reading: each call must return a new one"
    with penstock.connect(f"{path}:two_at_once", workers=workers) as connection:
        with pytest.raises(GeneratorError, match=message):
            list(connection.batches())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_that_a_variable_holds_is_refused(tmp_path: Path, workers: int) -> None:
    path = tmp_path / f"once_{workers}.py"
    path.write_text(MODULE)
    with pytest.raises(GeneratorError, match=r"returns <generator object .*which a variable holds"):
        penstock.connect(f"{path}:generator_object", workers=workers)


ONCE = """
import csv, functools, itertools
from penstock_server import Feed

lines = csv.reader(map(str, range(100)))
known = iter([])
number = 3

def of_module(split):
    def rows():
        yield from lines
    for row in rows():
        yield int(row[0]) + number

def around():
    rows = iter(range(100))
    def generate(split):
        yield from rows
    return generate

class Rows:
    def __init__(self):
        self.rows = enumerate(range(100))
    def __call__(self, split):
        for _, row in self.rows:
            yield row

class Fresh:
    "Its first run has no iterator yet."
    def __call__(self, split):
        self.rows = iter(range(100))
        yield from self.rows

def fine(split):
    known = iter(range(100))
    yield from known

options = {"splits": [0], "batch_size": 10}
of_module, of_closure, of_object = Feed(of_module, **options), Feed(around(), **options), Feed(Rows(), **options)
fresh, fine = Feed(Fresh(), **options), Feed(fine, **options)
"""


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("of_module", "uses lines,"),
        ("of_closure", "uses rows around generate,"),
        ("of_object", "uses Rows.rows,"),
        ("fresh", ""),
        ("fine", ""),
    ],
)
def test_an_iterator_that_a_generator_does_not_make_is_named(
    tmp_path: Path, warned: pytest.LogCaptureFixture, name: str, what: str
) -> None:
    (tmp_path / "feeds.py").write_text(ONCE)
    with penstock.connect(f"{tmp_path}/feeds.py:{name}", workers=0) as connection:
        assert (sum(len(batch) for batch in connection.batches()) == 100) is not bool(what)
    assert (f"its generator {what} which can be read only once" in warned.text) == bool(what)
    assert ("read only once" in warned.text) == bool(what)
