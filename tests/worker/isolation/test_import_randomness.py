"""Random numbers that are drawn while user modules are imported are the same in every worker and every daemon."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.conftest import Daemon, Serve

FEEDS = """
import random

import numpy as np
import draws  # when it is imported
from penstock_server import Feed, Leaf

ROWS = np.random.permutation(500)

class Sequence:
    "As users of Keras write them."
    def __init__(self):
        self.indices = np.arange(200)
        self.on_epoch_end()
        self.others = random.sample(range(200), 200)
        self.lazily = None

    def on_epoch_end(self):
        np.random.shuffle(self.indices)

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if self.lazily is None:
            self.lazily = np.random.permutation(200)
        rows = slice(10 * i, 10 * i + 10)
        return self.indices[rows], np.array(self.others[rows]), self.lazily[rows], np.random.random(10)

def rows(some):
    yield from some

sequence = Feed(Sequence(), batch_size=None, shuffle=1)
declared = Feed(Sequence(), batch_size=None, spec=(Leaf("int64", 10),) * 3 + (Leaf("float64", 10),))
train = Feed(rows, splits=[ROWS[i:400:7] for i in range(7)], batch_size=8)
val = Feed(rows, splits=[ROWS[400 + i :: 7] for i in range(7)], batch_size=8)
"""

AFRESH = """
import sys, threading, time
if "penstock_server.worker.process.fork_server" in sys.orig_argv:  # then it cannot fork: workers start afresh
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Callable[..., Daemon]:
    """`start("train", "val", workers=2, source=..., sitecustomize=...)` serves feeds. Other keywords are installed
    modules."""

    def starting(*feeds: str, workers: int = 2, source: str = FEEDS, **installed: str) -> Daemon:
        site = tmp_path / "site-packages"
        site.mkdir(exist_ok=True)
        for name, text in {
            "draws": "import random, numpy; random.random(); numpy.random.random()",
            **installed,
        }.items():
            (site / f"{name}.py").write_text(textwrap.dedent(text))
        path = os.pathsep.join((str(site), os.environ.get("PYTHONPATH", "")))
        return serve(source, *feeds, workers=workers, env={"PYTHONPATH": path})

    return starting


def read(url: str, epochs: int = 1) -> list[Any]:
    with penstock.connect(url) as connection:
        return [
            [leaf.tolist() for leaf in (batch if isinstance(batch, tuple) else (batch,))]
            for _ in range(epochs)
            for batch in connection.batches()
        ]


def test_a_sequence_that_shuffles_when_it_is_built_or_first_used_gives_each_row_once_with_any_number_of_workers(
    start: Callable[..., Daemon],
) -> None:
    streams = []
    for workers in (1, 2, 4):
        daemon = start("sequence", "declared", workers=workers)
        for name in ("sequence", "declared"):
            stream = read(daemon.urls[name])
            for leaf in range(3):
                assert sorted(row for batch in stream for row in batch[leaf]) == list(range(200)), (name, leaf)
            streams.append(sorted(stream))  # `declared` is not permuted
        assert daemon.stop() == 0
    for one, other in zip(streams[::2], streams[2::2], strict=False):
        assert one == other
    for one, other in zip(streams[1::2], streams[3::2], strict=False):
        assert one == other


def test_rows_that_are_divided_at_the_top_of_a_module_are_divided_alike_in_all_workers_and_feeds(
    start: Callable[..., Daemon],
) -> None:
    daemon = start("train", "val", workers=3)
    train, val = ([row for (batch,) in read(daemon.urls[name]) for row in batch] for name in ("train", "val"))
    assert (len(train), len(val)) == (400, 100)
    assert sorted(train + val) == list(range(500))
    assert daemon.stop() == 0
    alone = start("val", workers=1)  # a daemon that serves only this feed
    assert [row for (batch,) in read(alone.url) for row in batch] == val


def test_what_is_drawn_depends_neither_on_feeds_imported_before_nor_on_how_workers_start(
    start: Callable[..., Daemon],
) -> None:
    alone = start("val")
    expected = read(alone.url)
    assert "imported once for all workers" in alone.stderr()
    assert alone.stop() == 0
    afresh = start("val", sitecustomize=AFRESH)
    assert "imported once for all workers" not in afresh.stderr()
    assert read(afresh.url) == expected


