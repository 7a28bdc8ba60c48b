"""A class with a generator method runs in the workers as it is, and its stream keeps every promise."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import penstock
from tests.conftest import Daemon, Serve, StartTrainer

ROOT = Path(__file__).resolve().parents[2]
SCENES = ROOT / "examples" / "scenes"

FEEDS = """
    import random

    import numpy as np
    from penstock_server import Feed

    class Scenes:
        "It draws when it is constructed and when it runs, and changes the list that it is given."

        def __init__(self, files, size=3):
            random.shuffle(files)
            self.files, self.size = files, size
            self.offset = np.random.random()
            self.left = 2

        def generate_data(self):
            while True:
                for file in self.files:
                    yield {"file": file, "x": self.offset + np.random.random(self.size), "pick": random.random()}

        def of_labels(self, label, rng):
            for file in self.files:
                yield file, label, rng.random(), np.random.random()

    class OfASplit:
        def __init__(self, path, scale):
            self.path, self.scale, self.noise = path, scale, np.random.normal()

        def __iter__(self):
            for i in range(5 + self.path):
                yield np.array([self.path, i, self.scale, self.noise, random.random()])

    class Locked:
        def __init__(self, path):
            open(f"/nowhere/{path}")

        def generate(self):
            yield 1

    class Alike:
        def __init__(self, n):
            self.n = n

        def generate(self):
            for i in range(self.n):
                yield i

    def ranges(split, width, *, start=0):
        for i in range(start, start + width):
            yield np.array([split, i])

    FILES = list(range(20))
    scenes = Feed(Scenes, method="generate_data", args=(FILES,), kwargs={"size": 4}, segment=30, batch_size=8, lanes=4)
    mixed = Feed(Scenes, method="generate_data", args=(FILES,), segment=30, batch_size=8, lanes=3, shuffle=50, seed=2)
    batches = Feed(Scenes, method="generate_data", args=(FILES,), segment=7, batch_size=None)
    labels = Feed(Scenes, method="of_labels", args=(FILES,), splits=[10, 20, 30], batch_size=8, lanes=3)
    split = Feed(OfASplit, method="__iter__", args=(0.5,), splits=range(9), batch_size=8, lanes=4, turn=1)
    plain = Feed(ranges, args=(6,), kwargs={"start": 2}, splits=[0, 1], batch_size=6, lanes=1)
    locked = Feed(Locked, method="generate", splits=["a.h5"], batch_size=1)
    alike = Feed(Alike, method="generate", args=(100,), segment=40, batch_size=4)
"""
ENDLESS = ("scenes", "mixed", "batches")
NAMES = (*ENDLESS, "labels", "split", "plain")


def digest(batch: Any) -> str:
    leaves = [batch[key] for key in sorted(batch)] if isinstance(batch, dict) else batch
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def read(daemon: Daemon, name: str, count: int, transport: str = "local", state: Any = None) -> list[str]:
    with penstock.connect(daemon.urls[name], transport=transport, state=state) as connection:
        return [digest(batch) for batch in itertools.islice(connection.batches(), count)]


def test_the_stream_of_a_class_is_the_same_with_1_and_3_workers_through_a_kill_and_from_a_state(serve: Serve) -> None:
    one = serve(FEEDS, *NAMES, workers=1)
    quiet = {name: read(one, name, 120, "tcp") for name in NAMES}
    for name in ENDLESS:
        assert len(set(quiet[name])) == 120, name
    assert one.stop() == 0

    three = serve(FEEDS, *NAMES, workers=3)
    states = {}
    for name in NAMES:
        with penstock.connect(three.urls[name]) as connection:
            batches = connection.batches()
            seen = [digest(batch) for batch in itertools.islice(batches, 5)]
            states[name] = connection.state_dict()
            if name in ENDLESS:
                three.workers()[0].kill()
            seen += [digest(batch) for batch in itertools.islice(batches, 115)]
            assert seen == quiet[name], name
    assert "a different first sample" not in three.stderr()
    assert three.stop() == 0

    two = serve(FEEDS, *ENDLESS, "split", workers=2)
    for name in (*ENDLESS, "split"):
        assert read(two, name, 115, state=states[name]) == quiet[name][5:], name


def test_the_split_goes_to_the_method_or_the_constructor_and_args_behind_it(serve: Serve) -> None:
    daemon = serve(FEEDS, "labels", "split", "plain")
    with penstock.connect(daemon.urls["labels"]) as connection:
        rows = [row for batch in connection.batches() for row in zip(*batch, strict=True)]
    assert sorted((label, file) for file, label, *_ in rows) == [
        (label, file) for label in (10, 20, 30) for file in range(20)
    ]
    assert len({row[2] for row in rows} | {row[3] for row in rows}) == 120
    with penstock.connect(daemon.urls["split"]) as connection:
        rows = [row.tolist() for batch in connection.batches() for row in batch]
    assert sorted((path, i) for path, i, *_ in rows) == [(path, i) for path in range(9) for i in range(5 + path)]
    assert len({noise for *_, noise, _ in rows}) == 9
    assert len({pick for *_, pick in rows}) == len(rows)
    with penstock.connect(daemon.urls["plain"]) as connection:
        assert [batch.tolist() for batch in connection.batches()] == [
            [[split, i] for i in range(2, 8)] for split in (0, 1)
        ]


def test_an_error_names_the_constructor_and_the_split(serve: Serve) -> None:
    daemon = serve(FEEDS, "locked", ready=False, workers=1)
    assert daemon.process.wait(60) == 1
    assert "Locked raised FileNotFoundError: [Errno 2] No such file" in daemon.stderr()
    assert "split 'a.h5'" in daemon.stderr()


def test_a_class_that_draws_nothing_is_said_to_repeat_its_segments(serve: Serve) -> None:
    daemon = serve(FEEDS, "alike")
    read(daemon, "alike", 1)
    while "so every segment repeats them" not in daemon.stderr():
        time.sleep(0.02)


TRAIN = """
import os, runpy, sys
sys.path.insert(0, os.getcwd())
runpy.run_path("train.py", run_name="__main__")
"""


def test_the_example_trains_with_from_generator_and_with_penstock(start_trainer: StartTrainer, tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCENES / "prepare.py", tmp_path], check=True)
    source = (SCENES / "scenes.py").read_text()
    assert "penstock" not in source.split('"""')[2], "the class must be unchanged"
    code = f"import os; os.chdir({str(SCENES)!r})\n{TRAIN}"
    for options in ((), ("--penstock",)):
        trainer = start_trainer(code, *options, env={"SCENES_DIR": str(tmp_path), "PATH": os.environ["PATH"]})
        stdout, stderr = trainer.communicate(100)
        assert trainer.returncode == 0, stderr
        assert stdout.startswith("accuracy "), stderr


def test_the_class_of_the_example_gives_one_stream(serve: Serve, tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCENES / "prepare.py", tmp_path], check=True)
    source = f"import sys\nsys.path.insert(0, {str(SCENES)!r})\n{(SCENES / 'feed.py').read_text()}"
    streams = set()
    for workers in (1, 3):
        daemon = serve(source.replace("segment=200", "segment=10"), workers=workers, env={"SCENES_DIR": str(tmp_path)})
        streams.add(tuple(read(daemon, "feed", 60)))
    (stream,) = streams
    assert len(set(stream)) == 60
