"""A Keras `PyDataset` gives the batches that Keras would read from it, in any worker and epoch, and after a resume."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto import FeedError, GeneratorError
from penstock_proto.batches.inferring import infer
from penstock_server import Feed, Leaf, TupleSpec
from penstock_server.feed.objects import object_states
from penstock_server.feed.objects.indexables import as_structure
from penstock_server.to_daemon import control
from penstock_server.worker.items.keras_items import KerasItems
from tests.conftest import Daemon, Serve, StartTrainer

KERAS = """
class PyDataset:
    "A stand-in: workers would take 4 s to import Keras."
    def __init__(self, workers=1):
        self._workers = workers

    @property
    def num_batches(self):
        return len(self)

    def on_epoch_begin(self):
        pass

    def on_epoch_end(self):
        pass
"""
DATASETS = '''
import keras
import numpy as np

class Own(keras.utils.PyDataset if hasattr(keras, "utils") else keras.PyDataset):
    """Shuffles its rows behind each epoch with a generator of its own, from which items draw too; skips super()."""

    def __init__(self):
        self.x = np.arange(403)
        self.rng = np.random.default_rng(5)

    def __len__(self):
        return 41

    def on_epoch_begin(self):
        self.x[:10] = np.roll(self.x[:10], 1)

    def on_epoch_end(self):
        self.rng.shuffle(self.x)

    def __getitem__(self, i):
        rows = self.x[10 * i : 10 * i + 10]
        return [rows, -rows], rows * 2.0, None

class Global(Own):
    "Shuffles with numpy.random, and augments."

    def on_epoch_end(self):
        np.random.shuffle(self.x)

    def __getitem__(self, i):
        (rows, _), _, _ = super().__getitem__(i)
        self.rng.random(i)  # what is read must not matter for the next epoch
        return [rows, np.random.random(len(rows))]

class Lazy(Own):
    "Draws its order when the first item of an epoch is read, as ImageDataGenerator.flow() does."

    def __init__(self):
        super().__init__()
        self.order = None

    def on_epoch_end(self):
        self.order = None

    def __getitem__(self, i):
        if self.order is None:
            self.order = np.random.permutation(403)
        return self.order[10 * i : 10 * i + 10]

class Endless(keras.utils.PyDataset if hasattr(keras, "utils") else keras.PyDataset):
    num_batches = None

    def on_epoch_begin(self):
        self.offset = np.random.randint(1000)

    def __getitem__(self, i):
        return [np.array([i, i]), np.array([self.offset, np.random.randint(10**9)])]
'''
FEEDS = (
    DATASETS
    + """
from penstock_server import Feed

own = Feed(Own(), batch_size=None)
numbers = Feed(Global(), batch_size=None, shuffle=41)
lazy = Feed(Lazy(), batch_size=None)
shared = Global()
one = Feed(shared, batch_size=None)
other = Feed(shared, batch_size=None, seed=1)
endless = Feed(Endless(), batch_size=None)
"""
)
NAMES = ("own", "numbers", "lazy", "one", "other")


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tf: Any) -> Any:
    """Return the datasets above, over the real Keras."""
    (tmp_path / "datasets_of_keras.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("datasets_of_keras")
    del sys.modules["datasets_of_keras"]


def start(serve: Serve, tmp_path: Path, *feeds: str, **options: Any) -> Daemon:
    (tmp_path / "keras.py").write_text(KERAS)
    return serve(FEEDS, *feeds, env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}, **options)


def listed(batch: Any) -> Any:
    return tuple(map(listed, batch)) if isinstance(batch, tuple) else batch.tolist()


def read(connection: Any, epochs: int) -> list[list[Any]]:
    return [[listed(batch) for batch in connection.batches()] for _ in range(epochs)]


def wait_for_workers(daemon: Daemon, count: int) -> None:
    """Wait until there are `count` workers, all of them ready."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = control.status(daemon.urls["plain"], 60).workers
        if len(found) == count and all(worker.ready for worker in found):
            return
        time.sleep(0.05)
    raise AssertionError(f"there are not {count} workers: {found}")


