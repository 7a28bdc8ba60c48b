"""`Feed` refuses at once what cannot work, and MODULE:ATTR finds feeds."""

from __future__ import annotations

import functools
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock_proto import StartError
from penstock_proto.batches.layout import HEADER
from penstock_server import DictSpec, Feed, Leaf, OnError, Shuffle, TupleSpec
from penstock_server.feed.feed_warnings import mixing_warning, names_warning, workers_warning
from penstock_server.feed.options.generator_call import GeneratorCall, Wants
from penstock_server.feed.options.plan_sizes import ENDLESS, block_samples, fixed_slots, segment_count, turn_of
from penstock_server.targets.importing import load


def wants(generate: Any, *, has_splits: bool, segments: bool = False) -> Wants:
    return GeneratorCall(generate, has_splits=has_splits, segments=segments).wants


def by_split(path: str) -> Iterator[int]:
    yield 1


def with_all(path: str, rng: Any, epoch: int) -> Iterator[int]:
    yield 1


def by_shard(shard: tuple[int, int]) -> Iterator[int]:
    yield 1


def alone() -> Iterator[int]:
    yield 1


def asks_too_much(path: str, size: int) -> Iterator[int]:
    yield 1


def asks_split_and_shard(path: str, shard: tuple[int, int]) -> Iterator[int]:
    yield 1


def number_second(rng: Any, number: int) -> Iterator[int]:
    yield 1


def two_numbers(number: int, size: int) -> Iterator[int]:
    yield 1


def no_yield(path: str) -> None:
    return None


class Once:
    """An iterator of user code."""

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> int:
        return 1


class DataFlow:
    """A DataFlow, as tensorpack has them."""

    __module__ = "tensorpack.dataflow"

    def reset_state(self) -> None: ...

    def __iter__(self) -> Iterator[list[int]]:
        yield [1]


