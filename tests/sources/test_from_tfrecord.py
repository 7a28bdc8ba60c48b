"""`Feed.from_tfrecord`: the records of TFRecord files, as TensorFlow reads them."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server import Feed, FixedLen, FixedLenSequence, VarLen
from penstock_server.sources import registry
from penstock_server.sources.tfrecord import crc32c
from penstock_server.sources.tfrecord.example import example_class
from penstock_server.sources.tfrecord.reader import CorruptRecord
from tests.conftest import Serve
from tests.reference.one_stream import one_stream

IMAGE = FixedLen((4, 5), "bytes", decode="uint8")
FEATURES = {
    "image": IMAGE,
    "label": FixedLen((), "int64"),
    "weight": FixedLen((), "float32", default=1),
    "boxes": FixedLen((2, 2), "float32"),
    "ids": VarLen("int64", pad_to=6),
}


def example(tf: Any, number: int, **more: Any) -> bytes:
    """Return a serialized Example. Every third one has no weight."""

    def ints(*values: int) -> Any:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    def floats(*values: float) -> Any:
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    feature = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes([number % 256]) * 20])),
        "label": ints(number),
        "boxes": floats(number, 0.5, -1, 3e38),
        "ids": ints(*[number, -number, 2**62, -(2**63)][: number % 5]),
        "unused": ints(1),
        **more,
    }
    if number % 3:
        feature["weight"] = floats(number / 7)
    return bytes(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def write(tf: Any, path: Path, numbers: range, compression: str = "") -> Path:
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for number in numbers:
            writer.write(example(tf, number))
    return path


def from_tfrecord(files: Any, features: Any = None, **options: Any) -> Feed:
    return Feed.from_tfrecord(files, features or FEATURES, batch_size=4, **options)


def read(feed: Feed) -> list[Any]:
    return [sample for split in feed.splits() for sample in feed.generate(split)]  # type: ignore[operator]


def labels(feed: Feed) -> list[int]:
    return [int(sample["label"]) for sample in read(feed)]


@pytest.fixture(params=[True, False], ids=["google-crc32c", "numpy"])
def any_crc(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with both ways of computing the CRC."""
    if request.param:
        pytest.importorskip("google_crc32c")
    else:
        monkeypatch.setattr("penstock_server.sources.tfrecord.reader.crc32c", lambda: crc32c.in_numpy)


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.usefixtures("any_crc")
def test_values_are_those_of_parse_single_example(tf: Any, tmp_path: Path, compression: str) -> None:
    path = write(tf, tmp_path / "a.tfrecord", range(100), compression)
    theirs = {
        "image": tf.io.FixedLenFeature((), tf.string),
        "label": tf.io.FixedLenFeature((), tf.int64),
        "weight": tf.io.FixedLenFeature((), tf.float32, default_value=1),
        "boxes": tf.io.FixedLenFeature((2, 2), tf.float32),
        "ids": tf.io.VarLenFeature(tf.int64),
    }
    dataset = tf.data.TFRecordDataset(str(path), compression).map(lambda one: tf.io.parse_single_example(one, theirs))
    ours = read(from_tfrecord(path))
    assert len(ours) == 100
    for mine, expected in zip(ours, dataset, strict=True):
        expected["image"] = tf.reshape(tf.io.decode_raw(expected["image"], tf.uint8), (4, 5))
        ids = tf.sparse.to_dense(expected["ids"])
        expected["ids"] = tf.pad(ids, [[0, 6 - len(ids)]])
        for name in FEATURES:
            assert mine[name].dtype == expected[name].numpy().dtype, name
            np.testing.assert_array_equal(mine[name], expected[name].numpy(), name)


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(
    tf: Any, tmp_path: Path, serve: Serve
) -> None:
    for number in range(3):
        write(tf, tmp_path / f"{number}.tfrecord", range(number * 200, (number + 1) * 200), "GZIP" if number else "")
    source = """
        import os
        from penstock_server import Feed, FixedLen, VarLen
        features = {"image": FixedLen((4, 5), "bytes", decode="uint8"), "label": FixedLen((), "int64"),
                    "ids": VarLen("int64", pad_to=4)}
        feed = Feed.from_tfrecord(os.environ["DATA"] + "/*.tfrecord", features, split_bytes=5000, batch_size=32,
                                  shuffle=100, seed=3)
        """
    batches = one_stream(serve, source, tmp_path)
    assert sorted(np.concatenate([batch["label"] for batch in batches])) == list(range(600))