def test_batches_are_those_of_keras_own_iterator_in_every_epoch(datasets: Any, serve: Serve, tmp_path: Path) -> None:
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    with pytest.warns(UserWarning, match="super"):  # its __init__ skips super()
        adapter = PyDatasetAdapter(datasets.Own(), shuffle=False)
    expected = []
    for _ in range(3):
        adapter.on_epoch_begin()
        expected.append([((x[0].tolist(), x[1].tolist()), y.tolist()) for x, y, _ in adapter.get_numpy_iterator()])
        adapter.on_epoch_end()
    assert expected[0] != expected[1] != expected[2]

    daemon = start(serve, tmp_path, "own", workers=3)
    for transport in ("local", "tcp"):
        with penstock.connect(daemon.url, transport=transport) as connection:
            assert read(connection, 3) == expected


def test_epochs_are_the_same_with_1_and_3_workers_through_a_kill_and_after_a_resume(
    serve: Serve, tmp_path: Path
) -> None:
    alone = start(serve, tmp_path, *NAMES, workers=1)
    expected = {}
    for name in NAMES:
        with penstock.connect(alone.urls[name]) as connection:
            expected[name] = read(connection, 3)
        rows = [[batch if name == "lazy" else batch[0] for batch in epoch] for epoch in expected[name]]
        for epoch in rows:
            if name == "own":
                epoch = [batch[0] for batch in epoch]
            assert sorted(row for batch in epoch for row in batch) == list(range(403)), name
        assert rows[0] != rows[1] != rows[2]
    assert expected["one"] != expected["other"]
    assert alone.stop() == 0

    daemon = start(serve, tmp_path, *NAMES, workers=3)
    states = {}
    for name in NAMES:
        with penstock.connect(daemon.urls[name]) as connection:
            first = connection.batches()
            begun = [listed(next(first)) for _ in range(7)]
            daemon.workers()[0].kill()
            assert begun + [listed(batch) for batch in first] == expected[name][0], name
            second = connection.batches()
            assert [listed(next(second)) for _ in range(9)] == expected[name][1][:9], name
            states[name] = connection.state_dict()
    assert daemon.stop() == 0

    again = start(serve, tmp_path, *NAMES, workers=2)
    for name, state in states.items():
        with penstock.connect(again.urls[name], state=state) as connection:
            rest, third = read(connection, 2)
            assert rest == expected[name][1][9:], name
            assert third == expected[name][2], name


def test_streams_in_different_epochs_share_workers(serve: Serve, tmp_path: Path) -> None:
    daemon = start(serve, tmp_path, "numbers", workers=2)
    with penstock.connect(daemon.url) as connection:
        expected = read(connection, 4)
    with penstock.connect(daemon.url) as ahead, penstock.connect(daemon.url) as behind:
        read(ahead, 3)
        pairs = zip(ahead.batches(), behind.batches(), strict=True)
        assert [(listed(a), listed(b)) for a, b in pairs] == list(zip(expected[3], expected[0], strict=True))


def test_a_dataset_without_a_number_of_batches_is_endless_and_in_order(serve: Serve, tmp_path: Path) -> None:
    found = []
    for workers in (1, 3):
        daemon = start(serve, tmp_path, "endless", workers=workers)
        with penstock.connect(daemon.url) as connection:
            epochs = []
            for _ in range(2):
                batches = connection.batches()
                epochs.append([listed(next(batches)) for _ in range(50)])
                batches.close()
            assert connection.info.endless
        found.append(epochs)
        assert daemon.stop() == 0
    assert found[0] == found[1]
    for epoch in found[0]:
        assert [numbers for numbers, _ in epoch] == [[i, i] for i in range(50)]
        assert len({offset for _, (offset, _) in epoch}) == 1
        assert len({drawn for _, (_, drawn) in epoch}) == 50
    assert found[0][0] != found[0][1]


@pytest.mark.usefixtures("tf")
def test_image_data_generator_serves_every_row_once_with_1_and_3_workers(serve: Serve) -> None:
    source = """
    import numpy as np
    from keras.src.legacy.preprocessing.image import ImageDataGenerator
    from penstock_server import Feed

    x, y = np.arange(300, dtype="float32").reshape(300, 1, 1, 1), np.arange(300)
    plain = Feed(ImageDataGenerator().flow(x, y, batch_size=8), batch_size=None)
    seeded = Feed(ImageDataGenerator(brightness_range=(0.5, 2)).flow(x, y, batch_size=8, seed=3), batch_size=None)
    """
    daemon = serve(source, "plain", "seeded", workers=3)
    streams = []
    for workers in (3, 1):
        if workers == 1:
            control.scale(daemon.urls["plain"], 1, now=True, timeout=60)
        wait_for_workers(daemon, workers)
        stream = []
        for url in daemon.urls.values():
            with penstock.connect(url) as connection:
                stream.append(read(connection, 2))
        streams.append(stream)
    assert streams[0] == streams[1]
    for epochs in streams[0]:
        orders = [[row for _, rows in epoch for row in rows] for epoch in epochs]
        assert [sorted(order) for order in orders] == [list(range(300))] * 2
        assert orders[0] != orders[1] != list(range(300))


