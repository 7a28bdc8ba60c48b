"""Penstock's own classes have the same names on disk wherever their files are: in the digest of a list of splits, which
each state has, and in the keys of cached splits."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import penstock_server
from penstock_server import Cache, DictSpec, FixedLen, Leaf, OnError, Pad, Shuffle, TupleSpec, VarLen, Weights
from penstock_server.feed.options.cache_key import digest
from penstock_server.sources import names_on_disk
from penstock_server.sources.parquet.reader import RowGroup
from penstock_server.sources.registry import BUILT_IN
from penstock_server.sources.splits.byte_range import ByteRange
from penstock_server.sources.splits.row_ranges import RowRange
from penstock_server.sources.splits.whole_files import Shard
from penstock_server.worker.reading.split_list import SharedSplits, write_list
from tests.golden.test_golden import FEEDS, GOLDEN, folder_of_feeds

RECORDED: list[str] = json.loads((GOLDEN / "names.json").read_text())
"""Names on disk that Penstock has written. Add names, but never change one."""

SERVER = Path(penstock_server.__file__).parent


@pytest.fixture(scope="module")
def names() -> dict[type, str]:
    """The name on disk of each class that has one."""
    for path in SERVER.rglob("*.py"):
        if "@on_disk_as(" in path.read_text():
            importlib.import_module(".".join(path.relative_to(SERVER.parent).with_suffix("").parts))
    return dict(names_on_disk._names)


def test_names_are_those_that_were_recorded(names: dict[type, str]) -> None:
    assert sorted(names.values()) == sorted(RECORDED)
    assert all(names_on_disk.may_name_ours(pickle.dumps(cls)) for cls in names)


def test_every_public_class_that_can_be_in_a_split_has_a_name(names: dict[type, str]) -> None:
    public = {getattr(penstock_server, name) for name in penstock_server.__all__}
    declared = {
        penstock_server.Feed,
        penstock_server.DROP,
        Cache,
        OnError,
        Pad,
        Shuffle,
        Weights,
    }  # a feed and its options are declared, not listed
    assert public - names.keys() == declared


WRITTEN = """
import io, json, os, pickle, sys

sys.path.insert(0, os.getcwd())
import feeds
from penstock_server import Feed
from penstock_server.feed.options import cache_key
from penstock_server.worker.cache.split_cache import SplitCache

found, readers = set(), {True: set(), False: set()}
real = cache_key._global_name

def noted(value):
    found.add((value.__module__, value.__qualname__))
    return real(value)

class Noting(pickle.Unpickler):
    def find_class(self, module, name):
        found.add((module, name))
        return super().find_class(module, name)

cache_key._global_name = noted
for feed in list(vars(feeds).values()):
    if isinstance(feed, Feed) and feed.splits is not None:
        splits = list(feed.splits()) if callable(feed.splits) else list(feed.splits)
        readers[feed.cache is not None].add(getattr(feed.generate, "__name__", ""))
        for split in splits:
            Noting(io.BytesIO(pickle.dumps(split, protocol=5))).load()
        if feed.cache is not None:
            cache = SplitCache(feed.plan("feed").cache, getattr(feed.generate, "stamp", None))
            for split in splits:
                cache.key_of(split)
