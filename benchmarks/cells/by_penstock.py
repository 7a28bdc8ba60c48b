"""Penstock: `penstock.dataset` with two workers. The feeds are in `penstock_feeds.py` and the files beside it."""

import itertools
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sources
from table import Cells

import penstock
from penstock_server import Feed

cells = Cells()
FOLDER = Path(__file__).parent


def load(name: str, workers: int = 2, module: str = "penstock_feeds") -> Any:
    return penstock.dataset(f"{FOLDER / module}.py:{name}", workers=workers)


for _name in (
    *("files", "scenes", "undivided", "tfrecord", "parquet", "tar"),
    *("nested", "text", "ragged", "buckets", "rare", "weights", "rebatch"),
):
    cells(_name)(lambda name=_name: load(name))


for _name in ("indexed", "hdf5"):
    cells(_name)(lambda name=_name: load(name))


@cells()
def torch_map() -> Iterable[Any]:
    return load("torch_map", module="penstock_torch_feeds")


@cells(adapter="refused unless the feed says `lanes=1`")
def torch_iterable() -> Iterable[Any]:
    return load("torch_iterable", module="penstock_iterable_feed")


@cells()
def keras_shuffled() -> Iterator[Any]:
    dataset = load("keras_shuffled", module="penstock_keras_feeds")
    for _ in range(2):
        yield from (batch[0] if isinstance(batch, tuple) else batch for batch in dataset)


@cells()
def keras_endless() -> Iterator[Any]:
    for batch in load("keras_endless", module="penstock_keras_feeds"):
        yield batch[0] if isinstance(batch, tuple) else batch


@cells()
def notebook() -> Iterable[Any]:
    feed = Feed(sources.in_notebook(), splits=[[path] for path in sources.PATHS], batch_size=8)
    return penstock.dataset(feed, workers=2)


@cells()
def same(workers: int) -> Iterable[Any]:
    return load("indexed", workers)


@cells()
def same_random(workers: int) -> Iterable[Any]:
    return load("same_random", workers)


@cells()
def resume() -> Iterator[Any]:
    with penstock.connect(f"{FOLDER / 'penstock_feeds.py'}:indexed", workers=2) as first:
        yield from itertools.islice(first.batches(), 5)
        state = first.state_dict()
    with penstock.connect(f"{FOLDER / 'penstock_feeds.py'}:indexed", workers=2) as rest:
        rest.load_state_dict(state)
        yield from rest.batches()


@cells()
def killed() -> Iterator[Any]:
    for number, batch in enumerate(load("long")):
        if number == 3:
            os.kill(sources.a_maker(), signal.SIGKILL)
        yield batch