def test_a_seeded_flow_augments_as_in_keras(tf: Any) -> None:
    from keras.src.legacy.preprocessing.image import ImageDataGenerator

    def flow() -> Any:
        x = np.random.default_rng(0).random((20, 4, 4, 1))
        return ImageDataGenerator(horizontal_flip=True, channel_shift_range=1.0).flow(x, batch_size=3, seed=7)

    own, items = flow(), KerasItems(flow(), seed=0)
    items.enter(0)
    expected = [own[i] for i in range(7)]
    for i in (6, 2, 4, 1, 3, 5):  # Keras draws the order of rows together with the augmentation of item 0
        (found,) = items.read([i])
        assert (found == expected[i]).all()


def test_a_batch_size_is_refused_and_a_missing_one_asked_for(datasets: Any) -> None:
    refused = r"Own is a Keras dataset.*batch_size must be None, got 32.*in the dataset.*transform=dataset.__getitem__"
    with pytest.raises(ValueError, match=refused):
        Feed(datasets.Own(), batch_size=32)
    with pytest.raises(
        TypeError, match="the items of Own, a Keras dataset, are whole batches, so give batch_size=None"
    ):
        Feed(datasets.Own())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="Endless is an endless Keras dataset: leave splits="):
        Feed(datasets.Endless(), batch_size=None, samples=10)


def test_what_on_epoch_end_raises_and_a_number_of_batches_that_it_changes_are_errors(datasets: Any) -> None:
    class Failing(datasets.Own):  # type: ignore[misc]
        def on_epoch_end(self) -> None:
            raise OSError("the disk is away")

    class Shrinking(datasets.Own):  # type: ignore[misc]
        size = 5

        def on_epoch_end(self) -> None:
            self.size = 4

        def __len__(self) -> int:
            return self.size

    items = KerasItems(Failing(), seed=0)
    items.enter(0)
    for _ in range(2):
        with pytest.raises(GeneratorError, match=r"on_epoch_end\(\) of epoch 0 raised OSError: the disk is away"):
            items.enter(1)
    items.enter(0)
    with pytest.raises(FeedError, match=r"has 4 batches in epoch 1, and had 5 .* give Feed\(fixed_length=False\)"):
        KerasItems(Shrinking(), seed=0).enter(1)


GROWING = """
import keras
import numpy as np
from penstock_server import Feed

class Growing(keras.PyDataset):
    def __init__(self):
        super().__init__()
        self.known = [0, 1]

    @property
    def num_batches(self):
        return len(self.known)

    def on_epoch_end(self):
        self.known = [10 * number for number in self.known] + [len(self.known)]
        self.known = [] if len(self.known) > 6 else self.known

    def __getitem__(self, index):
        return np.full(2, self.known[index]), np.zeros(2)

feed = Feed(Growing(), batch_size=None, fixed_length=False)
shuffled = Feed(Growing(), batch_size=None, fixed_length=False, shuffle=100)
"""


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "keras.py").write_text(KERAS)
    (tmp_path / "growing.py").write_text(GROWING)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] in ("keras", "growing")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "growing.py"


def epoch_of(connection: penstock.Connection) -> list[int]:
    return [int(x[0]) for x, _ in connection.batches()]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_dataset_may_have_another_length_in_each_epoch(growing: Path, workers: int) -> None:
    expected = [[0, 1], [0, 10, 2], [0, 100, 20, 3], [0, 1000, 200, 30, 4], [0, 10000, 2000, 300, 40, 5]]
    with penstock.connect(f"{growing}:feed", workers=workers) as connection:
        assert connection.cardinality is None
        assert [epoch_of(connection) for _ in range(2)] == expected[:2]
        batches = connection.batches()
        began = [int(next(batches)[0][0]) for _ in range(3)]
        state = connection.state_dict()
    with penstock.connect(f"{growing}:feed", workers=2, state=state) as connection:
        assert began + epoch_of(connection) == expected[2]
        assert [epoch_of(connection) for _ in range(2)] == expected[3:]
        with pytest.raises(FeedError, match="has 0 batches in epoch 5"):
            epoch_of(connection)
    with penstock.connect(f"{growing}:shuffled", workers=workers) as connection:
        assert [sorted(epoch_of(connection)) for _ in range(3)] == [sorted(one) for one in expected[:3]]