print(json.dumps([sorted(found), sorted(readers[False]), sorted(readers[True])]))
"""
"""Prints the module and the name of everything that the feeds in tests/golden write to disk by its name, and the names
of their generators: without a cache, and with one."""


def test_every_class_of_ours_that_feeds_write_to_disk_has_a_name(names: dict[type, str], tmp_path: Path) -> None:
    folder = folder_of_feeds(tmp_path / "feeds", cache=False)
    (folder / "feeds.py").write_text(FEEDS)
    run = subprocess.run([sys.executable, "-c", WRITTEN], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    written, without_cache, with_cache = json.loads(run.stdout)
    # Those with an index have neither splits nor a cache.
    constructors = {f"Feed.{one.constructor}" for one in BUILT_IN} - {"Feed.from_csv", "Feed.from_folder"}
    assert constructors <= {*without_cache}, "add feeds of this constructor to tests/golden/feeds.py"
    assert constructors <= {*with_cache}, "add a feed of this constructor with cache= to tests/golden/feeds.py"
    ours = {(module, name) for module, name in written if module.partition(".")[0].startswith("penstock")}
    assert len(ours) > 10
    assert ours <= {(cls.__module__, cls.__qualname__) for cls in names}, "give it a name with @on_disk_as"


class Own:
    """A class of a user, which has the name of its module and its own."""

    def __init__(self, value: Any) -> None:
        self.value = value


ROWS = RowRange("a.h5", 0, 64, 9000)
VALUES: list[Any] = [
    ROWS,
    RowRange("b" * 300, 1 << 40, 1 << 41, None),
    (ROWS, RowRange("b.npy", 0, 64, 5000)),
    (ROWS, ROWS),
    RowGroup("a.parquet", 3, 100, 5000),
    ByteRange("a.tfrecord", 900, None, 9000),
    Shard("a.tar", None),
    FixedLen((3,), "float32", default=0.5),
    {"FixedLen": FixedLen((), "int64"), "penstock_server.sources.features": [VarLen("int64", pad_to=4), VarLen]},
    [Leaf("int64", (None, 3)), TupleSpec((Leaf("float32", ()),)), DictSpec(("a",), (Leaf("string", ()),))],
    (Own(ROWS), Own(Own), {"x": np.arange(5)}, {1, 2}, frozenset({3}), 2.5, None, True, b"x" * 300, 1 << 80),
    (ROWS, b"x" * 70_000, "ä" * 70_000, np.arange(20_000), [RowRange(str(i), i, i + 1, i) for i in range(3000)]),
    "penstock_server.sources.row_ranges",
    7,
]


class Places:
    """Puts the classes that have names on disk into other modules."""

    def __init__(self, names: dict[type, str], several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self._names = names
        self._several = several
        self._monkeypatch = monkeypatch

    def as_named(self) -> None:
        """Put each class into the module of its name on disk."""
        for cls, name in self._names.items():
            self._put(cls, sys.intern(name.rpartition(".")[0]))  # classes of one module share its name

    def move(self) -> None:
        """Put each class elsewhere."""
        for number, cls in enumerate(self._names):
            self._put(cls, f"penstock_server.elsewhere{number if self._several else ''}")

    def _put(self, cls: type, place: str) -> None:
        if place not in sys.modules:
            self._monkeypatch.setitem(sys.modules, place, ModuleType(place))
        self._monkeypatch.setattr(sys.modules[place], cls.__name__, cls, raising=False)
        self._monkeypatch.setattr(cls, "__module__", place)


@pytest.fixture(params=[False, True], ids=["to one module", "to several modules"])
def places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, names: dict[type, str]) -> Places:
    return Places(names, request.param, monkeypatch)


def listed(values: list[Any]) -> Iterator[Any]:
    """Yield the digest of a list of splits, and then the splits as workers read them."""
    fd, nbytes, found = write_list(values)
    try:
        yield found
        splits = SharedSplits(fd, nbytes)
        yield from (splits[index] for index in range(len(splits)))
    finally:
        os.close(fd)


def test_the_bytes_do_not_depend_on_dill(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = dict.fromkeys(pickle._Pickler.dispatch, lambda *_: pytest.fail("dill's"))  # type: ignore[attr-defined]
    value = RowRange("a", 0, 5, 9)
    wanted = names_on_disk._pickled(value)
    monkeypatch.setattr(pickle._Pickler, "dispatch", changed)  # type: ignore[attr-defined]
    assert names_on_disk._pickled(value) == wanted


def test_a_list_of_splits_keeps_its_digest_when_classes_move_and_workers_can_read_it(places: Places) -> None:
    places.as_named()
    pickles = [pickle.dumps(value, protocol=5) for value in VALUES]
    assert names_on_disk.with_names(VALUES, pickles) is pickles
    before = [next(listed(values)) for values in ([], VALUES, *([value] for value in VALUES))]
    places.move()
    now = [pickle.dumps(value, protocol=5) for value in VALUES]
    assert [number for number, data in enumerate(now) if data == pickles[number]] == [12, 13]
    assert names_on_disk.with_names(VALUES, now) == pickles
    assert [next(listed(values)) for values in ([], VALUES, *([value] for value in VALUES))] == before
    assert repr([*listed(VALUES)][1:10]) == repr(VALUES[:9])


def test_the_key_of_a_cached_split_stays_the_same_when_classes_move(places: Places, names: dict[type, str]) -> None:
    values = [*VALUES[:11], *names]
    before = [digest(value) for value in values]
    assert len(set(before)) == len(values)
    places.move()
    assert [digest(value) for value in values] == before


def test_the_names_of_the_classes_of_users_are_those_of_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(Own(1)), next(listed([Own(1)]))
    elsewhere = ModuleType("elsewhere")
    elsewhere.Own = Own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    monkeypatch.setattr(Own, "__module__", "elsewhere")
    assert digest(Own(1)) != before[0]
    assert next(listed([Own(1)])) != before[1]
