"""Penstock reads indexable objects as their authors intend: lists of indices at once, blocks of neighbours, torch's
own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock_proto.batches.inferring import as_array
from penstock_server import Feed, Shuffle
from penstock_server.feed.objects.indexables import length_of
from penstock_server.shuffling.block_order import BlockOrder
from tests.conftest import Daemon, Serve

FEEDS = """
    import numpy as np
    from penstock_server import Feed, Shuffle

    class Table:
        "Rows of 1003, which are asked for one by one, or many at once."
        def __len__(self):
            return 1003
        def __getitem__(self, i):
            return {"row": i, "asked": 1, "drawn": np.random.random()}

    class Together(Table):
        def __getitem__(self, i):
            raise AssertionError("a batch is asked for at once") if i else KeyError("only to warm up")
        def __getitems__(self, indices):
            assert type(indices) is list and all(type(i) is int for i in indices)
            return [{"row": i, "asked": len(indices), "drawn": np.random.random()} for i in indices]

    class TooFew(Together):
        def __getitems__(self, indices):
            return super().__getitems__(indices)[1:]

    class Broken(Together):
        def __getitems__(self, indices):
            raise OSError("no route to the object store")

    class NotUsed(Table):
        __getitems__ = None

    spec = {"row": "int64", "asked": "int64", "drawn": "float64"}
    from penstock_server import Leaf
    spec = {key: Leaf(dtype, ()) for key, dtype in spec.items()}
    single = Feed(Table(), batch_size=16, shuffle=1)
    together = Feed(Together(), batch_size=16, shuffle=1, spec=spec)
    too_few = Feed(TooFew(), batch_size=16, spec=spec)
    broken = Feed(Broken(), batch_size=16, spec=spec)
    not_used = Feed(NotUsed(), batch_size=16, shuffle=1)
    blocks = Feed(Together(), batch_size=16, shuffle=Shuffle(40, block=20), spec=spec)
    kept = Feed(Together(), batch_size=10, shuffle=Shuffle(1, block=50), spec=spec)
