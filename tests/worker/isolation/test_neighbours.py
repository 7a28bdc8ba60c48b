"""A generator does not see what its neighbours hold while they yield: each split has the samples that it has alone."""

from __future__ import annotations

import contextlib
import decimal
import locale
import os
import random
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server.worker.isolation import state_memory
from tests.conftest import Serve

FEEDS = """
    import contextlib, decimal, io, locale, os, random, sys, warnings

    import numpy as np
    from penstock_server import Feed

    SPLITS, SAMPLES = range(5), range(7)
    HERE = os.path.dirname(os.path.abspath(__file__))
    for _split in SPLITS:
        os.makedirs(f"{HERE}/folder{_split}", exist_ok=True)
        with open(f"{HERE}/folder{_split}/data", "w") as _file:
            _file.write(f"contents {_split}")

    def third():
        return str(decimal.Decimal(1) / 3)

    def divided():
        try:
            return str(np.float64(1) / np.float64(0))
        except FloatingPointError:
            return "raised"

    def warned():
        try:
            warnings.warn("odd")
            return "warned"
        except UserWarning:
            return "raised"

    def precision(split):
        with decimal.localcontext() as context:
            context.prec = 4 + split
            for i in SAMPLES:
                yield f"{split} {i} {third()}"

    def precision_for_good(split):
        decimal.getcontext().prec = 4 + split
        for i in SAMPLES:
            yield f"{split} {i} {third()}"

    def division(split):
        with np.errstate(divide="ignore" if split % 2 else "raise"):
            for i in SAMPLES:
                yield f"{split} {i} {divided()}"

    def division_for_good(split, rng):
        np.seterr(divide="ignore" if split % 2 else "raise")
        for i in SAMPLES:
            yield f"{split} {i} {divided()}"

    def filters(split):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if split % 2 else "error")
            for i in SAMPLES:
                yield f"{split} {i} {warned()}"

    def filters_for_good(split):
        warnings.simplefilter("ignore" if split % 2 else "error")
        for i in SAMPLES:
            yield f"{split} {i} {warned()}"

    def recorded(split):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for i in SAMPLES:
                warnings.warn("odd")
                yield f"{split} {i} {len(seen)}"

    def folder(split):
        with contextlib.chdir(f"{HERE}/folder{split}"):
            for i in SAMPLES:
                with open("data") as file:
                    yield f"{split} {i} {file.read()}"

    def environment(split):
        assert "OF_SPLIT" not in os.environ
        os.environ["OF_SPLIT"] = str(split)
        for i in SAMPLES:
            yield f"{split} {i} {os.environ['OF_SPLIT']}"

    def output(split):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for i in SAMPLES:
                print(i, end="")
                yield f"{split} {i} {printed.getvalue()}"

    def language(split):
        locale.setlocale(locale.LC_ALL, ("C", "C.UTF-8")[split % 2])
        for i in SAMPLES:
            yield f"{split} {i} {locale.setlocale(locale.LC_ALL)}"

    def depth(split):
        sys.setrecursionlimit(2000 + split)
        for i in SAMPLES:
            yield f"{split} {i} {sys.getrecursionlimit()}"

    def seeded(split):
        random.seed(split)
        np.random.seed(split)
        for i in SAMPLES:
            yield f"{split} {i} {random.gauss(0, 1)} {np.random.normal()}"

    def seeded_beside_rng(split, rng):
        yield from seeded(split)

    def seeded_in_the_middle(split, rng):
        for i in SAMPLES:
            if i == 3:
                random.seed(split)
                np.random.seed(split)
            yield f"{split} {i} {random.gauss(0, 1) if i > 2 else 0} {np.random.normal() if i > 2 else 0}"

    class Reader:
        def __init__(self, digits):
            decimal.getcontext().prec = digits

        def read(self, split):
            for i in SAMPLES:
                with decimal.localcontext() as context:
                    context.prec += split
                    yield f"{split} {i} {third()}"

    def everything(split):
        with contextlib.ExitStack() as held:
            held.enter_context(decimal.localcontext()).prec = 4 + split
            held.enter_context(np.errstate(divide="raise"))
            held.enter_context(warnings.catch_warnings())
            warnings.simplefilter("error")
            held.enter_context(contextlib.chdir(f"{HERE}/folder{split}"))
            os.environ["OF_SPLIT"] = str(split)
            for i in SAMPLES:
                yield f"{split} {i}"

    def seen_by_transform(sample):
        return " ".join([sample, third(), divided(), warned(), str(os.getcwd() == HERE), str("OF_SPLIT" in os.environ)])

    def seen_by_transform_with_rng(sample, rng):
        return seen_by_transform(sample)

    def precision_in_transform(sample):
        decimal.getcontext().prec = 5  # not set elsewhere
        return f"{sample} {third()}"

    def names(split):
        for i in SAMPLES:
            yield f"{split} {i}"

    class Items:
        def __len__(self):
            return len(SPLITS) * len(SAMPLES)

        def __getitem__(self, index):
            os.chdir(f"{HERE}/folder{index // len(SAMPLES)}")
            with open("data") as file:
                return f"{index // len(SAMPLES)} {index % len(SAMPLES)} {file.read()} {third()} {divided()}"

    def feeds(generate, name=None, **options):
        for label, how in ("", {}), ("_shuffled", {"lanes": 2, "shuffle": 20}):
            made = Feed(generate, **{"splits": SPLITS, "batch_size": 2, "lanes": 3, **options, **how})
            globals()[f"feed_{name or generate.__name__}{label}"] = made

    for _generate in [precision, precision_for_good, division, division_for_good, filters, filters_for_good, recorded,
                      folder, environment, output, language, depth, seeded, seeded_beside_rng, seeded_in_the_middle]:
        feeds(_generate)
    feeds(Reader, method="read", args=(4,), name="of_a_class")
    feeds(everything, transform=seen_by_transform, name="transformed")
    feeds(everything, transform=seen_by_transform_with_rng, name="transformed_with_rng")
    feeds(names, transform=precision_in_transform, name="set_in_transform")
    items = Feed(Items(), batch_size=2, shuffle=35)
    zipped = Feed.zip(
        Feed(precision, splits=SPLITS, batch_size=2),
        Feed(division, splits=SPLITS, batch_size=2),
        batch_size=2, lanes=3)
    mixed = Feed.mix(
        {"one": Feed(folder, splits=SPLITS, batch_size=2),
         "other": Feed(everything, splits=SPLITS, transform=seen_by_transform, batch_size=2)},
        stop="all", batch_size=2, lanes=3, shuffle=20)

    def segment(number):
        yield from precision(number)

    segments = Feed(segment, segment=7, samples=35, batch_size=2, lanes=3, shuffle=20)
"""