def test_text_and_values_of_any_number_arrive_as_tensorflow_has_them(tf: Any, tmp_path: Path, serve: Serve) -> None:
    path = write(tf, tmp_path / "a.tfrecord", range(40))
    daemon = serve(
        """
        import os
        from penstock_server import Feed, FixedLen, VarLen
        features = {"image": FixedLen((), "bytes"), "ids": VarLen("int64")}
        feed = Feed.from_tfrecord(os.environ["DATA"], features, batch_size=8, batching="ragged", lanes=1)
        """,
        env={"DATA": str(path)},
    )
    theirs = {"image": tf.io.FixedLenFeature((), tf.string), "ids": tf.io.RaggedFeature(tf.int64)}
    wanted = tf.data.TFRecordDataset(str(path)).batch(8).map(lambda records: tf.io.parse_example(records, theirs))
    with penstock.connect(daemon.url) as connection:
        for mine, other in zip(connection.dataset(), wanted, strict=True):
            assert mine["image"].numpy().tolist() == other["image"].numpy().tolist()
            assert mine["ids"].to_list() == other["ids"].to_list()


def test_large_files_are_divided_where_records_begin(tf: Any, tmp_path: Path) -> None:
    path = write(tf, tmp_path / "a.tfrecord", range(500))
    feed = from_tfrecord(path, split_bytes=5000)
    splits: Any = feed.splits()  # type: ignore[operator]
    assert len(splits) > 10
    assert [split.start for split in splits[1:]] == [split.stop for split in splits[:-1]]
    assert all(5000 <= split.stop - split.start < 5500 for split in splits[:-1])
    assert labels(feed) == list(range(500))
    assert splits == feed.splits(), "the source remembers the splits"  # type: ignore[operator]
    compressed = write(tf, tmp_path / "a.gz", range(500), "GZIP")
    assert len(from_tfrecord(compressed, split_bytes=50).splits()) == 1  # type: ignore[operator, arg-type]


def offsets(data: bytes) -> list[int]:
    """Return the offset of each record in a file."""
    found, offset = [], 0
    while offset < len(data):
        found.append(offset)
        offset += 16 + struct.unpack_from("<Q", data, offset)[0]
    return found


def damaged(path: Path, record: int, byte: int) -> int:
    """Change a byte of a record, and return the record's offset."""
    data = bytearray(path.read_bytes())
    offset = offsets(data)[record]
    data[offset + byte] ^= 64
    path.write_bytes(data)
    return offset


@pytest.mark.parametrize(("byte", "why"), [(30, "its data are corrupt"), (2, "its length is corrupt")])
def test_a_corrupt_record_is_an_error_with_file_and_offset(tf: Any, tmp_path: Path, byte: int, why: str) -> None:
    path = write(tf, tmp_path / "a.tfrecord", range(50))
    offset = damaged(path, 20, byte)
    for split_bytes in (None, 1000):
        with pytest.raises(CorruptRecord) as raised:
            read(from_tfrecord(path, split_bytes=split_bytes))
        assert f"a.tfrecord: record at byte {offset}: {why}" in str(raised.value)


@pytest.mark.parametrize("cut", [5, 100])
def test_a_truncated_file_is_an_error_with_file_and_offset(tf: Any, tmp_path: Path, cut: int) -> None:
    path = write(tf, tmp_path / "a.tfrecord", range(50))
    data = path.read_bytes()
    path.write_bytes(data[: offsets(data)[-1] + cut])
    with pytest.raises(CorruptRecord, match=f"byte {offsets(data)[-1]}: the file is truncated here"):
        read(from_tfrecord(path))


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_a_truncated_compressed_file_is_an_error(tf: Any, tmp_path: Path, compression: str) -> None:
    path = write(tf, tmp_path / "a.tfrecord", range(500), compression)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(CorruptRecord, match=rf"a.tfrecord: record at byte \d+ of the {compression} data: .*damaged"):
        read(from_tfrecord(path))


def test_corrupt_records_are_skipped_and_counted(tf: Any, tmp_path: Path, serve: Serve) -> None:
    path = write(tf, tmp_path / "a.tfrecord", range(50))
    places = [damaged(path, record, 30) for record in (7, 20)]
    write(tf, tmp_path / "b.tfrecord", range(50, 100))
    lost = damaged(tmp_path / "b.tfrecord", 30, 2)
    daemon = serve(
        """
        import os
        from penstock_server import Feed, FixedLen
        feed = Feed.from_tfrecord([os.environ["DATA"] + f"/{name}.tfrecord" for name in "ab"],
                                  {"label": FixedLen((), "int64")}, batch_size=4, on_error="skip")
        """,
        env={"DATA": str(tmp_path)},
    )
    with penstock.connect(daemon.url) as connection:
        found = [int(label) for batch in connection.batches() for label in batch["label"]]
    assert sorted(found) == [number for number in range(80) if number not in (7, 20)]
    log = daemon.stderr()
    assert (
        f"a.tfrecord: 2 of its records are corrupt and were left out, all others were served: byte {places[0]}" in log
    )
    assert f"b.tfrecord: record at byte {lost}: its length is corrupt" in log


