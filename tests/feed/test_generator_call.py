"""How the split, `args=` and `kwargs=` reach a generator. What cannot fit is refused when the feed is declared."""

from __future__ import annotations

import collections
import csv
import functools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock_server import Feed
from penstock_server.feed.options.generator_call import GeneratorCall
from penstock_server.feed.options.transforms import checked_transforms


class Scenes:
    """A typical class of a user, which knows nothing of Penstock."""

    def __init__(self, files: list[str], size: int = 8, *, crop: int = 0) -> None:
        self.got = files, size, crop
        self.table = [1, 2]

    def generate_data(self) -> Iterator[Any]:
        while True:
            yield self.got

    def of(self, labels: Any, rng: Any = None) -> Iterator[Any]:
        yield self.got, labels, rng

    def of_two(self, labels: Any, ids: Any) -> Iterator[Any]:
        yield labels, ids

    def optional(self, shuffle: bool = True) -> Iterator[Any]:
        yield self.got, shuffle

    async def later(self) -> AsyncIterator[Any]:
        yield 1

    @staticmethod
    def fixed() -> Iterator[Any]:
        yield "fixed"

    @classmethod
    def made(cls, split: Any) -> Iterator[Any]:
        yield cls.__name__, split


def threadsafe(method: Any) -> Any:
    """A decorator of the kind that people wrote for fit_generator: it hides the signature, and returns an iterator."""

    def made(*args: Any, **kwargs: Any) -> Iterator[Any]:
        return iter(list(method(*args, **kwargs)))

    return made


class Old:
    def __init__(self, ids: Any) -> None:
        self.ids = ids

    @threadsafe
    def flow(self) -> Iterator[Any]:
        yield self.ids


class Rest:
    def __init__(self, *files: str, **options: Any) -> None:
        self.got = files, options

    def __iter__(self) -> Iterator[Any]:
        yield self.got


class Aware:
    def __init__(self, root: str, path: str, rng: Any, epoch: int = -1, shard: Any = "none") -> None:
        self.got = root, path, rng, epoch, shard

    def generate(self) -> Iterator[Any]:
        yield self.got


def generate(path: str, size: int, *, crop: int = 0, rng: Any = None) -> Iterator[Any]:
    yield path, size, crop, rng


def plain(first: str, second: str = "b") -> Iterator[Any]:
    yield first, second


def all_of_them(*args: Any, **kwargs: Any) -> Iterator[Any]:
    yield args, kwargs


def rooted(root: str, path: str, size: int = 1) -> Iterator[Any]:
    yield root, path, size


class NoSplit:
    def __init__(self, rng: Any) -> None: ...

    def generate(self) -> Iterator[Any]:
        yield 1


class Sharded(NoSplit):
    def __init__(self, files: Any, shard: Any) -> None: ...


def shard_and_shards(shard: Any, shards: int) -> Iterator[Any]:
    yield shard, shards


def rng_and_rest(rng: Any, *rest: Any) -> Iterator[Any]:
    yield rest


def epoch_and_shard(epoch: Any, shard: Any) -> Iterator[Any]:
    yield epoch, shard


RUN = {"split": "S", "rng": "R", "epoch": 7, "shard": (0, 1)}


def first_of(function: Any, **options: Any) -> Any:
    """Return the first sample of a run with the split "S", rng "R", epoch 7 and shard (0, 1)."""
    return next(GeneratorCall(function, **options).prepare(RUN)())


