"""Text, padded and ragged batches arrive as they were yielded, on every path, whatever happens."""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Ragged
from penstock_proto import Leaf, SpecError
from penstock_proto.batches import layout
from penstock_proto.batches.columns import Columns
from penstock_proto.spec import DictSpec, TupleSpec
from penstock_server import Feed, Pad
from penstock_server.worker.batch import variable_rows
from penstock_server.worker.batch.buckets import bucketed
from penstock_server.worker.batch.collate import BadSample
from penstock_server.worker.batch.variable_rows import VariableRows
from tests.conftest import Daemon, Serve, StartTrainer, kill

FEEDS = """
    import numpy as np
    from penstock_server import Feed, Leaf, Pad

    SIZES = [7, 0, 31, 1, 16, 40, 5, 12, 3, 9]

    def rows(split, rng):
        for i in range(SIZES[split]):
            n = int(rng.integers(0, 13))
            yield {
                "tokens": rng.integers(1, 1000, n).astype("int32"),
                "frames": np.full((n // 2, 3), i, "float32"),
                "text": f"split {split}, sample {i}: \\0\\u00e9\\0" * (n % 3),
                "pair": [f"a{i}", b"b\\xff" * i],
                "label": 1000 * split + i,
                "image": np.full((2, 2), i, "uint8"),
                "shapes": [np.full((k, 2), k, "float32") for k in range(n % 4)],
                "turns": [[f"{k}{j}" for j in range(k)] for k in range(n % 3)],
                "words": [f"word {k}" for k in range(n % 5)],
            }

    SPEC = {
        "shapes": Leaf(np.float32, (None, None, 2), ragged=True), "turns": Leaf(str, (None, None), ragged=True),
        "words": Leaf(str, (None,), ragged=True),
        "tokens": Leaf(np.int32, (None,)), "frames": Leaf(np.float32, (None, 3)), "text": Leaf(str, ()),
        "pair": Leaf(bytes, 2), "label": Leaf(np.int64, ()), "image": Leaf(np.uint8, (2, 2)),
    }
    MIXED = {**SPEC, "frames": Leaf(np.float32, (None, 3), ragged=True)}
    SPLITS = list(range(len(SIZES)))
    PADS = {
        "tokens": -1, "frames": 0.5, "text": 0, "pair": 0, "label": 0, "image": 0, "shapes": 0, "turns": 0, "words": 0,
    }

    padded = Feed(rows, splits=SPLITS, batch_size=8, lanes=5, spec=SPEC, batching=Pad(value=PADS))
    ragged = Feed(rows, splits=SPLITS, batch_size=8, lanes=5, spec=SPEC, batching="ragged")
    mixed = Feed(rows, splits=SPLITS, batch_size=7, lanes=3, spec=MIXED, batching="pad", shuffle=40, seed=4)
    buckets = Feed(
        rows, splits=SPLITS, batch_size=4, lanes=2, spec=SPEC, batching=Pad(buckets=[3, 6, 12]), shuffle=64
    )
    dropping = Feed(
        rows, splits=SPLITS, batch_size=4, lanes=2, spec=SPEC, shuffle=64,
        batching=Pad(buckets=[3, 6], too_long="drop"),
    )
    cutting = Feed(
        rows, splits=SPLITS, batch_size=4, lanes=2, spec=SPEC, shuffle=64,
        batching=Pad(buckets=[3, 6], too_long="cut"),
    )

    def longer(sample, rng):
        return {**sample, "tokens": np.repeat(sample["tokens"], int(rng.integers(0, 3)))}

    transformed = Feed(
        rows, splits=SPLITS, batch_size=4, lanes=2, spec=SPEC, shuffle=24, transform=longer,
        batching=Pad(buckets=[3, 6], too_long="drop"),
    )
    undivided = Feed(
        lambda: (sample for split in SPLITS for sample in rows(split, np.random.default_rng(split))),
        batch_size=4, lanes=3, spec=SPEC, batching="ragged", transform=longer,
    )

    class Table:
        def __len__(self):
            return 45
        def __getitem__(self, i):
            return np.arange(i % 7), f"item {i}"

    table = Feed(Table(), batch_size=8, batching="ragged", shuffle=1)

    def batches(split):
        for i in range(SIZES[split] // 3):
            yield np.array([[f"{split}.{i}.{row}", "é"] for row in range(i + 1)]), np.arange(i + 1)

    ready = Feed(batches, splits=SPLITS, batch_size=None, lanes=3)
"""
SIZES = [7, 0, 31, 1, 16, 40, 5, 12, 3, 9]
NAMES = "padded ragged mixed buckets dropping cutting transformed undivided table ready".split()