def test_feeds_of_several_modules_do_not_hear_of_each_others_draws(tmp_path: Path) -> None:
    head = "import numpy as np\nfrom penstock_server import Feed\n"
    (tmp_path / "one_that_draws.py").write_text(f"{head}np.random.random(1000)\nfeed = Feed([1], batch_size=1)\n")
    (tmp_path / "two_that_draws.py").write_text(f"{head}feed = Feed(np.random.permutation(100), batch_size=9)\n")
    one, two = (f"{tmp_path / name}.py:feed" for name in ("one_that_draws", "two_that_draws"))
    found = []
    for targets in ((two,), (one, two)):
        code = (
            "import sys, numpy as np\n"
            "from penstock_server.targets.importing import load\n"
            "from penstock_server.worker.isolation.import_seeding import seeded_imports\n"
            "for target in sys.argv[1:]:\n"
            "    with seeded_imports():\n"
            "        feed = load(target).feed\n"
            "print(list(feed.generate), np.random.random())"
        )
        done = subprocess.run([sys.executable, "-c", code, *targets], capture_output=True, text=True, check=True)
        found.append(done.stdout.rpartition("] ")[::2])
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1], "draws after the import are not seeded, and must not repeat in all workers"


FAKE_TORCH = """
import random as _random

class _State(tuple):
    "Stands in for a tensor."
    def numpy(self):
        return repr(self).encode()

class _Generator:
    "Stands in for torch's: a state that can be seeded, read and set."
    def __init__(self):
        self._random = _random.Random(123)
    def manual_seed(self, seed):
        self._random.seed(seed)
    def get_state(self):
        return _State(self._random.getstate())
    def set_state(self, state):
        self._random.setstate(tuple(state))

default_generator = _Generator()

class _Tensor(float):
    def item(self):
        return float(self)

def rand(*shape):
    return _Tensor(default_generator._random.random())
"""

TORCH = """
import numpy as np
import torch
from penstock_server import Feed

ORDER = sorted(range(40), key=lambda _: torch.rand(()).item())

def noise(split):
    for i in range(10):
        yield np.array([split, i, torch.rand(()).item()])

class Items:
    def __len__(self):
        return 30
    def __getitem__(self, i):
        return np.array([i, torch.rand(()).item()])

class Made:
    "It draws when it is constructed."
    def __init__(self):
        self.level = torch.rand(()).item()
    def generate(self):
        while True:
            yield np.array([self.level, torch.rand(()).item()])

order = Feed(ORDER, batch_size=4)
made = Feed(Made, method="generate", segment=4, samples=40, batch_size=4, lanes=3)
noisy = Feed(noise, splits=range(12), batch_size=4, lanes=4, shuffle=16, turn=1)
items = Feed(Items(), batch_size=4, turn=1)
"""


@pytest.mark.parametrize("real", [False, True], ids=["a stand-in", "PyTorch"])
def test_torch_is_seeded_for_imports_splits_and_batches(start: Callable[..., Daemon], real: bool) -> None:
    if real and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    installed = {} if real else {"torch": FAKE_TORCH}
    names = ("order", "noisy", "items", "made")
    streams = []
    for workers, site in ((1, {}), (3, {}), (2, {"sitecustomize": AFRESH})):
        daemon = start(*names, workers=workers, source=TORCH, **installed, **site)
        streams.append([read(daemon.urls[name], epochs=2) for name in names])
        assert daemon.stop() == 0
    assert streams[0] == streams[1] == streams[2]
    order, noisy, items, made = streams[0]
    assert len({row[0] for (batch,) in made for row in batch}) == 20, "each object is seeded before it is constructed"
    assert sorted(row for (batch,) in order[: len(order) // 2] for row in batch) == list(range(40))
    for stream in (noisy, items, made):
        drawn = [row[-1] for (batch,) in stream for row in batch]
        assert len(set(drawn)) == len(drawn) > 50