@pytest.mark.parametrize(
    ("function", "options", "sample"),
    [
        (generate, {"args": (64,), "has_splits": True}, ("S", 64, 0, "R")),
        (generate, {"args": ("a", 64)}, ("a", 64, 0, "R")),
        (generate, {"kwargs": {"size": 64, "crop": 3, "rng": "mine"}, "has_splits": True}, ("S", 64, 3, "mine")),
        (generate, {"args": (64,), "segments": True}, ("S", 64, 0, "R")),
        (generate, {"args": ("a", 64), "segments": True}, ("a", 64, 0, "R")),
        (plain, {"args": ("a",)}, ("a", "b")),
        (plain, {"args": ("x",), "has_splits": True}, ("S", "x")),
        (plain, {"kwargs": {"first": "a"}, "segments": True}, ("a", "b")),
        (rooted, {"kwargs": {"root": "/"}, "has_splits": True}, ("/", "S", 1)),
        (rooted, {"args": (9,), "kwargs": {"root": "/"}, "has_splits": True}, ("/", "S", 9)),
        (all_of_them, {"args": (1, 2), "kwargs": {"x": 3}, "has_splits": True}, (("S", 1, 2), {"x": 3})),
        (all_of_them, {"args": (1, 2), "segments": True}, ((1, 2), {})),
        (functools.partial(generate, size=3), {"has_splits": True}, ("S", 3, 0, "R")),
        (functools.partial(generate, size=3, rng="own"), {"has_splits": True}, ("S", 3, 0, "own")),
        (functools.partial(functools.partial(epoch_and_shard, epoch=5), shard=(1, 2)), {}, (5, (1, 2))),
        (functools.partial(epoch_and_shard, epoch=3), {}, (3, (0, 1))),
        (functools.partial(epoch_and_shard, shard=(1, 2)), {}, (7, (1, 2))),
        (Scenes, {"method": "generate_data", "args": (["a"],)}, (["a"], 8, 0)),
        (Scenes, {"method": "generate_data", "args": (["a"],), "segments": True}, (["a"], 8, 0)),
        (Scenes, {"method": "generate_data", "kwargs": {"crop": 2}, "has_splits": True}, ("S", 8, 2)),
        (Scenes, {"method": "generate_data", "args": (9,), "has_splits": True}, ("S", 9, 0)),
        (Scenes, {"method": "of", "args": (["a"],), "has_splits": True}, ((["a"], 8, 0), "S", "R")),
        (Scenes, {"method": "of", "args": (["a"],), "segments": True}, ((["a"], 8, 0), "S", "R")),
        (Scenes, {"method": "optional", "args": (5,), "has_splits": True}, (("S", 5, 0), True)),
        (Scenes, {"method": "fixed", "args": ("a",)}, "fixed"),
        (Scenes, {"method": "made", "args": ("a",), "has_splits": True}, ("Scenes", "S")),
        (Rest, {"method": "__iter__", "args": ("a",), "kwargs": {"k": 1}, "has_splits": True}, (("S", "a"), {"k": 1})),
        (Rest, {"method": "__iter__"}, ((), {})),
        (NoSplit, {"method": "generate", "segments": True}, 1),
        (Sharded, {"method": "generate", "args": (1,)}, 1),
        (rng_and_rest, {"args": (1, 2, 3)}, (2, 3)),
        (rng_and_rest, {}, ()),
        (Sharded, {"method": "generate", "kwargs": {"shard": None}, "has_splits": True}, 1),
        (Old, {"method": "flow", "args": (3,)}, 3),
        (Old, {"method": "flow", "has_splits": True}, "S"),
        (Aware, {"method": "generate", "kwargs": {"root": "/"}, "has_splits": True}, ("/", "S", "R", 7, "none")),
        (Aware, {"method": "generate", "args": ("/", "p")}, ("/", "p", "R", 7, (0, 1))),
        (
            Aware,
            {"method": "generate", "args": ("/", "p"), "kwargs": {"epoch": 3, "shard": None}},
            ("/", "p", "R", 3, None),
        ),
    ],
)
def test_a_generator_gets_the_split_then_args_and_kwargs_and_the_rest_by_name(
    function: Any, options: dict[str, Any], sample: Any
) -> None:
    assert first_of(function, **options) == sample