def leaves(batch: Any) -> list[Any]:
    return [batch[key] for key in sorted(batch)] if isinstance(batch, dict) else list(batch)


def bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, Ragged):
        return bytes_of(leaf.flat_values) + b"".join(splits.tobytes() for splits in leaf.nested_row_splits)
    if leaf.dtype == object:
        return repr((leaf.shape, leaf.tolist())).encode()
    return f"{leaf.dtype}{leaf.shape}".encode() + bytes(leaf.tobytes())


class Chain:
    """SHA-256 over all batches that were added."""

    def __init__(self) -> None:
        self.batches = 0
        self._digest = hashlib.sha256()

    def add(self, batch: Any) -> None:
        self.batches += 1
        for leaf in leaves(batch):
            self._digest.update(bytes_of(leaf))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and (self.batches, self.digest) == (other.batches, other.digest)

    __hash__ = None  # type: ignore[assignment]

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


def read(url: str, transport: str, epochs: int = 2, **options: Any) -> Chain:
    chain = Chain()
    with penstock.connect(url, transport=transport, **options) as connection:
        for _ in range(epochs):
            for batch in connection.batches():
                chain.add(batch)
    return chain


def sample(split: int, i: int, draw: np.random.Generator) -> dict[str, Any]:
    n = int(draw.integers(0, 13))
    return {
        "tokens": draw.integers(1, 1000, n).astype("int32"),
        "frames": np.full((n // 2, 3), i, "float32"),
        "text": (f"split {split}, sample {i}: \0é\0" * (n % 3)).encode(),
        "pair": [f"a{i}".encode(), b"b\xff" * i],
        "label": 1000 * split + i,
        "image": np.full((2, 2), i, "uint8"),
        "shapes": [[[float(k)] * 2] * k for k in range(n % 4)],
        "turns": [[f"{k}{j}".encode() for j in range(k)] for k in range(n % 3)],
        "words": [f"word {k}".encode() for k in range(n % 5)],
    }


def rows_of(batch: dict[str, Any], pads: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of a batch by its label, without padding. Check that only padding is taken off."""
    for row, label in enumerate(batch["label"].tolist()):
        found = {}
        for key, leaf in batch.items():
            value = leaf[row]
            if key in ("tokens", "frames") and not isinstance(leaf, Ragged):
                stop = len(value)
                while stop and (value[stop - 1] == pads.get(key, 0)).all():
                    stop -= 1
                value = value[:stop]
            found[key] = value.tolist() if key in ("shapes", "turns", "words") else value
        yield label, found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and one.dtype != object:
        return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
    return bool(list(one) == list(other)) if isinstance(one, np.ndarray) else bool(one == other)


@pytest.fixture
def samples() -> Callable[[dict[int, dict[str, Any]]], None]:
    """Checks rows by their labels against what the generator yields in epoch 0 of seed 0."""
    from penstock_server.worker.isolation.randomness import generator

    wanted = {}
    for split, size in enumerate(SIZES):
        draw = generator(0, 0, split)
        for i in range(size):
            wanted[1000 * split + i] = sample(split, i, draw)

    def check(got: dict[int, dict[str, Any]]) -> None:
        assert got.keys() == wanted.keys()
        for label, row in got.items():
            for key, value in wanted[label].items():
                assert same(row[key], np.asarray(value) if key in ("label",) else value), (label, key, row[key], value)

    return check


# --- through real workers ---


def test_the_stream_is_the_same_in_this_process_and_with_1_and_3_workers_over_shared_memory_and_tcp(
    serve: Serve,
) -> None:
    streams: dict[str, list[Chain]] = {name: [] for name in NAMES}
    for workers in (1, 3):
        daemon = serve(FEEDS, *NAMES, workers=workers)
        for name in NAMES:
            for transport in ("local", "tcp"):
                streams[name].append(read(daemon.urls[name], transport))
        assert daemon.stop() == 0
    for name, chains in streams.items():
        chains.append(read(f"{daemon.folder / 'feeds.py'}:{name}", "auto", workers=0))
        assert all(chain == chains[0] for chain in chains), name
        assert chains[0].batches > 4


def test_every_sample_arrives_as_it_was_yielded(serve: Serve, samples: Callable[..., None]) -> None:
    daemon = serve(FEEDS, "padded", "ragged", workers=2)
    for name in ("padded", "ragged"):
        got: dict[int, dict[str, Any]] = {}
        sizes = []
        with penstock.connect(daemon.urls[name]) as connection:
            for batch in connection.batches():
                sizes.append(len(batch["label"]))
                got.update(rows_of(batch, {"tokens": -1, "frames": 0.5}))
                if name == "padded":
                    longest = max(len(row["tokens"]) for _, row in rows_of(batch, {"tokens": -1, "frames": 0.5}))
                    assert batch["tokens"].shape == (sizes[-1], longest)
        samples(got)
        assert sizes == [8] * (sum(SIZES) // 8) + [sum(SIZES) % 8]


def test_buckets_bring_samples_of_similar_length_together_and_fill_up_to_their_borders(serve: Serve) -> None:
    daemon = serve(FEEDS, "buckets", "dropping", "cutting", workers=2)
    with penstock.connect(daemon.urls["buckets"]) as connection:
        lengths, labels = [], []
        for batch in connection.batches():
            lengths.append(batch["tokens"].shape[1])
            labels += batch["label"].tolist()
            shortest = min(len(row["tokens"]) for _, row in rows_of(batch, {}))
            assert batch["frames"].shape[1] in (3, 6)
            if lengths[-1] == 6 and len(lengths) < 8:
                assert shortest > 3  # except leftovers of the buckets at the end of a block
    assert set(lengths) == {3, 6, 12}
    assert sorted(labels) == sorted(1000 * split + i for split, size in enumerate(SIZES) for i in range(size))
    seen = {}
    for name in ("dropping", "cutting"):
        with penstock.connect(daemon.urls[name]) as connection:
            batches = list(connection.batches())
        assert {batch["tokens"].shape[1] for batch in batches} == {3, 6}
        seen[name] = sum(len(batch["label"]) for batch in batches)
        assert [len(batch["label"]) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    assert seen["dropping"] < seen["cutting"] == sum(SIZES)


@pytest.mark.parametrize("name", ["ragged", "mixed", "dropping", "transformed", "undivided", "ready"])
def test_a_stream_goes_on_the_same_through_kills_and_a_state(serve: Serve, name: str) -> None:
    quiet = serve(FEEDS, name, workers=1)
    wanted = read(quiet.url, "local")
    assert quiet.stop() == 0
    daemon = serve(FEEDS, name, workers=2)
    chain = Chain()
    state: dict[str, Any] | None = None
    at = 0
    while at < wanted.batches:
        with penstock.connect(daemon.url, state=state) as connection:
            for _ in range(2):
                for batch in connection.batches():
                    chain.add(batch)
                    at += 1
                    if at % 5 == 2:
                        _kill_a_worker(daemon)
                    if at % 7 == 3 or at == wanted.batches:
                        break
                if at % 7 == 3 or at == wanted.batches:
                    break
            state = connection.state_dict()
    assert chain == wanted


def _kill_a_worker(daemon: Daemon) -> None:
    kill(daemon.workers()[:1])


def test_ranks_that_are_padded_get_copies_of_ragged_batches(serve: Serve) -> None:
    daemon = serve(FEEDS, "ragged", workers=2)

    def read_rank(rank: int) -> list[Any]:
        with penstock.connect(daemon.url, rank=rank, world_size=3, last_round="pad") as connection:
            return [[bytes_of(leaf) for leaf in leaves(batch)] for batch in connection.batches()]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(read_rank, range(3)))
    with penstock.connect(daemon.url) as connection:
        wanted = [[bytes_of(leaf) for leaf in leaves(batch)] for batch in connection.batches()]
    assert len(wanted) % 3 == 1  # so the last round has one batch, and two copies of it
    assert [batch for round_ in zip(*ranks, strict=True) for batch in round_] == [*wanted, wanted[-1], wanted[-1]]


# --- in TensorFlow ---


def test_text_padded_and_ragged_batches_arrive_as_tensors(serve: Serve, tf: Any) -> None:
    daemon = serve(FEEDS, "padded", "ragged", "ready", workers=2)
    for name in ("padded", "ragged"):
        with penstock.connect(daemon.urls[name]) as connection:
            dataset = connection.dataset()
            spec = dataset.element_spec
            assert spec["shapes"] == tf.RaggedTensorSpec([None, None, None, 2], tf.float32, 2, tf.int64)
            assert spec["turns"] == tf.RaggedTensorSpec([None, None, None], tf.string, 2, tf.int64)
            assert spec["words"] == tf.RaggedTensorSpec([None, None], tf.string, 1, tf.int64)
            assert spec["text"] == tf.TensorSpec([None], tf.string)
            assert spec["pair"] == tf.TensorSpec([None, 2], tf.string)
            kind = tf.RaggedTensorSpec if name == "ragged" else tf.TensorSpec
            assert isinstance(spec["tokens"], kind)
            assert isinstance(spec["frames"], kind)
            from_tf = [tf.nest.map_structure(lambda leaf: leaf, batch) for batch in dataset]
        with penstock.connect(daemon.urls[name]) as connection:
            from_numpy = list(connection.batches())
        assert len(from_tf) == len(from_numpy)
        for one, other in zip(from_tf, from_numpy, strict=True):
            for key, leaf in other.items():
                if isinstance(leaf, Ragged):
                    assert one[key].flat_values.numpy().tolist() == leaf.flat_values.tolist()
                    splits = [array.numpy().tolist() for array in one[key].nested_row_splits]
                    assert splits == [array.tolist() for array in leaf.nested_row_splits]
                    inner = list(leaf.flat_values.shape[1:])
                    assert one[key].shape.as_list()[1:] == [None] * len(splits) + inner
                else:
                    assert one[key].numpy().tolist() == leaf.tolist()
    with penstock.connect(daemon.urls["ready"]) as connection:
        text, numbers = next(iter(connection.dataset()))
        assert text.numpy().tolist() == [[b"0.0.0", "é".encode()]]
        assert numbers.numpy().tolist() == [0]
    with penstock.connect(daemon.urls["ready"]) as connection:
        rows = sum(len(numbers) for _, numbers in connection.batches())
        assert connection.stats()["rows"] == rows


def test_keras_trains_on_text_and_ragged_rows_with_two_inputs_and_two_outputs(serve: Serve, tf: Any) -> None:
    daemon = serve(
        """
        import numpy as np
        from penstock_server import Feed, Leaf

        def reviews(split, rng):
            for i in range(40):
                good = int(rng.integers(2))
                words = ["good" if good else "bad"] * int(rng.integers(1, 5))
                yield (
                    {"image": rng.random((4, 4, 1), np.float32), "tokens": np.full(len(words), good + 1, "int32"),
                     "text": " ".join(words)},
                    {"sentiment": np.float32(good), "length": np.float32(len(words))},
                )

        feed = Feed(reviews, splits=range(4), batch_size=16, batching="ragged", samples=160)
        """,
        workers=2,
    )
    keras = tf.keras
    image = keras.Input((4, 4, 1), name="image")
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    words = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(3, 4, mask_zero=True)(tokens))
    both = keras.layers.Concatenate()([keras.layers.Flatten()(image), words])
    outputs = {name: keras.layers.Dense(1, name=name)(both) for name in ("sentiment", "length")}
    model = keras.Model({"image": image, "tokens": tokens}, outputs)
    model.compile("adam", loss="mse")
    with penstock.connect(daemon.url) as connection:
        dataset = connection.dataset().map(lambda x, y: ({"image": x["image"], "tokens": x["tokens"].to_tensor()}, y))
        history = model.fit(dataset, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


def test_the_example_trains(start_trainer: StartTrainer) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "text" / "train.py"
    trainer = start_trainer("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(example))
    said, errors = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, errors
    assert "accuracy" in said


# --- the pieces alone ---


SPEC = DictSpec(
    ("dense", "pad", "ragged", "text"),
    (Leaf("int16", (2,)), Leaf("float32", (None, None)), Leaf("int64", (None, 2), ragged=True), Leaf("string", (2,))),
)
LISTS = DictSpec.of(
    {
        "pad": Leaf("float32", (None, None)),
        "numbers": Leaf("int8", (None, None, None, 2), ragged=True),
        "text": Leaf("string", (None, None), ragged=True),
        "words": Leaf("string", (None,), ragged=True),
    }
)


def random_lists(draw: np.random.Generator) -> dict[str, Any]:
    n, k = draw.integers(0, 4, 2).tolist()
    return {
        "pad": [list(range(i)) for i in range(n)],
        "numbers": [[np.full((j, 2), n + j, "int8") for j in range(i)] for i in range(k)],
        "text": [["x" * j for j in range(i)] for i in range(n)],
        "words": [f"word {i}" for i in range(k)],
    }


def random_sample(draw: np.random.Generator) -> dict[str, Any]:
    n, k = draw.integers(0, 5, 2).tolist()
    return {
        "dense": draw.integers(0, 9, 2).astype("int16"),
        "pad": draw.random((n, k), np.float32),
        "ragged": draw.integers(0, 9, (k, 2)),
        "text": [b"x" * n, "é" * k],
    }


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("spec", "random"), [(SPEC, random_sample), (LISTS, random_lists)])
def test_rows_that_are_written_in_parts_give_the_batch_that_is_written_at_once(
    spec: DictSpec, random: Callable[[np.random.Generator], dict[str, Any]], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    columns = Columns(spec, 16)
    collate = VariableRows(spec, columns, pad_value=7)
    count = int(draw.integers(1, 12))
    store = collate.store(count)
    assert collate.fill(store, 0, count, iter([random(draw) for _ in range(count)])) == count
    shapes = collate.shapes(store, count)
    whole = layout.lay_out(columns.dtypes, shapes).leaves(np.zeros(1 << 16, np.uint8))
    collate.write(store, count, [leaf[0, ...] for leaf in whole])

    cuts = [0, *sorted(draw.integers(0, count + 1, 3).tolist()), count]
    parts = list(itertools.pairwise(cuts))
    sizes = [collate.sizes(store, start, stop - start) for start, stop in parts]
    assert all(columns.fit(size) for size in sizes)
    assert columns.shapes(count, columns.joined(sizes)) == shapes
    merged = layout.lay_out(columns.dtypes, shapes).leaves(np.full(1 << 16, 99, np.uint8))
    for at in draw.permutation(len(parts)).tolist():
        start, stop = parts[at]
        before = columns.joined(sizes[:at])
        collate.write_rows(store, start, stop - start, [leaf[0, ...] for leaf in merged], start, before)
    for one, other in zip(whole, merged, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("spec", "random"), [(SPEC, random_sample), (LISTS, random_lists)])
def test_workers_may_write_their_rows_of_a_batch_at_the_same_time(
    spec: DictSpec, random: Callable[[np.random.Generator], dict[str, Any]], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    columns = Columns(spec, 16)
    collate = VariableRows(spec, columns, pad_value=7)
    store = collate.store(9)
    assert collate.fill(store, 0, 9, iter([random(draw) for _ in range(9)])) == 9
    shapes = collate.shapes(store, 9)
    whole = layout.lay_out(columns.dtypes, shapes).leaves(np.zeros(1 << 16, np.uint8))
    collate.write(store, 9, [leaf[0, ...] for leaf in whole])
    sizes = [collate.sizes(store, start, 3) for start in (0, 3, 6)]
    tracing, lines, slot = sys.gettrace(), 0, np.zeros(1 << 16, np.uint8)

    def write(part: int) -> None:
        before, arrays = columns.joined(sizes[:part]), layout.lay_out(columns.dtypes, shapes).leaves(slot)
        collate.write_rows(store, 3 * part, 3, [leaf[0, ...] for leaf in arrays], 3 * part, before)

    def meanwhile(frame: Any, event: str, arg: Any) -> Any:
        """Let two workers write their rows before line number `until` that the worker of the middle rows executes."""
        nonlocal lines
        if frame.f_code.co_filename != variable_rows.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == until:
                sys.settrace(None)
                write(0)
                write(2)
                sys.settrace(meanwhile)
        return meanwhile

    for until in itertools.count(1):
        lines = 0
        slot[:] = 99
        sys.settrace(meanwhile)
        try:
            write(1)
        finally:
            sys.settrace(tracing)
        if lines < until:
            break
        for one, other in zip(whole, layout.lay_out(columns.dtypes, shapes).leaves(slot), strict=True):
            assert one.tobytes() == other.tobytes(), f"interrupted at line {until}"
    assert until > 20


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 64, 61])
def test_buckets_only_reorder_a_block(rows: int) -> None:
    draw = np.random.default_rng(rows)
    order = draw.permutation(rows)
    bucket_of = draw.integers(0, 4, rows)
    found = bucketed(order, bucket_of, 8)
    assert sorted(found.tolist()) == list(range(rows))
    mixed = sum(len(set(bucket_of[found[at : at + 8]].tolist())) > 1 for at in range(0, rows, 8))
    assert mixed <= 4  # less than a batch of each bucket is left over
    for bucket in range(4):
        of_it = [row for row in order.tolist() if bucket_of[row] == bucket]
        assert [row for row in found.tolist() if bucket_of[row] == bucket] == of_it


LISTED = Leaf("int32", (None, None, None), ragged=True)


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        (Leaf("string", ()), 3, r"sample\['x'\] is 3, but the feed's spec has string\[\] there: yield str or bytes"),
        (Leaf("string", ()), np.array(5), r"sample\['x'\] is .*feed's spec has string\[\] there: yield str or bytes"),
        (Leaf("string", ()), np.array(None), r"feed's spec has string\[\] there: yield str or bytes"),
        (
            Leaf("string", (2,)),
            ["a"],
            r"has text of shape \(1,\).*the same number of strings.*\(None,\), ragged=True\)",
        ),
        (Leaf("int32", (None,)), np.zeros(2), r"float64 array of shape \(2,\).*astype\('int32'\)"),
        (Leaf("int32", (None, 2)), np.zeros((2, 3), "int32"), r"if samples differ in shape"),
        (Leaf("int32", (None,)), np.zeros(9, "int32"), r"has length 9, and the last of buckets is 8.*too_long"),
        (LISTED, [[1], 5], r"sample\['x'\]\[1\] is 5, but .* at sample\['x'\]: yield a list of lists, or of arrays"),
        (LISTED, [[[1], [2, 3]], [[4], [0.5]]], r"sample\['x'\]\[1\]\[1\] is \[0.5\], but the feed's spec has int32"),
        (LISTED, [[[1]], [["a"]]], r"sample\['x'\]\[1\]\[0\] is"),
        (LISTED, ([[1]],), r"sample\['x'\] is \(.*every sample of a feed needs the same structure"),
        (LISTED, np.zeros((2, 2), "int32"), r"same number of dimensions in every sample, here 3"),
        (Leaf("string", (None,), ragged=True), "one", r"has text of shape \(\).*yield a list of strings"),
        (Leaf("string", (None, None), ragged=True), ["a"], r"sample\['x'\]\[0\] has text of shape \(\)"),
        (Leaf("string", (None, None), ragged=True), (["a"], []), r"sample\['x'\] is \(.*yield a list of lists"),
        (Leaf("int32", (3, None)), [[1], [2, 3]], r"of shape \(2, 2\), but the feed's spec has int32\[3, None\]"),
        (
            Leaf("int32", (None, None)),
            [[1], [2.5, 3]],
            r"sample\['x'\]\[1\] is \[2.5, 3\], but the feed's spec has int32",
        ),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_with_its_leaf_and_the_fix(leaf: Leaf, value: Any, message: str) -> None:
    spec = DictSpec(("x",), (leaf,))
    collate = VariableRows(spec, Columns(spec, 4, (4, 8)))
    with pytest.raises(BadSample, match=message):
        collate.fill(collate.store(1), 0, 1, iter([{"x": value}]))


@pytest.mark.parametrize("options", [{"ragged": True}, {}])
@pytest.mark.parametrize(
    "value",
    [
        [[1, 2], [], [3]],
        [(1, 2), (), (3,)],
        [np.array([1, 2], "int32"), [], np.array([3], "int32")],
        np.array([[1, 2], [], [3]], object),
        [np.array([1, 2], "int32"), np.zeros(0, "int32"), [3]],
    ],
)
def test_lists_of_lists_may_be_given_in_any_form(value: Any, options: dict[str, Any]) -> None:
    spec = Leaf("int32", (None, None), **options)
    columns = Columns(spec, 4)
    collate = VariableRows(spec, columns, pad_value=-1)
    store = collate.store(3)
    collate.fill(store, 0, 3, iter([value, [], np.array([[4, 5]], "int32")]))
    arrays = [leaf[0] for leaf in layout.lay_out(columns.dtypes, collate.shapes(store, 3)).leaves(np.zeros(999, "u1"))]
    collate.write(store, 3, arrays)
    if options:
        assert [array.tolist() for array in arrays] == [[1, 2, 3, 4, 5], [0, 3, 3, 4], [0, 2, 2, 3, 5]]
    else:
        none = [-1, -1]
        assert arrays[0].tolist() == [[[1, 2], none, [3, -1]], [none, none, none], [[4, 5], none, none]]


def test_the_first_sample_may_be_an_array_of_lists_or_of_arrays() -> None:
    def rows(split: int) -> Iterator[Any]:
        for i in range(5):
            lists = np.empty(2, object)
            lists[:] = [np.arange(1 + i % 3), [7]]
            yield {"x": lists}

    spec = {"x": Leaf("int64", (None, None))}
    feed = Feed(rows, splits=[0, 1], batch_size=10, batching="ragged", spec=spec, name="lists")
    with penstock.connect(feed, workers=0) as connection:
        (batch,) = connection.batches()
    assert batch["x"].tolist() == [[list(range(1 + i % 3)), [7]] for i in range(5)] * 2


def test_an_array_fits_a_leaf_that_is_ragged_in_several_dimensions() -> None:
    spec = Leaf("int8", (None, None, None), ragged=True)
    collate = VariableRows(spec, Columns(spec, 4))
    store = collate.store(1)
    collate.fill(store, 0, 1, iter([np.arange(12, dtype="int8").reshape(2, 3, 2)]))
    (row,) = store[0]
    assert row.lengths == ([2], [3, 3], [2] * 6)
    assert row.values.tolist() == list(range(12))


def test_lists_are_filled_up_in_each_dimension_that_varies() -> None:
    spec = Leaf("int8", (2, None, 1, None))
    collate = VariableRows(spec, Columns(spec, 4), pad_value=9)
    store = collate.store(1)
    collate.fill(store, 0, 1, iter([[[[[1]], [[2, 3]]], [[[4, 5, 6]]]]]))
    assert store[0][0].tolist() == [[[[1, 9, 9]], [[2, 3, 9]]], [[[4, 5, 6]], [[9, 9, 9]]]]


def test_an_empty_list_fits_a_leaf_whose_first_dimension_varies() -> None:
    spec = Leaf("float32", (None, 4), ragged=True)
    collate = VariableRows(spec, Columns(spec, 4))
    store = collate.store(1)
    collate.fill(store, 0, 1, iter([[]]))
    assert store[0][0].shape == (0, 4)


def test_rows_of_a_ragged_batch_are_ragged_over_the_same_memory() -> None:
    inner = Ragged(np.arange(7), np.array([0, 2, 2, 3, 7]))
    ragged = Ragged(inner, np.array([0, 1, 1, 4]))
    assert (len(ragged), ragged.dtype, ragged.lengths.tolist()) == (3, np.int64, [1, 0, 3])
    assert ragged.tolist() == [[[0, 1]], [], [[], [2], [3, 4, 5, 6]]]
    assert ragged.shape == (3, None, None)
    assert Ragged(np.zeros((7, 2)), np.array([0, 7])).shape == (1, None, 2)
    assert [len(row) for row in ragged] == [1, 0, 3]
    assert ragged[-1][2].base is inner.values
    assert ragged[2].nested_row_splits[0].tolist() == [0, 0, 1, 5]
    assert repr(ragged) == "<Ragged of 3 rows, int64 (7,) in all>"


def test_a_pad_value_has_to_fit() -> None:
    spec = TupleSpec((Leaf("uint8", (None,)), Leaf("float32", (None,))))
    columns = Columns(spec, 4)
    VariableRows(spec, columns, pad_value=(255, -1.5))
    with pytest.raises(SpecError, match=r"Pad\(value=-1\) does not fit sample\[0\], which is uint8\[None\]"):
        VariableRows(spec, columns, pad_value=-1)


def test_text_of_every_kind_is_kept_byte_for_byte() -> None:
    spec = Leaf("string", (2,))
    collate = VariableRows(spec, Columns(spec, 4))
    values: list[Any] = [
        [b"\0", ""],
        np.array([b"ab", b"c"]),
        np.array(["é", "x"]),
        np.array([b"a\0\0", "ü"], object),
        ["x" * 1_000_000, np.bytes_(b"n")],
    ]
    store = collate.store(5)
    collate.fill(store, 0, 5, iter(values))
    assert store[0] == [
        [b"\0", b""],
        [b"ab", b"c"],
        ["é".encode(), b"x"],
        [b"a\0\0", "ü".encode()],
        [b"x" * 1_000_000, b"n"],
    ]


def rows(split: int) -> Iterator[int]:
    yield split


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batching": "padded"}, r"batching must be 'stack', 'pad', 'ragged' or Pad\(...\), got 'padded'"),
        ({"batching": "pad", "batch_size": None}, "needs a batch_size="),
        ({"batching": Pad(buckets=[4])}, "in the shuffle block: give shuffle= too"),
        ({"batching": Pad(buckets=[4], too_long="drop"), "shuffle": 8, "samples": 9}, "samples= promises"),
        ({"batching": "ragged", "spec": Leaf("int64", (2, None))}, 'with batching="ragged", .* cannot be ragged'),
        ({"batching": "pad", "spec": Leaf(str, (None,))}, r"declare Leaf\(str, \(None,\), ragged=True\)"),
        ({"batch_size": None, "spec": Leaf(str, (None, None))}, "only the first dimension of a batch may vary"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_fix(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Feed(rows, **{"splits": [1], "batch_size": 2, **options})  # type: ignore[arg-type]