def third(digits: int) -> str:
    return "0." + "3" * digits


def raised(split: int, otherwise: str) -> str:
    return otherwise if split % 2 else "raised"


def seeded(split: int, number: int) -> str:
    python, numpys = random.Random(split), np.random.RandomState(split)
    drawn = [(python.gauss(0, 1), numpys.normal()) for _ in range(number + 1)]
    return f"{drawn[-1][0]} {drawn[-1][1]}"


OUTSIDE = f"{third(28)} inf warned True False"

# What a sample of each feed shows, by its split and its number.
KINDS: dict[str, Callable[[int, int], str]] = {
    "precision": lambda split, _: third(4 + split),
    "precision_for_good": lambda split, _: third(4 + split),
    "division": lambda split, _: raised(split, "inf"),
    "division_for_good": lambda split, _: raised(split, "inf"),
    "filters": lambda split, _: raised(split, "warned"),
    "filters_for_good": lambda split, _: raised(split, "warned"),
    "recorded": lambda _, number: str(number + 1),
    "folder": lambda split, _: f"contents {split}",
    "environment": lambda split, _: str(split),
    "output": lambda _, number: "".join(map(str, range(number + 1))),
    "language": lambda split, _: ("C", "C.UTF-8")[split % 2],
    "depth": lambda split, _: str(2000 + split),
    "seeded": seeded,
    "seeded_beside_rng": seeded,
    "seeded_in_the_middle": lambda split, number: seeded(split, number - 3) if number > 2 else "0 0",
    "of_a_class": lambda split, _: third(4 + split),
    "transformed": lambda *_: OUTSIDE,
    "transformed_with_rng": lambda *_: OUTSIDE,
    "set_in_transform": lambda *_: third(5),
}
NAMES = [f"feed_{name}{how}" for name in KINDS for how in ("", "_shuffled")]
OTHERS = ("items", "zipped", "mixed", "segments")

_numbers = count()


def rows(expected: Callable[[int, int], str]) -> Counter[str]:
    return Counter(f"{split} {number} {expected(split, number)}" for split in range(5) for number in range(7))


def read(connection: penstock.Connection) -> Counter[str]:
    """Return how often each row comes in an epoch."""
    return Counter(row for batch in connection.batches() for row in rows_of(batch))