def test_only_keras_datasets_ask_for_their_length_in_each_epoch(datasets: Any) -> None:
    with pytest.raises(ValueError, match="fixed_length=False is for Keras datasets"):
        Feed([1, 2, 3], batch_size=1, fixed_length=False)
    with pytest.raises(ValueError, match="leave out samples="):
        Feed(datasets.Own(), batch_size=None, fixed_length=False, samples=41)


@pytest.mark.parametrize("in_place", [True, False], ids=["shuffled in place", "only indexed"])
def test_a_large_array_is_shared_by_epochs_unless_it_is_changed(datasets: Any, in_place: bool) -> None:
    class Large(datasets.Own):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.data = np.arange(object_states.LARGE)
            self.view = self.data[::-1]
            self.calls = 0

        def on_epoch_end(self) -> None:
            self.calls += 1
            if in_place:
                np.random.shuffle(self.data)
            super().on_epoch_end()

    dataset = Large()
    data, items = dataset.data, KerasItems(dataset, seed=0)
    found = []
    for epoch in (0, 1, 2, 1, 0):
        items.enter(epoch)
        assert dataset.data.flags.writeable
        assert dataset.view.flags.writeable
        assert dataset.calls == epoch
        assert (dataset.data is data) == (epoch == 0 or not in_place)
        found.append((dataset.data.tolist(), dataset.x.tolist()))
    assert found[1] == found[3]
    assert found[0] == found[4]
    assert (found[1][0] != found[2][0]) == in_place
    assert found[1][1] != found[2][1]


def test_a_dataset_without_targets_may_say_so_with_an_empty_list(datasets: Any) -> None:
    class Untargeted(datasets.Own):  # type: ignore[misc]
        def __getitem__(self, i: int) -> Any:
            return np.zeros((10, 2)), []

    items = KerasItems(Untargeted(), seed=0)
    items.enter(0)
    (found,) = items.read([1])
    assert infer(found) == TupleSpec((Leaf("float64", (10, 2)), TupleSpec(())))


def test_lists_are_structures_at_the_top_and_wherever_they_hold_arrays() -> None:
    a = np.zeros(3)
    assert as_structure([a, a]) == (a, a) or isinstance(as_structure([a, a]), tuple)
    assert isinstance(as_structure(([a, {"b": [a]}], [1, 2]))[0], tuple)
    assert isinstance(as_structure(([a, {"b": [a]}], [1, 2]))[0][1]["b"], tuple)
    assert as_structure(([1, 2], [[1], [2]])) == ([1, 2], [[1], [2]])
    assert as_structure([1.5, 2]) == (1.5, 2)
    assert as_structure([a, []]) == (a, [])  # a sample's list of no numbers
    assert as_structure([a, [], {"b": []}], batch=True) == (a, (), {"b": ()})


def test_a_state_is_copied_but_for_what_cannot_be_or_is_large() -> None:
    class Object:
        pass

    owner = Object()
    large, fixed, small = np.zeros(object_states.LARGE, "u1"), np.arange(3), np.arange(3)
    fixed.flags.writeable = False
    state: dict[str, Any] = {"large": large, "fixed": fixed, "nested": {"small": [small]}, "me": owner}
    state["stream"] = (i for i in range(3))
    state["lock"] = threading.Lock()
    for share_large in (True, False):
        copy, shared = object_states.copied(state, owner, share_large=share_large)
        assert [id(array) for array in shared] == [id(large)] * share_large
        assert copy["me"] is owner
        assert copy["fixed"] is fixed
        assert copy["stream"] is state["stream"]
        assert copy["lock"] is state["lock"]
        assert (copy["large"] is large) == share_large
        copy["nested"]["small"][0][0] = 9
        assert small.tolist() == [0, 1, 2]
        copy["large"][0] += not share_large
        object_states.share_equal(copy, state)
        assert (copy["large"] is large) == share_large
        copy["large"][0] = 0
        object_states.share_equal(copy, state)
        assert copy["large"] is large


def test_the_example_trains(start_trainer: StartTrainer) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "keras_dataset.py"
    trainer = start_trainer("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(example))
    said, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, errors
    assert "accuracy 0.9" in said