class Numbered:
    """A class whose instances have numbered items."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("generate", "options", "message"),
    [
        (by_split, {}, "by_split takes a split \\(path\\), but there are none: give splits="),
        (alone, {"splits": [1]}, "alone takes no split: add a first parameter"),
        (by_shard, {"splits": [1]}, "takes no split"),
        (asks_split_and_shard, {"splits": [1]}, "takes shard, which is for generators without splits="),
        (asks_too_much, {"splits": [1]}, "without an argument: size. A generator can take .* functools.partial"),
        (alone(), {}, "An iterator can be read only once: give the function, Feed\\(alone, args=...\\)"),
        (
            iter("ab"),
            {},
            r"(?s)An iterator can be read only once: give a function that makes it:.* yield from \.\.\.",
        ),
        (Once(), {}, r"(?s)read only once: give a function.*:\n +yield from Once\(\.\.\.\)\n +feed = Feed\(samples, "),
        ((one for one in "ab"), {}, r"(?s)An iterator can be read only once: give a function that makes it:"),
        (Queue(), {}, r"(?s)Give a function that reads samples from it and yields them:\n +def samples\(\):"),
        ({1, 2}, {}, r"(?s)got {1, 2}. Give a function that makes it:\n +def samples\(\):"),
        (
            DataFlow(),
            {},
            r"(?s)fix_rng_seed\(int.*flow = DataFlow\(\.\.\.\)\n +flow.reset_state\(\)\n +yield from map\(tuple",
        ),
        (
            DataFlow,
            {},
            r"(?s)DataFlow is a class: give a function .*flow.reset_state\(\)\n +yield from map\(tuple",
        ),
        (Numbered, {}, r"Numbered is a class: give an instance, Numbered\(...\), whose items are then served"),
        (3, {}, "expected a generator function .* got 3"),
        (by_split, {"splits": "a.h5"}, "splits must be a list .* got 'a.h5'"),
        (by_split, {"splits": 3}, r"splits must be a list .* got 3: range\(3\) has so many"),
        (by_split, {"split": [1]}, "a feed has no option split=: did you mean splits="),
        (by_split, {"batchsize": 1}, "a feed has no option batchsize=: did you mean batch_size="),
        ([1, 2], {"splits": [1]}, "splits= is for generators"),
        ([1, 2], {"samples": 3}, "samples=3, but the indexable object has 2"),
        ({"x": 1}, {}, "expected a list of samples or a generator function, got {'x': 1}: .*give a list of dicts"),
        (list, {}, r"list is a class: give an instance, list\(...\), whose items are then served"),
        (alone, {"batch_size": 0}, "batch_size must be 1 to .* got 0"),
        (alone, {"batch_size": 1.5}, "batch_size must be a whole number.* got 1.5"),
        (alone, {"shuffle": True}, "shuffle must be a whole number.* got True: give how many samples to mix"),
        (alone, {"shuffle": False}, "shuffle must be a whole number.* got False: leave it out"),
        (alone, {"shuffle": -1}, "shuffle must be 0 to .* got -1"),
        (alone, {"seed": None}, "seed must be a whole number.* got None"),
        (alone, {"lanes": 0}, "lanes must be 1 to .* got 0"),
        (alone, {"epochs": 0}, "epochs must be 1 to .* got 0"),
        (alone, {"order": "any"}, "order must be 'exact' or 'fast', got 'any'"),
        (alone, {"on_error": "ignore"}, "on_error must be 'raise', 'skip' or 'retry', got 'ignore'"),
        (alone, {"on_error": "skip", "samples": 9}, "promises the length of an epoch, and on_error='skip' cannot"),
        ([1, 2], {"on_error": "skip", "samples": 2}, "promises the length of an epoch, and on_error='skip' cannot"),
        ([1, 2], {"drops": 1}, "drops must be True or False, got 1"),
        (alone, {"name": "a/b"}, "name must be 1 to 128 letters.* got 'a/b'"),
        (alone, {"drop_remainder": 1}, "drop_remainder must be True or False, got 1"),
        (alone, {"batch_size": None, "drop_remainder": True}, "drop_remainder= needs a batch_size="),
        (alone, {"batch_size": None, "turn": 2}, "turn= must be 1 with batch_size=None"),
        (by_split, {"splits": [1], "segment": 5}, "segment= is for generators without splits="),
        ([1, 2], {"segment": 5}, "segment= is for generators; leave it out: an indexable object"),
        (by_shard, {"segment": 5}, "takes shard, which is for generators without segment="),
        (asks_too_much, {"segment": 5}, "without an argument: size"),
        (alone, {"segment": 0}, "segment must be 1 to .* got 0"),
        (alone, {"segment": 5, "epochs": 2}, "epochs=2 cannot work, .* endless epoch: give samples="),
        (
            alone,
            {"spec": "float32"},
            r"spec must be a Leaf, such as .* or a tuple of those, or a dict .* got 'float32'",
        ),
        (
            alone,
            {"spec": {"x": Leaf("int64", ()), "y": [Leaf("int64", ())]}},
            r"spec\['y'\] must be a Leaf.*got \[Leaf",
        ),
        (alone, {"spec": {1: Leaf("int64", ())}}, "a dict of those with str keys"),
        (alone, {"spec": {"k" * 257: Leaf("int64", ())}}, "cannot serve spec.*256"),
        (
            alone,
            {"spec": {f"{i:0200}": Leaf("int64", ()) for i in range(1000)}},
            "cannot serve spec: .* 23.... bytes",
        ),
        (alone, {"spec": functools.reduce(lambda spec, _: (spec,), range(40), Leaf("int64", ()))}, "more than 32 deep"),
        (
            (np.zeros((100, 3)), np.zeros(100)),
            {},
            r"would be an epoch of 2 samples, one for each array: give list\(zip\(X, y\)\)",
        ),
        ((np.zeros((100, 3)),) * 3, {}, "would be an epoch of 3 samples"),
        ([1, 2, 3], {"batch_size": 4, "drop_remainder": True}, "it has 3 samples, and a batch takes 4"),
        (by_split, {"splits": [1], "batch_size": 4, "samples": 3, "drop_remainder": True}, "it has 3 samples"),
        (
            number_second,
            {"segment": 5},
            "has parameter number after rng: only the first one can be the segment's number",
        ),
        (number_second, {"splits": [1]}, "has parameter number after rng: only the first one can be the split"),
        (two_numbers, {"segment": 5}, "without an argument: size. A generator can take the split .* functools.partial"),
        (alone, {"spec": TupleSpec(())}, "spec has no leaves"),
        (alone, {"spec": Leaf("int64", (None,))}, 'need one shape, and spec is .* Give batching="pad" or'),
        (alone, {"spec": Leaf("int64", (-1,))}, "cannot serve spec"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_mend(
    generate: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Feed(generate, **{"batch_size": 2, **options})


class Scene(NamedTuple):
    """A sample with names."""

    image: Any
    label: int


@pytest.mark.parametrize("sample", [Scene(0, 1), {"x": (0, Scene(0, 1))}])
def test_a_namedtuple_is_said_to_lose_its_names(sample: Any) -> None:
    warning = names_warning("train", sample)
    assert warning is not None
    assert "feed train: a Scene arrives as a plain tuple (image, label), without the names" in warning
    assert names_warning("train", tuple(Scene(0, 1))) is None


@pytest.mark.parametrize(
    ("source", "items"), [(alone, "it yields whole batches"), ([1, 2], "its items are whole batches")]
)
def test_a_feed_without_a_batch_size_is_told_what_to_write(source: Any, items: str) -> None:
    with pytest.raises(TypeError, match=f"a feed needs batch_size=: .*or batch_size=None if {items}"):
        Feed(source)  # type: ignore[call-arg]


def test_a_generator_gets_what_it_asks_for_by_name() -> None:
    assert wants(with_all, has_splits=True).rng
    assert wants(with_all, has_splits=True).epoch
    assert not wants(by_split, has_splits=True).rng
    assert wants(by_shard, has_splits=False).shard
    assert wants(functools.partial(asks_too_much, size=3), has_splits=True).split
    assert not wants(lambda size=3: iter(()), has_splits=False).split
    assert wants(lambda *args: iter(()), has_splits=True).split


def test_a_plan_has_every_default_that_needs_no_data() -> None:
    plan = Feed(by_split, splits=["a"], batch_size=4, shuffle=100, seed=7).plan("train")
    assert (plan.name, plan.interleave, plan.lanes, plan.turn, plan.static_splits) == ("train", 4, 16, None, True)
    assert (plan.length, plan.samples, plan.warnings) == (None, None, ())
    plan = Feed(by_split, splits=lambda: ["a"], batch_size=4, name="val").plan("train")
    assert (plan.name, plan.interleave, plan.static_splits) == ("val", 1, False)
    plan = Feed(["a", "b", "c"], batch_size=2).plan("train")
    assert (plan.length, plan.samples, plan.lanes) == (3, 3, 1)
    plan = Feed(by_split, splits=["a"], batch_size=None).plan("train")
    assert (plan.batch_size, plan.turn) == (None, 1)
    assert (plan.on_error, plan.attempts) == ("raise", 3)
    plan = Feed(by_split, splits=["a"], batch_size=2, on_error=OnError("skip", crashes=1)).plan("train")
    assert (plan.on_error, plan.attempts) == ("skip", 1)


def test_an_iterator_of_splits_is_read_once() -> None:
    feed = Feed(by_split, splits=(path for path in "ab"), batch_size=1)  # type: ignore[arg-type]
    assert feed.splits == ["a", "b"]


def test_a_generator_that_cannot_be_divided_is_one_lane_and_says_how_to_divide_it() -> None:
    plan = Feed(alone, batch_size=4).plan("train")
    assert plan.lanes == 1
    assert "cannot be divided" in plan.warnings[0]
    assert "splits=" in plan.warnings[0]
    assert "shard" in plan.warnings[0]
    assert "segment=" in plan.warnings[0]
    plan = Feed(alone, transform=abs, batch_size=4, lanes=8, shuffle=100).plan("train")
    assert (plan.lanes, plan.interleave, plan.turn, plan.warnings) == (8, 1, 4, ())
    assert mixing_warning(plan, 8, pool=1) is None
    assert Feed(alone, transform=abs, batch_size=4, turn=9).plan("train").turn == 9
    assert Feed(alone, transform=abs, batch_size=None).plan("train").turn == 1
    assert Feed(alone, transform=[], batch_size=4).plan("train").lanes == 1, "there is nothing to do in parallel"
    plan = Feed(by_shard, batch_size=4, lanes=8).plan("train")
    assert (plan.lanes, plan.warnings) == (8, ())


def test_a_generator_that_is_cut_into_segments_has_as_many_as_its_samples_take_or_no_end() -> None:
    plan = Feed(with_all, segment=10, batch_size=4).plan("train")
    assert (plan.lanes, plan.warnings, plan.endless, plan.drop_remainder) == (16, (), True, True)
    assert segment_count(plan) == ENDLESS
    assert workers_warning(plan, ENDLESS, 15) is not None
    assert str(ENDLESS) not in str(workers_warning(plan, ENDLESS, 15))
    plan = Feed(with_all, segment=10, samples=101, epochs=3, batch_size=4, shuffle=50).plan("train")
    assert (segment_count(plan), plan.endless, plan.drop_remainder) == (11, False, False)
    assert "of its 11 segments" in str(mixing_warning(plan, 11, pool=1))
    assert "To mix more: make segment= smaller" in str(mixing_warning(plan, 11, pool=1))
    assert Feed(alone, segment=10, batch_size=4).plan("train").warnings == (), "it may draw from numpy.random"
    assert not wants(lambda n=3: iter(()), has_splits=False, segments=True).split
    assert wants(by_split, has_splits=False, segments=True).split


def test_a_declared_spec_is_taken_as_it_is_meant() -> None:
    spec = DictSpec(("x",), (Leaf("float32", [8, 8]),))  # type: ignore[arg-type]
    assert Feed(alone, batch_size=1, spec=spec).spec == DictSpec(("x",), (Leaf("float32", (8, 8)),))


def test_a_spec_is_declared_with_plain_dicts_and_tuples_and_what_numpy_calls_a_dtype() -> None:
    declared = {"y": Leaf(np.int64, ()), "x": (Leaf(np.dtype("float32"), 3), Leaf(float, [2, 2]))}
    spec = DictSpec(("x", "y"), (TupleSpec((Leaf("float32", (3,)), Leaf("float64", (2, 2)))), Leaf("int64", ())))
    assert Feed(alone, batch_size=1, spec=declared).spec == spec
    assert Feed(alone, batch_size=1, spec=TupleSpec(({"x": Leaf("bool", ())},))).spec == TupleSpec(  # type: ignore[arg-type]
        (DictSpec(("x",), (Leaf("bool", ()),)),)
    )
    assert Leaf(str, ()) == Leaf(bytes, ()) == Leaf("string", ())
    for wrong in (
        lambda: Leaf("str", ()),
        lambda: Leaf("f4", ()),
        lambda: Leaf(object(), ()),
        lambda: Leaf("int64", "3"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"dtype|shape"):
            wrong()


def test_a_tuple_of_samples_is_not_taken_for_the_columns_of_a_table() -> None:
    images = tuple(np.zeros((4, 4)) for _ in range(10))
    assert Feed(images, batch_size=2).plan("train").length == 10
    assert Feed((1, 2), batch_size=2).plan("train").length == 2


@pytest.mark.parametrize(
    ("shuffle", "lanes", "batch_size", "block"),
    [(0, 4, 8, 0), (1, 4, 8, 8), (32, 4, 8, 8), (33, 4, 8, 16), (10_000, 16, 32, 640), (10, 4, None, 3)],
)
def test_a_block_is_a_lanes_share_in_whole_batches(
    shuffle: int, lanes: int, batch_size: int | None, block: int
) -> None:
    assert block_samples(shuffle, lanes, batch_size) == block


@pytest.mark.parametrize(
    ("options", "interleave"),
    [
        ({}, 1),
        ({"shuffle": 1}, 4),
        ({"shuffle": 5000}, 5),
        ({"shuffle": 10_000}, 10),
        ({"shuffle": 10**6}, 16),
        ({"shuffle": 10_000, "lanes": 64}, 4),
        ({"shuffle": Shuffle(10_000, interleave=3)}, 3),
    ],
)
def test_the_larger_a_lanes_block_is_the_more_splits_it_mixes(options: dict[str, Any], interleave: int) -> None:
    assert Feed(by_split, splits=["a"], batch_size=32, **options).plan("train").interleave == interleave
    if type(options.get("shuffle")) is int:
        assert Feed(with_all, segment=10, batch_size=32, **options).plan("train").interleave == 4


# --- MODULE:ATTR ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenes_to_load.py").write_text(
        textwrap.dedent("""
        from penstock_server import Feed
        def scenes(path):
            yield path
        train = Feed(scenes, splits=["a"], batch_size=1)
        val = Feed(scenes, splits=["b"], batch_size=1)
        number = 3
        """)
    )
    (tmp_path / "makers.py").write_text(
        "from penstock_server import Feed\ndef make(size=1) -> Feed: ...\ndef other(): ...\n"
    )
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n")
    (tmp_path / "breaks.py").write_text("def f():\n    return 1 / 0\n\nf()\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "notes.txt").touch()
    return tmp_path


def test_a_feed_is_found_by_module_or_by_file(folder: Path) -> None:
    (folder / "deep").mkdir()
    os.chdir(folder / "deep")
    train = load("../scenes_to_load.py:train").feed
    assert train.splits == ["a"]
    assert load(f"{folder}/scenes_to_load.py:val").feed.splits == ["b"]
    assert load("scenes_to_load:train").feed is train


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("scenes_to_load", "expected MODULE:ATTR, such as .* got 'scenes_to_load'"),
        ("scenes_to_load:", "expected MODULE:ATTR"),
        ("scenes_to_load.py", "which feed in it.* Write scenes_to_load.py:train; its feeds are train, val"),
        ("makers.py", "Write makers.py:make; it has no feeds, and functions that return one: make$"),
        ("not_there:feed", "no module 'not_there'"),
        ("scenes_to_load.deeper:feed", "no module 'scenes_to_load.deeper'|'scenes_to_load' is not a package"),
        ("not_there.py:feed", "not_there.py: no such file"),
        ("notes.txt:feed", "^notes.txt: expected a Python file"),
        ("./notes.txt:feed", "notes.txt: expected a Python file"),
        ("needs_more:feed", "importing needs_more raised ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("needs_more.py:feed", "importing .*needs_more.py raised ModuleNotFoundError"),
        ("breaks:feed", "importing breaks raised ZeroDivisionError"),
        ("syntax:feed", "importing syntax raised SyntaxError"),
        ("scenes_to_load:test", "no attribute 'test'; its feeds are train, val"),
        ("scenes_to_load:scenes", "must be a Feed, got <function .* write feed = Feed\\(scenes, splits"),
        ("scenes_to_load:number", "must be a Feed, got 3; its feeds are train, val"),
    ],
)
def test_each_way_to_fail_has_its_own_sentence(folder: Path, target: str, message: str) -> None:
    with pytest.raises(StartError, match=message):
        load(target)


def test_the_traceback_of_a_failed_import_begins_in_user_code(folder: Path) -> None:
    with pytest.raises(StartError) as caught:
        load("breaks.py:feed")
    traceback = caught.value.remote_traceback
    assert traceback is not None
    assert traceback.splitlines()[1].strip().startswith(f'File "{folder}/breaks.py", line 4')
    assert "return 1 / 0" in traceback
    assert "importing.py" not in traceback


def test_a_file_with_the_name_of_a_loaded_module_is_refused(folder: Path) -> None:
    (folder / "textwrap.py").write_text("")
    with pytest.raises(
        StartError, match=r"a module of this name, textwrap, is already loaded from .*: rename the file"
    ):
        load("textwrap.py:feed")


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"order": "fast"}, {128: 256, 100 << 10: 41, 1 << 20: 4, 2 << 20: 2, 3 << 20: 1, 1 << 30: 1}),
        ({"shuffle": 100}, {128: 7, 100 << 10: 7, 700 << 10: 3, 1 << 20: 2, 2 << 20: 1, 1 << 30: 1}),
        ({"shuffle": 10_000}, {128: 256, 100 << 10: 20, 700 << 10: 3}),
        ({"shuffle": 100, "order": "fast"}, {128: 4, 100 << 10: 4, 700 << 10: 3, 1 << 20: 2, 1 << 30: 1}),
        ({"shuffle": 100, "turn": 30}, {128: 30, 1 << 30: 30}),
        ({"turn": 3}, {128: 3, 1 << 30: 3}),
    ],
)
def test_a_turn_makes_about_four_mebibytes_and_where_lanes_are_shuffled_two_and_at_most_a_block(
    options: dict[str, Any], batches: dict[int, int]
) -> None:
    plan = Feed(by_split, splits=["a"], batch_size=1, **options).plan("train")  # type: ignore[arg-type]
    for nbytes, turn in batches.items():
        assert fixed_slots(plan, Leaf("uint8", (nbytes - HEADER,)), 1).batches == turn
    for length, nbytes, turn in ((1000, 1 << 20, 4), (1000, 128, 15), (10**6, 128, 256), (2, 1 << 20, 1), (0, 128, 1)):
        indexable = Feed(range(length), batch_size=1, shuffle=100).plan("train")
        assert fixed_slots(indexable, Leaf("uint8", (nbytes - HEADER,)), 1).batches == turn


def test_lanes_take_turns_after_each_batch_and_sixteen_mebibytes_of_them_share_a_slot() -> None:
    plan = Feed(by_split, splits=["a"], batch_size=1).plan("train")
    for nbytes, batches in {128: 1024, 100 << 10: 164, 1 << 20: 16, 2 << 20: 8, 3 << 20: 1, 1 << 30: 1}.items():
        slot = fixed_slots(plan, Leaf("uint8", (nbytes - HEADER,)), 1)
        assert (turn_of(plan, slot), slot.batches) == (1, batches)