def rows_of(batch: Any) -> list[str]:
    leaves = batch if isinstance(batch, tuple) else (batch,)
    return [" | ".join(leaf.decode() for leaf in row) for row in zip(*leaves, strict=True)]


def expected(name: str) -> Counter[str]:
    if name == "items":
        return rows(lambda split, _: f"contents {split} {third(28)} inf")
    if name == "zipped":
        pairs = [
            f"{split} {number} {third(4 + split)} | {split} {number} {raised(split, 'inf')}"
            for split in range(5)
            for number in range(7)
        ]
        return Counter(pairs)
    if name == "mixed":
        return rows(KINDS["folder"]) + rows(KINDS["transformed"])
    if name == "segments":
        return rows(KINDS["precision"])
    return rows(KINDS[name.removeprefix("feed_").removesuffix("_shuffled")])


@pytest.mark.parametrize("workers", [1, 3])
def test_a_split_has_the_samples_that_it_has_alone_whatever_open_generators_hold(serve: Serve, workers: int) -> None:
    daemon = serve(FEEDS, *NAMES, *OTHERS, workers=workers)
    for name in (*NAMES, *OTHERS):
        with penstock.connect(daemon.urls[name]) as connection:
            assert read(connection) == expected(name), name


def test_without_workers_neither_neighbours_nor_the_trainer_see_what_a_generator_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = module_of(FEEDS, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*NAMES, *OTHERS):
            before = of_this_process()
            with penstock.connect(f"{module}:{name}", workers=0) as connection:
                found: Counter[str] = Counter()
                for batch in connection.batches():
                    assert of_this_process() == before, name
                    found.update(rows_of(batch))
                assert found == expected(name), name
            assert of_this_process() == before, name


OF_TRANSFORMS = """
    import os
    import numpy as np
    from penstock_server import Feed

    def seen():
        return os.environ.get("OF_TRANSFORM", "unset")

    def generate(split):
        for i in range(3):
            yield seen()

    class Items:
        def __len__(self):
            return 6
        def __getitem__(self, index):
            return seen()

    def first(sample):
        before = seen()
        os.environ["OF_TRANSFORM"] = "first"
        return f"{sample} {before}"

    def second(sample, rng):
        before = seen()
        os.environ["OF_TRANSFORM"] = "second"
        return f"{sample} {before}"

    def part(sample):
        os.environ["OF_TRANSFORM"] = "part"
        return sample

    def joined(samples):
        return second(" ".join(samples), None)

    both = dict(transform=[first, second], batch_size=2)
    generated = Feed(generate, splits=range(2), lanes=1, **both)
    indexed = Feed(Items(), **both)
    zipped = Feed.zip(
        Feed(generate, splits=range(2), transform=part, batch_size=1),
        Feed(generate, splits=range(2), batch_size=1),
        transform=joined, batch_size=1, lanes=1)
"""


@pytest.mark.parametrize(("name", "of_source"), [("generated", 1), ("indexed", 1), ("zipped", 2)])
def test_a_transform_has_settings_of_its_own_which_it_finds_at_its_next_call(
    tmp_path: Path, name: str, of_source: int
) -> None:
    module = module_of(OF_TRANSFORMS, tmp_path)
    with penstock.connect(f"{module}:{name}", workers=1) as connection:
        found = [row.split() for batch in connection.batches() for row in rows_of(batch)]
    assert len(found) == 6
    for source in range(of_source):
        assert {row[source] for row in found} == {"unset"}
    kept = [["first", "second"]] if name != "zipped" else [["second"]]
    assert [row[of_source:] for row in found[1:]] == kept * 5


LIBRARY = """
    import decimal, os, warnings
    import numpy as np

    decimal.getcontext().prec = 5
    np.seterr(divide="raise")
    os.environ["OF_LIBRARY"] = "set"
    warnings.simplefilter("error")
"""
LATE = """
    import contextlib, decimal, os, warnings

    import numpy as np
    from penstock_server import Feed

    def imports_late(split):
        with contextlib.chdir("/"):
            import {library}
            for i in range(7):
                try:
                    divided = np.float64(1) / np.float64(0)
                except FloatingPointError:
                    divided = "raised"
                try:
                    warnings.warn("odd")
                    warned = "warned"
                except UserWarning:
                    warned = "raised"
                yield f"{{decimal.Decimal(1) / 3}} {{divided}} {{warned}} {{os.environ['OF_LIBRARY']}} {{os.getcwd()}}"
                decimal.getcontext().prec = 5 + split

    def outside(split):
        for i in range(7):
            yield os.getcwd()

    late = Feed(imports_late, splits=range(5), batch_size=2, lanes=2, shuffle=20)
    beside = Feed(outside, splits=range(5), batch_size=2, lanes=2, shuffle=20)
"""