def test_of_a_class_each_run_has_an_object_of_its_own_and_arguments_that_it_may_change() -> None:
    table, large = np.arange(3), np.zeros(17 << 20, np.uint8)
    draws = random.Random(1)
    given = (["a", ["b"]], {"k": [1]})
    call = GeneratorCall(all_of_them, args=(*given, table, draws), kwargs={"x": bytearray(2), "large": large})
    for _ in range(2):
        (files, options, array, copied), kwargs = next(call.prepare(RUN)())
        assert (files, options, array.tolist(), kwargs["x"]) == (["a", ["b"]], {"k": [1]}, [0, 1, 2], bytearray(2))
        assert copied.random() == random.Random(1).random()
        files[1].append("c")
        files.pop(0)
        options["k"].clear()
        array[:] = 9
        kwargs["x"][:] = b"xx"
        with pytest.raises(ValueError, match="read-only"):
            kwargs["large"][0] = 1
    assert large.flags.writeable
    window = collections.deque([1], maxlen=2)
    (copied,), _ = next(GeneratorCall(all_of_them, args=(window,)).prepare(RUN)())
    assert (copied is window, copied.maxlen, list(copied)) == (False, 2, [1])
    seen = GeneratorCall(Scenes, method="generate_data", args=("a",))
    assert seen.prepare(RUN) is not seen.prepare(RUN)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (Scenes, {}, r'Scenes is a class: give an instance, .*: Feed\(Scenes, method="generate_data", ...\)'),
        (Scenes, {"method": "generate"}, "Scenes has no method 'generate'; generator methods: .*generate_data"),
        (Scenes, {"method": 3}, "method must be the name of a method, .* got 3"),
        (Scenes, {"method": "__doc__", "args": (1,)}, "Scenes.__doc__ is not a method"),
        (Scenes, {"method": "later", "args": (1,)}, "Scenes.later is async"),
        (Scenes, {"method": "generate_data"}, "the constructor of Scenes has parameters without an argument: files"),
        (Scenes, {"method": "generate_data", "segment": 5}, "constructor of Scenes has parameters without .*: files"),
        (Scenes, {"method": "generate_data", "args": (1, 2, 3)}, r"args= has 3 values, and Scenes takes 2: .*\(files"),
        (Scenes, {"method": "generate_data", "args": [["a"]]}, r"args must be a tuple, such as args=\(files,\)"),
        (Scenes, {"method": "generate_data", "args": (1,), "kwargs": {"files": 2}}, "both give files of Scenes"),
        (
            Scenes,
            {"method": "generate_data", "args": (1,), "kwargs": {"crops": 2}},
            "names crops, but Scenes has no such parameter: it has crop, files, size",
        ),
        (
            Scenes,
            {"method": "generate_data", "args": (1, 2), "splits": [1]},
            "neither Scenes.generate_data nor the constructor of Scenes has a parameter left for the split",
        ),
        (Scenes, {"method": "of", "args": (1,)}, r"Scenes.of takes a split \(labels\), but there are none"),
        (Scenes, {"method": "of_two", "args": (1,), "splits": [1]}, "without an argument: ids. .* for the constructor"),
        (NoSplit, {"method": "generate", "splits": [1]}, "neither NoSplit.generate nor the constructor of NoSplit"),
        (Sharded, {"method": "generate", "splits": [1]}, "Sharded takes shard, which is for generators without splits"),
        (shard_and_shards, {}, "has parameter shards after shard, which has the number of shards too"),
        (rng_and_rest, {"splits": [1]}, "has parameter rest after rng: only the first one can be the split"),
        (Scenes("a"), {"method": "generate_data"}, "needs the class itself, and got an instance of Scenes"),
        ([1, 2], {"method": "pop"}, "for a generator function or a class, and got an instance of list"),
        ([1, 2], {"args": (1,)}, "for a generator function or a class, and got an instance of list"),
        (generate, {"method": "x", "args": ("a", 1)}, "method= is for a class, and generate is a function"),
        (Scenes.generate_data, {}, r'is a method and needs an object: .*Feed\(Scenes, method="generate_data"'),
        (Scenes.later, {}, "is a method and needs an object"),
        (generate, {"args": "a"}, "args must be a tuple"),
        (generate, {"kwargs": [1]}, "kwargs must be a dict of arguments by name"),
        (generate, {"kwargs": {1: 2}}, "kwargs must be a dict of arguments by name"),
        (generate, {"args": ("a",)}, "generate has a parameter without an argument: size. Give it with args= or"),
        (generate, {"splits": [1]}, "without an argument: size"),
        (generate, {"args": (1, 2), "splits": [1]}, "args= has 2 values, and generate takes 1 after the split"),
        (generate, {"kwargs": {"width": 1}}, "names width, but generate has no such parameter"),
        (plain, {"args": ("a",), "kwargs": {"first": 1}}, "args= and kwargs= both give first of plain"),
        (plain, {"args": (iter([1]),)}, r"args\[0\] is .*iterator.*: what one run reads of it, no other run gets"),
        (plain, {"kwargs": {"first": csv.reader([])}}, r"kwargs\['first'\] is .*reader.*, an iterator: .* give a list"),
        (functools.partial(plain, map(int, "1")), {}, "argument 0 of the functools.partial is .*map.*, an iterator"),
        (functools.partial(plain, first=zip("a")), {}, "first of the functools.partial is .*zip.*, an iterator"),
        (plain, {"args": ((x for x in "a"),)}, r"args\[0\] is .*generator.*, an iterator"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Feed(source, batch_size=1, **options)


def normalize(sample: Any) -> Any:
    return sample


def augment(sample: Any, rng: Any, strength: float = 1.0) -> Any:
    return sample


class Compose:
    def __call__(self, sample: Any) -> Any:
        return sample


def test_a_transform_keeps_the_rng_that_a_partial_gives_it() -> None:
    given, without = checked_transforms([functools.partial(augment, rng=5), functools.partial(augment, strength=0.5)])
    assert (given.takes_rng, without.takes_rng) == (False, True)


def test_a_transform_is_a_function_or_an_object_or_a_list_of_those() -> None:
    found = checked_transforms([normalize, augment, Compose(), np.sqrt, functools.partial(augment, strength=2)])
    assert [(transform.name, transform.takes_rng) for transform in found] == [
        ("normalize", False),
        ("augment", True),
        ("Compose", False),
        ("sqrt", False),
        ("partial", True),
    ]
    assert checked_transforms(None) == checked_transforms([]) == ()
    assert checked_transforms(tuple)[0].function([1, 2]) == (1, 2), "a class whose objects cannot be called"


def several(sample: Any) -> Iterator[Any]:
    yield sample


def unpacks(x: Any, y: Any) -> Any:
    return x


async def awaits(sample: Any) -> Any:
    return sample


def rng_first(rng: Any, sample: Any) -> Any:
    return sample


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (3, "transform must be a function of a sample, or a list of those, got 3"),
        ([normalize, None], "transform must be a function of a sample, or a list of those, got None"),
        (Compose, r"transform Compose is a class: give an instance, Compose\(...\)"),
        (awaits, "transform awaits is async"),
        (unpacks, "has parameters without an argument: y. .* take it apart within: `x, y = sample`"),
        (rng_first, "has rng as its first parameter"),
        (lambda: 1, "<lambda> takes no sample"),
        (lambda *, rng: 1, "<lambda> takes no sample: add a first parameter"),
    ],
)
def test_a_transform_that_cannot_be_called_with_a_sample_is_refused(
    transform: Callable[..., Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        Feed(generate, args=("a", 1), batch_size=1, transform=transform)