"""


def read(daemon: Daemon, name: str, epochs: int = 2) -> list[list[Any]]:
    with penstock.connect(daemon.urls[name]) as connection:
        return [
            [{key: leaf.tolist() for key, leaf in batch.items()} for batch in connection.batches()]
            for _ in range(epochs)
        ]


def test_a_batch_is_asked_for_at_once_where_the_object_can_do_that(serve: Serve) -> None:
    streams = []
    for workers in (1, 3):
        daemon = serve(FEEDS, "single", "together", "not_used", "blocks", "kept", workers=workers)
        streams.append({name: read(daemon, name) for name in daemon.urls})
        assert daemon.stop() == 0
    assert streams[0] == streams[1]
    assert streams[0]["together"] != streams[0]["single"]
    for name, epochs in streams[0].items():
        for epoch in epochs:
            assert sorted(row for batch in epoch for row in batch["row"]) == list(range(1003)), name
            together = name in ("together", "blocks", "kept")
            assert all(set(batch["asked"]) == {len(batch["row"]) if together else 1} for batch in epoch)
    rows = [[batch["row"] for batch in epoch] for epoch in streams[0]["together"]]
    assert rows == [[batch["row"] for batch in epoch] for epoch in streams[0]["single"]]
    for epoch in streams[0]["kept"]:
        inside = [batch["row"] for batch in epoch]
        assert sum(rows == list(range(rows[0], rows[0] + len(rows))) for rows in inside) >= len(inside) - 21


def test_what_goes_wrong_with_many_items_at_once_names_them(serve: Serve) -> None:
    daemon = serve(FEEDS, "too_few", "broken", workers=1)
    with pytest.raises(penstock.GeneratorError, match=r"__getitems__ of TooFew returned 15 samples for 16 indices"):
        read(daemon, "too_few")
    with pytest.raises(penstock.GeneratorError, match=r"reading items 0, 1, 2, .*, \.\.\. raised OSError: no route"):
        read(daemon, "broken")


def test_the_example_decompresses_a_chunk_about_once(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "hdf5_rows.py"
    env = {**os.environ, "ROWS_H5": str(tmp_path / "rows.h5")}
    done = subprocess.run([sys.executable, example], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    chunks, times, anywhere = map(int, re.findall(r"\b(\d+) (?:chunks are|times)", done.stdout))
    assert chunks <= times <= 2 * chunks < anywhere / 10


# --- blocks ---

orders = st.builds(
    BlockOrder,
    st.integers(0, 99),
    st.integers(0, 3),
    st.integers(1, 300),
    st.integers(1, 400),
    st.integers(1, 400),
)


@given(orders, st.data())
def test_blocks_are_permuted_so_that_every_index_comes_once_and_any_range_can_be_computed(
    order: BlockOrder, data: st.DataObject
) -> None:
    length = order._length
    whole = order.at(0, length).tolist()
    assert sorted(whole) == list(range(length))
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    if start < stop:
        assert order.at(start, stop).tolist() == whole[start:stop]


@given(st.integers(0, 99), st.integers(1, 300), st.integers(1, 60))
def test_rows_of_a_block_keep_their_order_where_shuffle_is_1(seed: int, length: int, block: int) -> None:
    order = BlockOrder(seed, 0, length, block, 1).at(0, length).tolist()
    firsts = [i for i in range(length) if order[i] % block == 0]
    for first, following in zip(firsts, [*firsts[1:], length], strict=True):
        assert order[first:following] == list(range(order[first], order[first] + following - first))
    assert sorted(order[first] for first in firsts) == list(range(0, length, block))


@given(st.integers(0, 99), st.integers(1, 300), st.integers(1, 60), st.integers(1, 200))
def test_a_window_of_shuffle_rows_reads_few_blocks(seed: int, length: int, block: int, shuffle: int) -> None:
    order = BlockOrder(seed, 1, length, block, shuffle).at(0, length)
    unmixed = BlockOrder(seed, 1, length, block, 1).at(0, length)
    for start in range(0, length, shuffle):
        window = slice(start, start + shuffle)
        assert sorted(order[window]) == sorted(unmixed[window])
        assert len(set((order[window] // block).tolist())) <= shuffle / block + 3


def test_every_order_of_blocks_and_place_of_the_short_one_is_as_likely() -> None:
    seen = Counter(tuple(BlockOrder(seed, 0, 7, 2, 1).at(0, 7).tolist()) for seed in range(4800))
    assert len(seen) == 24
    assert all(120 < count < 280 for count in seen.values())


def test_long_orders_need_no_memory() -> None:
    order = BlockOrder(0, 0, 10**15 + 7, 1000, 10**9)
    positions = order.at(10**14, 10**14 + 1000)
    assert len(set(positions.tolist())) == 1000
    assert positions.max() < 10**15 + 7


def test_a_generator_has_no_blocks() -> None:
    def samples(split: int) -> Any:
        yield split

    with pytest.raises(ValueError, match=r"the block of shuffle=Shuffle\(1, block=2\) is for indexable objects"):
        Feed(samples, splits=[1], batch_size=1, shuffle=Shuffle(1, block=2))


# --- torch ---

FAKE_TORCH = {
    "torch/__init__.py": "default_generator = None\ndef initial_seed():\n    return 1\nfrom .utils import data\n",
    "torch/utils/__init__.py": "",
    "torch/utils/data/__init__.py": """
from ._utils import worker
from ._utils.worker import get_worker_info

class Dataset:
    def __getitem__(self, index):
        raise NotImplementedError

class IterableDataset(Dataset):
    pass