def test_what_a_module_sets_when_a_generator_imports_it_is_set_in_all_generators(tmp_path: Path) -> None:
    library = module_of(LIBRARY, tmp_path).stem
    module = module_of(LATE.format(library=library), tmp_path)
    with warnings.catch_warnings(), contextlib.chdir(tmp_path):
        warnings.simplefilter("ignore")
        with penstock.connect(f"{module}:late", workers=1) as connection:
            found = Counter(row.split()[0].count("3") for batch in connection.batches() for row in rows_of(batch))
            first = Counter({5: 5}) + Counter({5 + split: 6 for split in range(1, 5)}) + Counter({5: 6})
            assert found == first
        with penstock.connect(f"{module}:late", workers=1) as connection:
            assert {row.split(maxsplit=1)[1] for batch in connection.batches() for row in rows_of(batch)} == {
                "raised raised set /"
            }
        with penstock.connect(f"{module}:beside", workers=1) as connection:
            assert {row for batch in connection.batches() for row in rows_of(batch)} == {str(tmp_path)}


RANDOM = """
    import random, sys

    sys.path.insert(0, {chaos!r})
    from held import NAMES, Held
    from penstock_server import Feed

    chance = random.Random({seed})

    def of(names):
        def generate(split):
            with Held(names, split) as held:
                for number in range(split * 7 % 20):
                    held.check()
                    yield split, number
                    held.check()
        return generate

    for number in range(8):
        how = dict(lanes=chance.choice([1, 2, 3, 16]), shuffle=chance.choice([0, 0, 5, 30]), turn=chance.choice([1, 3]))
        names = chance.sample(NAMES, chance.randint(0, len(NAMES)))
        globals()["feed%d" % number] = Feed(of(names), splits=range(11), batch_size=chance.choice([1, 3, 8]), **how)
"""


RANDOM_NAMES = [f"feed{number}" for number in range(8)]


def random_feeds(seed: int) -> str:
    """Return a module with feeds whose generators hold random settings. They check that they see no others."""
    return RANDOM.format(chaos=str(Path(__file__).parents[2] / "chaos"), seed=seed)


def check_random_feeds(urls: Mapping[str, str], workers: int | None = None) -> None:
    for name, url in urls.items():
        with penstock.connect(url, workers=workers) as connection:
            found = Counter(pair for split, at in connection.batches() for pair in zip(split, at, strict=True))
        assert found == Counter((split, at) for split in range(11) for at in range(split * 7 % 20)), name


def test_any_mix_of_held_settings_is_a_generators_own(serve: Serve) -> None:
    check_random_feeds(serve(random_feeds(1), *RANDOM_NAMES, workers=2).urls)