def test_our_messages_and_those_of_tensorflow_live_in_one_process(tf: Any) -> None:
    ours = example_class().FromString(example(tf, 3))
    theirs = tf.train.Example.FromString(ours.SerializeToString())
    assert theirs.features.feature["label"].int64_list.value == [3]
    assert ours.DESCRIPTOR.file.pool is not theirs.DESCRIPTOR.file.pool


def with_features(tf: Any, tmp_path: Path, features: Any, **more: Any) -> Any:
    """Return the first sample of a file with one record."""
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(example(tf, 4, **more))
    return read(from_tfrecord(path, features))[0]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"nothing": FixedLen((), "int64")}, "it has no feature 'nothing': give FixedLen"),
        ({"label": FixedLen((), "float32")}, "feature 'label' is int64, and float32 was declared"),
        ({"boxes": FixedLen((3,), "float32")}, r"feature 'boxes' has 4 values, and shape \[3\] was declared"),
        ({"boxes": FixedLen((), "float32")}, "feature 'boxes' has 4 values, and one was declared"),
        ({"image": FixedLen((3,), "bytes", decode="uint8")}, r"feature 'image' has 20 bytes, and uint8\[3\] has 3"),
        ({"ids": VarLen("int64", pad_to=3)}, "feature 'ids' has 4 values, more than pad_to=3"),
    ],
)
def test_a_record_without_the_declared_features_is_an_error(
    tf: Any, tmp_path: Path, features: Any, message: str
) -> None:
    with pytest.raises(CorruptRecord, match=f"a.tfrecord: record at byte 0: {message}"):
        with_features(tf, tmp_path, features)


def test_a_record_that_is_not_an_example_is_an_error(tf: Any, tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        writer.write(b"\xff\xff")
    with pytest.raises(CorruptRecord, match=r"it is not a tf\.train\.Example"):
        read(from_tfrecord(tmp_path / "a.tfrecord"))


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        (FixedLen((2,), "float32", default=[1, 2]), [1, 2]),
        (FixedLen((2, 2), "int64", default=7), [[7, 7], [7, 7]]),
        (FixedLen((), "bytes", default=b"x\0"), b"x\0"),
        (FixedLen((2,), "bytes", default=3, decode="uint8"), [3, 3]),
        (VarLen("int64"), []),
        (VarLen("float32", pad_to=2, pad_value=-1), [-1, -1]),
        (VarLen(bytes, pad_to=2), [b"", b""]),
    ],
)
def test_a_missing_feature_has_its_default(tf: Any, tmp_path: Path, feature: Any, value: Any) -> None:
    found = with_features(tf, tmp_path, {"nothing": feature})["nothing"]
    assert (found if isinstance(found, bytes) else found.tolist()) == value


def test_bytes_are_as_they_were_written(tf: Any, tmp_path: Path) -> None:
    more = {"text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a\0", b"", b"\xff"]))}
    features = {"text": FixedLen((3,), "bytes"), "again": VarLen("bytes"), "image": FixedLen((), bytes)}
    sample = with_features(tf, tmp_path, features, **more, again=more["text"])
    assert sample["text"].tolist() == sample["again"].tolist() == [b"a\0", b"", b"\xff"]
    assert sample["image"] == b"\4" * 20


def test_values_beyond_the_end_are_cut_on_request(tf: Any, tmp_path: Path) -> None:
    assert with_features(tf, tmp_path, {"ids": VarLen("int64", pad_to=2, cap=True)})["ids"].tolist() == [4, -4]


