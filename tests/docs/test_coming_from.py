"""The snippets of the page "Coming from another loader" run, and give the same samples before and after a change."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import penstock
from tests.conftest import Daemon, Serve, StartTrainer
from tests.docs.pages import DOCS, blocks, commands, section, write_files

PAGE = (DOCS / "coming-from.md").read_text()
QUICKER = {
    "workers=4, use_multiprocessing=True": "workers=1",
    "workers=4": "workers=0",
    "steps_per_epoch=100, epochs=10": "steps_per_epoch=2",
    "epochs=10": "epochs=1",
}
DATAFLOW = """
from .utils.utils import get_rng

class RNGDataFlow:
    def reset_state(self):
        self.rng = get_rng(self)
"""
UTILS = """
import os, time
import numpy as np

seed = None

def fix_rng_seed(value):
    global seed
    seed = value

def get_rng(flow):
    return np.random.RandomState((id(flow) + os.getpid() + time.time_ns()) % 2**32 if seed is None else seed)
"""
"""These replace tensorpack's own if tensorpack is not installed."""

RUN = """
import json, os, sys
os.chdir(sys.argv[1])
sys.path.insert(0, "")
import keras
import numpy as np

def labels(dataset):
    return sorted(int(label) for _, labels in dataset for label in labels)

model = keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(256)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
found = []
for snippet in json.loads(sys.argv[2]):
    names = {"model": model}
    exec(snippet, names)
    found.append(labels(names["dataset"]) if "dataset" in names and "steps_per_epoch" not in snippet else None)
print(json.dumps({"labels": found, "fit_generator": hasattr(keras.Model, "fit_generator")}))
"""


def write_tensorpack(folder: Path) -> None:
    """Write a package like tensorpack, as far as the page uses it."""
    (folder / "utils").mkdir(parents=True)
    for name, text in {"__init__": "", "dataflow": DATAFLOW, "utils/__init__": "", "utils/utils": UTILS}.items():
        (folder / f"{name}.py").write_text(text)


@pytest.fixture
def daemon(tmp_path: Path, serve: Serve) -> Daemon:
    """A daemon that serves all feeds of the page, in a folder with its files and data."""
    folder = tmp_path / "daemon0"
    (folder / "pictures").mkdir(parents=True)
    write_files(PAGE, folder)
    images = np.arange(200 * 64, dtype="float32").reshape(200, 8, 8)
    for first in range(0, 200, 50):
        rows = slice(first, first + 50)
        np.savez(folder / f"rows-{first:03}.npz", images=images[rows], labels=np.arange(first, first + 50))
    for number in range(40):
        np.save(folder / "pictures" / f"{number}-{number % 10}.npy", images[number])
    if importlib.util.find_spec("tensorpack") is None:
        write_tensorpack(folder / "tensorpack")
    (command,) = commands(PAGE)
    feeds = re.findall(r"feeds\.py:{(.*)}", command)[0].split(",")
    return serve((folder / "feeds.py").read_text(), *feeds)


def snippets(heading: str) -> list[str]:
    """Return the Python blocks of a section that are not files, but parts of a training script."""
    return [block for block in blocks(section(PAGE, heading), "python") if not re.match(r"# \w+\.py\n", block)]


def test_before_and_after_give_the_same_samples(daemon: Daemon, start_trainer: StartTrainer) -> None:
    from_generator, mapped, fit_generator, loader, service, tensorpack = (
        found for heading in re.findall(r"^## (.*)$", PAGE, re.MULTILINE) if (found := snippets(heading))
    )
    old, segments, keras_before, keras_after = fit_generator
    assert "fit_generator(" in old
    if importlib.util.find_spec("torch") is None:
        loader = [loader[1].partition("dataset = connection.torch()")[0]]
    if importlib.util.find_spec("tensorpack") is None:
        tensorpack = tensorpack[1:]
    runs = [*from_generator, *mapped, segments, keras_before, keras_after, *loader, *service, *tensorpack]
    for many, few in QUICKER.items():
        runs = [run.replace(many, few) for run in runs]
    (url, *_) = daemon.urls.values()
    runs = [run.replace("tcp://127.0.0.1:5555", url.rpartition("/")[0]) for run in runs]
    trainer = start_trainer(RUN, str(daemon.folder), json.dumps(runs))
    said, errors = trainer.communicate(120)
    assert trainer.returncode == 0, errors
    found = json.loads(said.splitlines()[-1])
    assert not found["fit_generator"], "the page says that Keras no longer has it"
    whole = list(range(200))
    pictures = sorted(4 * list(range(10)))
    others = [whole] * (len(loader) + len(service) + len(tensorpack))
    assert found["labels"] == [whole, whole, pictures, pictures, None, None, whole, *others]


@pytest.mark.parametrize(("feed", "rows"), [("inputs", 32), ("rows_of_inputs", 48)])
def test_a_model_gets_its_inputs_as_a_tuple(
    feed: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    with penstock.connect(f"{feed}.py:{feed}", workers=1) as connection:
        (images, sizes), labels = next(iter(connection.batches()))
    assert [images.shape, sizes.shape, labels.shape] == [(rows, 8, 8), (rows, 2), (rows,)]


def test_random_numbers_of_a_dataflow_do_not_depend_on_the_number_of_workers(
    daemon: Daemon, serve: Serve, tmp_path: Path
) -> None:
    shutil.copytree(daemon.folder, tmp_path / "daemon1")
    other = serve((daemon.folder / "feeds.py").read_text(), "flow", workers=1)
    streams = []
    for url in (daemon.urls["flow"], other.urls["flow"]):
        with penstock.connect(url) as connection:
            streams.append([image.tobytes() for epoch in range(2) for image, _ in connection.batches()])
    assert streams[0] == streams[1]
    assert len({*streams[0]}) == len(streams[0]), "the second epoch has other random numbers"