@pytest.mark.fuzz
def test_random_mixes_of_held_settings_are_a_generators_own(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    until = time.monotonic() + request.config.getoption("--fuzz-seconds")
    for seed in count(request.config.getoption("--fuzz-seed")):
        module = module_of(random_feeds(seed), tmp_path)
        for workers in range(5):
            check_random_feeds({f"seed {seed}, {name}": f"{module}:{name}" for name in RANDOM_NAMES}, workers)
        if time.monotonic() > until:
            break


SHARED = """
    import os, signal
    from penstock_server import Feed

    def generate(split):
        before = os.umask(0o70 + split)
        signal.setitimer(signal.ITIMER_REAL, 600)
        try:
            for i in range(7):
                yield i
        finally:
            os.umask(before)
            signal.setitimer(signal.ITIMER_REAL, 0)

    def restored(split):
        for i in range(7):
            before = os.umask(0o77)
            os.umask(before)
            yield i

    feed = Feed(generate, splits=range(5), batch_size=2)
    quiet = Feed(restored, splits=range(5), batch_size=2)
"""


OBJECTS = """
    import random
    from penstock_server import Feed

    class Reader:
        def __init__(self):
            self.count, self.order, self.rng, self.cache = 0, [1, 2, 3], random.Random(1), {}

        def counted(self, split):
            for i in range(7):
                self.count += 1
                yield i

        def __call__(self, split):
            self.rng.shuffle(self.order)
            yield from self.order

        def cached(self, split):
            self.cache[split] = split
            yield split

    def nested():
        count = 0
        def around(split):
            nonlocal count
            count += 1
            yield count
        return around

    how = dict(splits=range(5), batch_size=2)
    counted, called = Feed(Reader().counted, **how), Feed(Reader(), **how)
    cached, around = Feed(Reader().cached, **how), Feed(nested(), **how)
    own = Feed(Reader, method="counted", **how)
"""


def test_an_object_that_generators_share_and_change_is_named_at_the_first_sample(serve: Serve) -> None:
    daemon = serve(OBJECTS, "counted", "called", "cached", "around", "own", workers=1)
    found = [line.partition("feed ")[2] for line in daemon.stderr().splitlines() if "generators of a worker" in line]
    assert sorted(line.partition(", which all")[0] for line in found) == [
        "around: its generator changes count around around",
        "called: its generator changes Reader.order, Reader.rng",
        "counted: its generator changes Reader.count",
    ]


def test_what_cannot_be_kept_apart_is_named_at_the_first_sample(serve: Serve) -> None:
    daemon = serve(SHARED, "feed", "quiet", workers=1)
    (warning,) = [line for line in daemon.stderr().splitlines() if "before it restores that" in line]
    assert "feed feed: its generator changes os.umask, the alarm of signal.setitimer, and yields" in warning
    assert "set it for each sample, and restore it before `yield`" in warning


TENSORFLOW = """
    import os
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf
    from penstock_server import Feed

    def held(split):
        if split % 3 == 0:
            return tf.name_scope(f"scope{split}")
        return tf.Graph().as_default() if split % 3 == 1 else tf.device("CPU:0")

    def generate(split):
        with held(split):
            for i in range(7):
                where = "cpu" if split % 3 == 2 and "CPU:0" in tf.constant(1).device else ""
                yield f"{split} {i} {tf.get_current_name_scope()}{where} {tf.executing_eagerly()}"

    feed = Feed(generate, splits=range(5), batch_size=2, lanes=2, shuffle=20)
    ordered = Feed(generate, splits=range(5), batch_size=2, lanes=3)
"""
TORCH = """
    import torch
    from penstock_server import Feed

    def generate(split):
        if split % 2:
            torch.set_default_dtype(torch.float64)
        with torch.set_grad_enabled(split % 3 == 0):
            torch.manual_seed(split)
            for i in range(7):
                number = torch.randn(1, requires_grad=True) * 2
                yield f"{split} {i} {number.dtype} {number.requires_grad} {float(number.detach()):.4f}"

    feed = Feed(generate, splits=range(5), batch_size=2, lanes=2, shuffle=20)
    ordered = Feed(generate, splits=range(5), batch_size=2, lanes=3)
"""


def test_stacks_of_tensorflow_belong_to_one_generator(serve: Serve) -> None:
    def shows(split: int, _: int) -> str:
        return (f"scope{split} True", " False", "cpu True")[split % 3]

    daemon = serve(TENSORFLOW, "feed", "ordered", workers=1)
    for url in daemon.urls.values():
        with penstock.connect(url) as connection:
            assert read(connection) == rows(shows)


def test_settings_and_random_states_of_torch_belong_to_one_generator(serve: Serve) -> None:
    torch = pytest.importorskip("torch")

    def shows(split: int, number: int) -> str:
        dtype = torch.float64 if split % 2 else torch.float32
        drawn = torch.Generator().manual_seed(split)
        for _ in range(number + 1):
            value = torch.randn(1, dtype=dtype, generator=drawn) * 2
        return f"{dtype} {split % 3 == 0} {float(value):.4f}"

    daemon = serve(TORCH, "feed", "ordered", workers=1)
    for url in daemon.urls.values():
        with penstock.connect(url) as connection:
            assert read(connection) == rows(shows)


@pytest.mark.parametrize("state", ["random", "numpy"])
def test_a_glance_at_random_states_sees_draws_and_seeds(state: str) -> None:
    module: Any = random if state == "random" else np.random
    module.seed(1)
    seen = [state_memory.read()]
    for change in (module.random, lambda: module.seed(2), lambda: [module.random() for _ in range(624)]):
        assert state_memory.read() == seen[-1]
        change()
        seen.append(state_memory.read())
    assert None not in seen
    assert len(set(seen)) == 4


def module_of(source: str, folder: Path) -> Path:
    module = folder / f"neighbours_{next(_numbers)}.py"
    module.write_text(textwrap.dedent(source))
    return module


def of_this_process() -> list[Any]:
    context = decimal.getcontext()
    return [
        os.getcwd(),
        dict(os.environ),
        list(warnings.filters),
        (sys.stdout, sys.stderr, sys.getrecursionlimit()),
        (locale.setlocale(locale.LC_ALL), np.geterr(), context.prec),
        (random.getstate(), np.random.get_state()[1].tolist()),  # type: ignore[index]
    ]