def sequence(tf: Any, number: int) -> bytes:
    """Return a serialized SequenceExample with `number` steps."""
    steps = [tf.train.Feature(float_list=tf.train.FloatList(value=[number, step, 0.5])) for step in range(number)]
    ids = [tf.train.Feature(int64_list=tf.train.Int64List(value=[step - number])) for step in range(number)]
    raw = [tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes([step] * 4)])) for step in range(number)]
    lists = {name: tf.train.FeatureList(feature=found) for name, found in (("x", steps), ("ids", ids), ("raw", raw))}
    context = {"label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))}
    made = tf.train.SequenceExample(
        context=tf.train.Features(feature=context), feature_lists=tf.train.FeatureLists(feature_list=lists)
    )
    return bytes(made.SerializeToString())


def sequences(tf: Any, path: Path) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in (2, 0, 5):
            writer.write(sequence(tf, number))
    return path


def test_feature_lists_are_those_of_parse_single_sequence_example(tf: Any, tmp_path: Path) -> None:
    path = sequences(tf, tmp_path / "a.tfrecord")
    declared = {
        "label": FixedLen((), "int64"),
        "x": FixedLenSequence((3,), "float32"),
        "ids": FixedLenSequence((), "int64"),
        "raw": FixedLenSequence((2, 2), "bytes", decode="uint8"),
    }
    theirs = {
        "x": tf.io.FixedLenSequenceFeature((3,), tf.float32),
        "ids": tf.io.FixedLenSequenceFeature((), tf.int64),
        "raw": tf.io.FixedLenSequenceFeature((), tf.string),
    }
    ours = read(from_tfrecord(path, declared))
    for mine, record in zip(ours, tf.data.TFRecordDataset(str(path)), strict=True):
        context = {"label": tf.io.FixedLenFeature((), tf.int64)}
        label, lists = tf.io.parse_single_sequence_example(record, context, theirs)
        assert mine["label"] == label["label"].numpy()
        for name in ("x", "ids"):
            assert mine[name].dtype == lists[name].numpy().dtype
            np.testing.assert_array_equal(mine[name], lists[name].numpy(), name)
        assert [step.tobytes() for step in mine["raw"]] == lists["raw"].numpy().tolist()
        assert mine["raw"].shape[1:] == (2, 2)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"ids": VarLen("int64")}, "'ids' is a feature list of a SequenceExample: declare it as FixedLenSequence"),
        ({"ids": FixedLen((), "int64", default=1)}, "'ids' is a feature list of a SequenceExample"),
        ({"label": FixedLenSequence((), "int64")}, "'label' is a single feature, not a feature list"),
        ({"y": FixedLenSequence((), "int64")}, "it has no feature list 'y'"),
        ({"x": FixedLenSequence((2,), "float32")}, "step 0 of feature list 'x' has 3 values, and shape [2]"),
        ({"x": FixedLenSequence((3,), "int64")}, "step 0 of feature list 'x' is float32, and int64 was declared"),
    ],
)
def test_a_feature_list_is_never_dropped_in_silence(tf: Any, tmp_path: Path, features: Any, message: str) -> None:
    with pytest.raises(CorruptRecord) as raised:
        read(from_tfrecord(sequences(tf, tmp_path / "a.tfrecord"), features))
    assert f"a.tfrecord: record at byte 0: {message}" in str(raised.value)


def claim(length: int, data: bytes = b"") -> bytes:
    """Return the beginning of a record that claims to have this length."""
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", crc32c.masked(crc32c.crc32c()(head))) + data


def test_a_record_that_is_larger_than_any_is_an_error_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(claim(8 << 30, bytes(1000))))
    with pytest.raises(CorruptRecord, match=r"a.tfrecord.gz: record at byte 0 of the GZIP data: it has 8.0 GiB"):
        read(from_tfrecord(path))


def test_little_is_allocated_for_data_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(claim(2 << 30, bytes(1000))))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecord, match="the file is truncated here"):
            read(from_tfrecord(path))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLen((), "int32"), 'dtype must be "float32", "int64" or "bytes"'),
        (lambda: FixedLen((-1,), "int64"), "shape must be"),
        (lambda: FixedLen((), "int64", decode="uint8"), "decode= is for dtype"),
        (lambda: FixedLen((), "bytes", decode="S3"), "decode must be a dtype of numbers"),
        (lambda: FixedLen((3,), "int64", default=[1, 2]), r"default has shape \[2\]"),
        (lambda: FixedLen((), "int64", default=1.5), "cannot be int64"),
        (lambda: VarLen("int64", pad_to=0), "at least 1"),
        (lambda: VarLen("int64", cap=True), "give pad_to="),
        (lambda: VarLen("int64", pad_value=0.5), "pad_value 0.5 cannot be int64"),
        (lambda: from_tfrecord("a", {"x": 3}), "must be FixedLen"),
        (lambda: from_tfrecord("a", [3]), "features must be a dict"),
        (lambda: from_tfrecord("a", split_bytes=0), "split_bytes must be"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("length", [0, 1, 8, 63, 64, 65, 69, 1087, 1088, 1089, 5000])
def test_the_crc_without_google_crc32c_is_right(length: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c.in_numpy(data) == crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("name", ["a.tfr", "a.tfrec-00001-of-00010.gz", "a.records", "a"])
def test_files_with_other_endings_are_recognized(tf: Any, tmp_path: Path, name: str, compression: str) -> None:
    path = write(tf, tmp_path / name, range(3), compression)
    found = registry.format_of(str(path))
    assert found is not None
    assert found.name == "TFRecord"


def test_other_compressed_files_are_not_taken_for_tfrecord(tmp_path: Path) -> None:
    text = b"a,b\n1,2\n" * 100
    for name, data in {"gz": gzip.compress(text), "zlib": zlib.compress(text), "broken": b"\x1f\x8b\x08broken"}.items():
        (tmp_path / name).write_bytes(data)
        assert registry.format_of(str(tmp_path / name)) is None