Dataset.__module__ = IterableDataset.__module__ = "torch.utils.data.dataset"
""",
    "torch/utils/data/_utils/__init__.py": "",
    "torch/utils/data/_utils/worker.py": "_worker_info = None\ndef get_worker_info():\n    return _worker_info\n",
}
DATASETS = """
    import random

    import numpy as np
    import torch
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
    from penstock_server import Feed

    tensor = getattr(torch, "tensor", np.asarray)

    class Map(Dataset):
        def __len__(self):
            return 103
        def __getitem__(self, i):
            return [tensor([i, i + 1]), [tensor([i]), 2.5]]

    class Divided(IterableDataset):
        "As torch's documentation shows it."
        def __iter__(self):
            info = get_worker_info()
            for i in range(info.id, 203, info.num_workers):
                yield tensor(i)

    class Few(IterableDataset):
        "Refuses more workers than it has shards, as WebDataset does."
        def __iter__(self):
            info = get_worker_info()
            if info.num_workers > 4:
                raise ValueError("too few shards")
            yield tensor(info.id)

    class Undivided(IterableDataset):
        def __iter__(self):
            yield from map(tensor, range(203))

    class Late(IterableDataset):
        "Asks where it is while it is read, as other lanes are."
        def __iter__(self):
            for i in range(203):
                info = get_worker_info()
                if i % info.num_workers == info.id:
                    yield tensor(i)

    class Itself(IterableDataset):
        def __iter__(self):
            get_worker_info().id
            return self
        def __next__(self):
            return tensor(1)

    class Counting(IterableDataset):
        "Every worker must count the same epochs, and shuffle in the same way, or rows are lost."
        def __init__(self):
            self.epoch, self.order, self.rng = 0, list(range(203)), random.Random(1)
            self.table = np.arange(1 << 18)  # too large to copy
            self.bump = self.next_epoch
        def next_epoch(self):
            self.epoch += 1
        def __iter__(self):
            self.bump()
            self.rng.shuffle(self.order)
            np.random.default_rng(self.epoch).shuffle(self.order)
            info = get_worker_info()
            for i in self.order[info.id :: info.num_workers]:
                yield tensor(self.table[i])

    class Holding(IterableDataset):
        def __init__(self, held):
            self.held = held
        def __iter__(self):
            get_worker_info().id
            yield from map(tensor, self.held)

    class Unpickled(Divided):
        def __getstate__(self):
            raise TypeError("it stays here")

    items = Feed(Map(), batch_size=8, shuffle=103)
    counting = Feed(Counting(), batch_size=8, lanes=7)
    counting_shuffled = Feed(Counting(), batch_size=8, lanes=3, shuffle=40)
    generating = Feed(Holding(i for i in range(203)), batch_size=8)
    reading = Feed(Holding(open(__file__)), batch_size=8)
    unpickled = Feed(Unpickled(), batch_size=8)
    unpickled_in_one_lane = Feed(Unpickled(), batch_size=8, lanes=1)
    divided = Feed(Divided(), batch_size=8)
    late = Feed(Late(), batch_size=8, shuffle=50, lanes=5)
    few = Feed(Few(), batch_size=8)
    undivided = Feed(Undivided(), batch_size=8)
    one_lane = Feed(Undivided(), batch_size=8, lanes=1)
    itself = Feed(Itself(), batch_size=8)
"""


def path_with_torch(folder: Path, real: bool) -> dict[str, str]:
    if real and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    if not real:
        for name, text in FAKE_TORCH.items():
            path = folder / "installed" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return {"PYTHONPATH": ":".join((str(folder / "installed"), *sys.path))}


@pytest.mark.parametrize("real", [False, True], ids=["a stand-in", "PyTorch"])
def test_torch_datasets_are_read_once_by_any_number_of_workers(serve: Serve, tmp_path: Path, real: bool) -> None:
    env = path_with_torch(tmp_path, real)
    names = ("items", "divided", "late", "one_lane", "counting", "counting_shuffled", "unpickled_in_one_lane")
    streams = []
    for workers in (1, 3):
        daemon = serve(DATASETS, *names, workers=workers, env=env)
        stream = {}
        for name in names:
            with penstock.connect(daemon.urls[name]) as connection:
                stream[name] = [list(connection.batches()) for _ in range(2)]
        streams.append(stream)
        assert daemon.stop() == 0
    assert repr(streams[0]) == repr(streams[1])
    for name in names[1:]:
        for epoch in streams[0][name]:
            assert sorted(row for batch in epoch for row in batch.tolist()) == list(range(203)), name
    for epoch in streams[0]["items"]:
        assert sorted(row for batch in epoch for (row,) in batch[1][0].tolist()) == list(range(103))
        pairs, (first, number) = epoch[0]
        assert (pairs == np.hstack([first, first + 1])).all()
        assert number.tolist() == [2.5] * 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("undivided", "Undivided does not divide itself: .*get_worker_info.*16 lanes.*or give Feed\\(lanes=1\\)"),
        ("itself", "Itself.__iter__ returns the dataset itself"),
        ("generating", "Holding holds <generator object .*, which cannot be copied, and each of 16 lanes needs a dat"),
        ("reading", "Holding holds <_io.TextIOWrapper .*open files and start generators in __iter__, or give Feed"),
        ("unpickled", "Unpickled cannot be copied, and each of 16 lanes needs a dataset of its own, as each worker "),
    ],
)
def test_an_iterable_dataset_that_would_be_duplicated_is_refused(
    serve: Serve, tmp_path: Path, name: str, text: str
) -> None:
    daemon = serve(DATASETS, name, ready=False, workers=1, env=path_with_torch(tmp_path, False))
    assert daemon.process.wait(60) == 1
    assert re.search(text, daemon.stderr()), daemon.stderr()


def test_an_error_of_a_dataset_says_for_how_many_lanes_it_was_divided(serve: Serve, tmp_path: Path) -> None:
    daemon = serve(DATASETS, "few", ready=False, workers=1, env=path_with_torch(tmp_path, False))
    assert daemon.process.wait(60) == 1
    said = "ValueError: too few shards (the dataset is divided for 16 workers, one for each lane: give Feed(lanes=)"
    assert said in daemon.stderr()


class Counted:
    """An indexable object whose `__len__` returns any value, or raises it."""

    length: Any = None

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> int:
        return index


class PyDataset(Counted):
    """A stand-in for the class of Keras."""

    __module__ = "keras.utils"

    @property
    def num_batches(self) -> int:
        return len(self)


@pytest.mark.parametrize("kind", [Counted, PyDataset])
@pytest.mark.parametrize(
    ("length", "says"),
    [
        (np.ceil(2.5), r"{}.__len__ must return an int, and returned 3.0 \(numpy.float64\)"),
        (3.0, r"{}.__len__ must return an int, and returned 3.0 \(float\)"),
        (None, r"{}.__len__ must return an int, and returned None \(NoneType\)"),
        (np.array([2.0, 3.0]), r"{}.__len__ must return an int, and returned float64 array of shape \(2,\) \(numpy"),
        (-1, r"{}.__len__ must return an int from 0 to [0-9]+, and returned -1"),
        (1 << 70, r"{}.__len__ must return an int from 0 to [0-9]+, and returned 1[0-9]+"),
        (TypeError("no index"), "^no index$"),
    ],
)
def test_a_length_that_is_none_names_the_class(kind: type[Counted], length: Any, says: str) -> None:
    source = kind()
    source.length = length
    with pytest.raises((TypeError, ValueError), match=says.format(kind.__name__)):
        Feed(source, batch_size=None)


def test_a_length_may_be_an_integer_of_numpy() -> None:
    source = Counted()
    source.length = np.int64(3)
    assert length_of(source) == 3


def test_a_loader_is_refused_with_the_fix() -> None:
    loader = type("DataLoader", (), {"__module__": "torch.utils.data.dataloader", "__len__": lambda self: 3})()
    with pytest.raises(TypeError, match=r"got a torch DataLoader.*Feed\(loader.dataset, batch_size="):
        Feed(loader, batch_size=8)


def test_tensors_are_taken_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    array = as_array(tensor)
    assert np.shares_memory(array, tensor.detach().numpy())
    assert as_array(torch.ones(3, dtype=torch.bfloat16)).dtype.name == "bfloat16"
    with pytest.raises(penstock.SpecError, match=r"layout torch.sparse_coo: yield tensor.to_dense\(\)"):
        as_array(torch.eye(2).to_sparse())


def test_a_tensor_elsewhere_is_refused_with_the_fix() -> None:
    class Tensor:
        device = type("Device", (), {"type": "cuda", "__str__": lambda self: "cuda:0"})()

        def detach(self) -> None: ...
        def numpy(self) -> None: ...

    with pytest.raises(penstock.SpecError, match=r"a torch tensor on cuda:0: .* yield tensor.cpu\(\)"):
        as_array(Tensor())
