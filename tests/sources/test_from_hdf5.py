"""Feeds of HDF5 files: `Feed.from_hdf5`, and `penstock serve` with files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

import penstock
from penstock_server import Feed
from penstock_server.cli.main import main
from penstock_server.sources.hdf5 import reader
from penstock_server.sources.hdf5.describe import describe
from tests.conftest import Daemon, Serve
from tests.reference.one_stream import one_stream

ROWS = 600


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Two files of 600 rows, with compressed images."""
    for number in range(2):
        ids = np.arange(number * ROWS, (number + 1) * ROWS)
        with h5py.File(tmp_path / f"digits-{number}.h5", "w") as file:
            images = np.broadcast_to(ids.astype(np.float32)[:, None, None], (ROWS, 4, 5))
            file.create_dataset("images", data=images, chunks=(50, 2, 5), compression="gzip")
            file.create_dataset("labels", data=ids.astype(">i4"))
            file.create_dataset("names", data=[f"näme {number}" for number in ids])
            file.create_dataset("short", data=ids[:7])
            file.create_dataset("group/flag", data=ids % 2 == 0)
    return tmp_path


def read(feed: Feed) -> list[Any]:
    """Return all samples in the order of the splits, as a worker would read them."""
    return [sample for split in feed.splits() for sample in feed.generate(split)]  # type: ignore[operator]


def from_hdf5(files: Any, leaves: Any = "labels", **options: Any) -> Feed:
    return Feed.from_hdf5(files, leaves, batch_size=4, **options)


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(digits: Path, serve: Serve) -> None:
    source = """
        import os
        from penstock_server import Feed
        feed = Feed.from_hdf5(os.environ["DATA"] + "/digits-*.h5", {"image": "images", "label": "labels"},
                              batch_size=32, shuffle=200, seed=3)
        """
    batches = one_stream(serve, source, digits)
    labels = np.concatenate([batch["label"] for batch in batches])
    assert labels.dtype == np.int32
    assert sorted(labels) == list(range(2 * ROWS))
    assert all((batch["image"] == batch["label"][:, None, None]).all() for batch in batches)


def test_files_are_served_from_the_command_line(digits: Path, tf: Any) -> None:
    (digits / "images.py").write_text("def twice(sample):\n    x, name, y = sample\n    return 2 * x, name, y\n")
    words = "digits-*.h5 --leaf images --leaf names --leaf labels --batch-size 32 --shuffle 100 --rows 500:700"
    words += " --transform images.py:twice --name ddddddddd"
    command = [sys.executable, "-m", "penstock_server", "serve", *words.split(), "--bind", "tcp://127.0.0.1:0"]
    daemon = Daemon(command, digits, digits / "log", dict(os.environ))
    daemon.wait_ready(1)
    labels = []
    for x, name, y in penstock.dataset(daemon.url):
        assert (x.numpy()[:, 0, 0] == 2 * y.numpy()).all()
        assert name.numpy().tolist() == [f"näme {label}".encode() for label in y.numpy()]
        labels += y.numpy().tolist()
    assert sorted(labels) == list(range(500, 700))
    assert daemon.url.endswith("/ddddddddd")
    assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a.h5 --leaf images", "--batch-size"),
        ("a.h5 --batch-size 4", "a.h5 is HDF5, and needs --leaf NAME=DATASET"),
        ("a.h5 --leaf x=images --leaf labels --batch-size 4", "for all leaves"),
        ("a.h5 b.py:feed --leaf images --batch-size 4", "second daemon"),
        ("b.py:feed --leaf images", "--leaf is for data files"),
        ("a.h5 --leaf x --batch-size 4 --rows 7", "START:STOP"),
        ("a.h5 b.npz --leaf x --batch-size 4", "one format"),
        ("b.py:feed --transform b.py:twice", "--transform is for data files"),
        ("a.tar --batch-size 4", "needs --leaf NAME=EXTENSION"),
        ("a.tar --leaf cls --batch-size 4 --rows 1:2", "--rows is for HDF5 and NumPy"),
    ],
)
def test_options_that_cannot_work_are_refused(words: str, message: str) -> None:
    found = CliRunner().invoke(main, ["serve", *words.split()])
    assert found.exit_code == 2
    assert message in found.output


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("images.py", "expected MODULE:FUNCTION, such as images.py:augment, got 'images.py'"),
        ("images.py:nothing", "images.py has no attribute 'nothing'"),
        ("absent.py:f", "absent.py: no such file"),
    ],
)
def test_a_transform_that_cannot_be_loaded_ends_the_command(digits: Path, transform: str, message: str) -> None:
    (digits / "images.py").write_text("")
    words = f"digits-0.h5 --leaf labels --batch-size 32 --bind tcp://127.0.0.1:0 --transform {transform}"
    command = [sys.executable, "-m", "penstock_server", "serve", *words.split()]
    found = subprocess.run(command, cwd=digits, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_an_error_of_a_file_ends_the_command_and_names_the_file(digits: Path) -> None:
    words = "digits-0.h5 --leaf pictures --batch-size 32 --bind tcp://127.0.0.1:0"
    command = [sys.executable, "-m", "penstock_server", "serve", *words.split()]
    found = subprocess.run(command, cwd=digits, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "digits-0.h5 has no dataset 'pictures'; its datasets are group/flag (bool[600]), images" in found.stderr
    assert "Traceback" not in found.stderr


def test_samples_have_the_structure_of_the_leaves(digits: Path) -> None:
    file = digits / "digits-0.h5"
    nested = read(from_hdf5(file, ({"a": "labels", "b": ("images", "group/flag")}, "labels")))[3]
    assert nested[0]["a"] == nested[1] == 3
    assert nested[0]["b"][0].shape == (4, 5)
    assert not nested[0]["b"][1]
    assert read(from_hdf5(file))[7] == 7
    assert type(read(from_hdf5(file))[0]) is np.int32, "native byte order"


@pytest.mark.parametrize(
    ("rows", "served"), [(None, range(1200)), ((590, 610), range(590, 610)), ((7, None), range(7, 1200))]
)
def test_rows_are_counted_over_all_files(digits: Path, rows: Any, served: range) -> None:
    assert read(from_hdf5(str(digits / "digits-*.h5"), rows=rows)) == list(served)


def test_no_chunk_is_decompressed_twice(digits: Path) -> None:
    feed = from_hdf5([digits / "digits-0.h5", digits / "digits-1.h5"], ("images", "labels"), rows=(120, None))
    splits: Any = feed.splits()  # type: ignore[operator]
    assert [split.start for split in splits[:3]] == [120, 200, 300], "64 rows, rounded up to two chunks of 50"
    assert all(split.start % 50 == 0 for split in splits[1:])


def test_chunks_of_labels_are_followed_only_if_many_splits_remain(tmp_path: Path) -> None:
    def unit_of(label_chunk: int) -> int:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_dataset("x", shape=(10_000, 64), chunks=(50, 64), compression="gzip")
            file.create_dataset("y", shape=(10_000,), chunks=(label_chunk,), compression="gzip")
        return int(from_hdf5(tmp_path / "a.h5", ("x", "y")).splits()[0].stop)  # type: ignore[operator]

    assert unit_of(75) == 150
    assert unit_of(3001) == 100, "else the file would have one split"


def test_chunks_that_seldom_meet_are_divided(tmp_path: Path) -> None:
    file = tmp_path / "a.h5"
    images = np.arange(10_000 * 20, dtype=np.int32).reshape(10_000, 20)
    with h5py.File(file, "w") as h5:
        h5.create_dataset("x", data=images, chunks=(625, 5), compression="gzip")
        h5.create_dataset("y", data=-images, chunks=(313, 5), compression="gzip")
    feed = from_hdf5(file, ("x", "y"))
    splits: Any = feed.splits()  # type: ignore[operator]
    assert [split.start for split in splits] == list(range(0, 10_000, 625)), "the chunks meet after 195,625 rows"
    assert np.array_equal(np.array(read(feed)), np.stack([images, -images], axis=1))
    assert "reading all decompresses 1.2 times the data" in describe(str(file)).facts[0]
    assert len(from_hdf5(file, ("x", "y"), split_rows=5000).splits()) == 2  # type: ignore[operator, arg-type]


def test_a_few_small_chunks_are_divided(tmp_path: Path) -> None:
    file = tmp_path / "a.h5"
    with h5py.File(file, "w") as h5:
        h5.create_dataset("x", data=np.arange(4000), chunks=(2001,), compression="gzip")
    splits: Any = from_hdf5(file, "x").splits()  # type: ignore[operator]
    assert [split.start for split in splits] == [*range(0, 2001, 251), *range(2001, 4000, 251)]
    assert read(from_hdf5(file, "x")) == list(range(4000))


def test_large_chunks_are_not_divided_among_splits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("penstock_server.sources.hdf5.reader._CHEAP", 1 << 10)
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        h5.create_dataset("x", shape=(10_000, 20), chunks=(1000, 20), compression="gzip")
        h5.create_dataset("y", shape=(10_000, 20), chunks=(600, 20), compression="gzip")
    splits: Any = from_hdf5(tmp_path / "a.h5", ("x", "y")).splits()  # type: ignore[operator]
    assert [split.start for split in splits] == list(range(0, 10_000, 1000))


def test_each_dataset_is_read_by_its_own_chunks_and_no_more_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        for name, chunk in (("x", 70), ("y", 90)):
            h5.create_dataset(name, data=np.zeros((6300, 1000), "u1"), chunks=(chunk, 1000), compression="gzip")
    slabs: list[tuple[str, int, int]] = []
    whole = reader._slab

    def noted(dataset: Any, start: int, stop: int) -> Any:
        slabs.append((dataset.name, start, stop))
        return whole(dataset, start, stop)

    monkeypatch.setattr(reader, "_SLAB", 1)
    monkeypatch.setattr(reader, "_slab", noted)
    feed = from_hdf5(tmp_path / "a.h5", ("x", "y"), split_rows=630)
    assert len(read(feed)) == 6300
    for name, chunk in (("/x", 70), ("/y", 90)):
        assert [slab[1:] for slab in slabs if slab[0] == name] == [(at, at + chunk) for at in range(0, 6300, chunk)]
    slabs.clear()
    monkeypatch.setattr(reader, "_BAND", 20_000)
    assert len(read(feed)) == 6300
    assert max(stop - start for _, start, stop in slabs) == 20, "a row of chunks has more bytes than are read at once"


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A file whose datasets depend on others, a folder of its own, and a file outside that folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    np.arange(10.0).tofile(tmp_path / "outside.bin")
    with h5py.File(folder / "source.h5", "w") as h5:
        h5["rows"] = np.arange(10.0)
        h5["loop"] = h5py.ExternalLink("linked.h5", "/loop")
    for number in range(2):
        with h5py.File(folder / f"part-{number}.h5", "w") as h5:
            h5["rows"] = np.full(5, float(number))
    with h5py.File(folder / "linked.h5", "w") as h5:
        for name, file, inner in (("virtual", "source.h5", "rows"), ("no_such", "source.h5", "no_such")):
            layout = h5py.VirtualLayout((10,), "f8")
            layout[:] = h5py.VirtualSource(file, inner, shape=(10,))
            h5.create_virtual_dataset(name, layout)
        layout = h5py.VirtualLayout((10,), "f8")
        layout[:] = h5py.VirtualSource("linked.h5", "virtual", shape=(10,))
        h5.create_virtual_dataset("indirect", layout)
        h5["link"] = h5py.ExternalLink("source.h5", "/rows")
        h5["soft"] = h5py.SoftLink("/link")
        h5["loop"] = h5py.ExternalLink("source.h5", "/loop")
        h5["dangling"] = h5py.ExternalLink("absent.h5", "/rows")
        kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        space = h5py.h5s.create_simple((0,), (h5py.h5s.UNLIMITED,))
        space.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), stride=(5,), block=(5,))
        kind.set_virtual(space, b"part-%b.h5", b"rows", h5py.h5s.create_simple((5,)))
        h5py.h5d.create(h5.id, b"numbered", h5py.h5t.IEEE_F64LE, space, kind)
        h5.create_dataset("stored", (10,), "f8", external=[(str(folder / "raw.bin"), 0, 80)])
        h5.create_dataset("outside", (10,), "f8", external=[(str(tmp_path / "outside.bin"), 0, 80)])
    np.arange(10.0).tofile(folder / "raw.bin")
    return folder


@pytest.mark.parametrize("name", ["virtual", "indirect", "link", "soft", "numbered", "stored"])
def test_data_in_other_files_are_served(linked: Path, name: str) -> None:
    expected = [0.0] * 5 + [1.0] * 5 if name == "numbered" else list(range(10))
    assert read(from_hdf5(linked / "linked.h5", name)) == expected


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("virtual", "source.h5", "'virtual' takes rows from 'rows' in source.h5, and there is no file"),
        ("indirect", "source.h5", "'indirect' takes rows from 'rows' in source.h5, and there is no file"),
        ("link", "source.h5", "'link' is a link to '/rows' in source.h5, and there is no file"),
        ("soft", "source.h5", "'soft' is a link to '/rows' in source.h5, and there is no file"),
        ("stored", "raw.bin", "'stored' is stored in .*raw.bin, and there is no file"),
        ("no_such", "", "'no_such' takes rows from 'no_such' in source.h5, which has no such dataset"),
        ("loop", "", "'loop' depends on itself"),
    ],
)
def test_a_missing_source_is_an_error_and_not_zeros(linked: Path, name: str, missing: str, message: str) -> None:
    if missing:
        (linked / missing).unlink()
    with pytest.raises(OSError, match=message) as raised:
        read(from_hdf5(linked / "linked.h5", name))
    assert "linked.h5" in str(raised.value)


def test_external_storage_that_is_too_short_is_an_error_and_not_zeros(linked: Path) -> None:
    os.truncate(linked / "raw.bin", 24)
    with pytest.raises(OSError, match=r"raw.bin has 24 of 80 bytes there: copy it again"):
        read(from_hdf5(linked / "linked.h5", "stored"))


def test_files_in_other_folders_need_consent(linked: Path) -> None:
    with pytest.raises(PermissionError, match=r"outside.bin, which is outside the file's folder .*allow_outside=True"):
        read(from_hdf5(linked / "linked.h5", "outside"))
    assert read(from_hdf5(linked / "linked.h5", "outside", allow_outside=True)) == list(range(10))
    (linked / "source.h5").rename(linked.parent / "source.h5")
    (linked / "source.h5").symlink_to(linked.parent / "source.h5")
    with pytest.raises(PermissionError, match=r"source.h5, which is outside the file's folder"):
        read(from_hdf5(linked / "linked.h5", "link"))


def test_a_cached_split_depends_on_all_files(linked: Path) -> None:
    feed = from_hdf5(linked / "linked.h5", "virtual")
    split = feed.splits()[0]  # type: ignore[operator]
    stamp = feed.generate.stamp  # type: ignore[union-attr]
    before = stamp(split)
    assert [Path(file).name for file, _ in before] == ["linked.h5", "source.h5"]
    with h5py.File(linked / "source.h5", "a") as h5:
        h5["rows"][3] = 70.0
    assert stamp(split) != before
    assert read(feed)[3] == 70.0
    (linked / "source.h5").unlink()
    assert stamp(split) == before[:1]
    with pytest.raises(OSError, match=r"source.h5, and there is no file"):
        feed.splits()  # type: ignore[operator]
    numbered = from_hdf5(linked / "linked.h5", "numbered")
    assert len(numbered.splits()) == 1  # type: ignore[operator, arg-type]
    (linked / "part-2.h5").write_bytes((linked / "part-1.h5").read_bytes())
    assert len(read(numbered)) == 15, "a dataset grows with the files that it takes rows from"


def test_a_file_of_its_own_has_the_stamp_that_it_always_had(digits: Path) -> None:
    file = digits / "digits-0.h5"
    feed = from_hdf5(file)
    stamp = feed.generate.stamp(feed.splits()[0])  # type: ignore[operator, union-attr]
    assert stamp == [(str(file), file.stat().st_mtime_ns)]


def test_each_dataset_that_cannot_be_served_is_named_beside_the_others(linked: Path, tmp_path: Path) -> None:
    file = linked / "odd.h5"
    quad = h5py.h5t.IEEE_F64LE.copy()
    quad.set_size(16)
    quad.set_precision(128)
    quad.set_fields(127, 112, 15, 0, 112)
    lzf = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    lzf.set_chunk((10,))
    lzf.set_filter(300, h5py.h5z.FLAG_OPTIONAL)
    with h5py.File(linked / "linked.h5", "a") as h5:
        rows = h5py.h5s.create_simple((10,))
        h5py.h5d.create(h5.id, b"quad", quad, rows)
        h5py.h5d.create(h5.id, b"filtered", h5py.h5t.IEEE_F64LE, rows, lzf)
        h5["triples"] = np.zeros(10, np.dtype(("<f4", (3,))))
        h5.create_dataset("wide", (10, 3 << 30), "u1")
        h5.create_dataset("chunky", (10, 3 << 30), "u1", chunks=(1, 3 << 30))
        h5["group"] = h5py.ExternalLink("source.h5", "/")
        h5["one"] = 3.0
        del h5["one"]
        h5.create_dataset("array", (10,), np.dtype(("<f4", (3,))))
    (linked / "linked.h5").rename(file)
    described = describe(str(file))
    (array,) = [column for column in described.columns if column.name == "array"]
    assert array.storage == "dataset 'array', float32[10, 3], never written, so all rows are its fill value, contiguous"
    assert {"array", "link", "virtual"} <= {column.name for column in described.columns}
    assert read(from_hdf5(file, "array"))[0].shape == (3,)
    for name, message in {
        "quad": "has a type that NumPy lacks",
        "filtered": "is compressed by the filter 300",
        "wide": "has rows of 3.0 GiB, and more than 2.0 GiB are not read at once",
        "chunky": "of 3.0 GiB, and more than 2.0 GiB are not read at once",
        "group": "is a link to '/' in source.h5, and that is no dataset",
        "dangling": "absent.h5, and there is no file",
        "outside": "which is outside the file's folder",
    }.items():
        assert message in described.left_out[name], name
        if name != "group":
            with pytest.raises((TypeError, ValueError, OSError)) as raised:
                read(from_hdf5(file, name))
            assert f"odd.h5: {name!r}" in str(raised.value)


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (("labels", "short"), "'labels' has 600 rows and 'short' has 7"),
        ("group", "has a group, not a dataset, 'group'; its datasets are group/flag"),
        ("nothing", "has no dataset 'nothing'"),
    ],
)
def test_a_dataset_that_cannot_be_served_is_named(digits: Path, leaves: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, LookupError)) as raised:
        read(from_hdf5(digits / "digits-0.h5", leaves))
    assert message in str(raised.value)
    assert "digits-0.h5" in str(raised.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "the file is truncated: copy it again"),
        (lambda data: b"PK" + data[2:], "this is not an HDF5 file"),
        (lambda data: None, "no such file"),
    ],
)
def test_a_damaged_file_is_named_with_the_fix(digits: Path, damage: Any, message: str) -> None:
    path = digits / "digits-0.h5"
    damaged = damage(path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises(OSError, match=message) as raised:
        read(from_hdf5(path))
    assert "digits-0.h5" in str(raised.value)


def test_hdf5plugin_is_imported_if_a_dataset_needs_it(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hdf5plugin.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)  # restored afterwards
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: sys.modules.get("hdf5plugin") is not None)
    with pytest.raises(OSError, match=r"'images' is compressed by the filter 1 .*pip install hdf5plugin"):
        read(from_hdf5(digits / "digits-0.h5", "images"))
    del sys.modules["hdf5plugin"]
    assert len(read(from_hdf5(digits / "digits-0.h5", "images"))) == ROWS


def test_a_damaged_dataset_is_named_beside_the_others(digits: Path) -> None:
    path = digits / "digits-0.h5"
    with h5py.File(path) as h5:
        at = h5py.h5o.get_info(h5["images"].id).addr
    data = bytearray(path.read_bytes())
    data[at : at + 16] = b"\xff" * 16
    path.write_bytes(data)
    with pytest.raises(OSError, match=r"digits-0.h5: the file is damaged .*: copy it again"):
        read(from_hdf5(path, "images"))
    described = describe(str(path))
    assert [column.name for column in described.columns] == ["group/flag", "labels", "names"]
    assert "the file is damaged" in described.left_out["images"]


def test_a_damaged_chunk_is_named_with_its_rows(digits: Path) -> None:
    path = digits / "digits-0.h5"
    with h5py.File(path) as h5:
        at = h5["images"].id.get_chunk_info_by_coord((100, 0, 0)).byte_offset
    data = bytearray(path.read_bytes())
    data[at + 10 : at + 20] = bytes(10)
    path.write_bytes(data)
    with pytest.raises(OSError, match=r"digits-0.h5: rows 100 to 199 of 'images' cannot be read .*is damaged"):
        read(from_hdf5(path, "images"))


def test_a_file_of_a_killed_writer_is_named_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    code = "import h5py, os, sys; file = h5py.File(sys.argv[1], 'w', libver='latest'); file['x'] = range(10)"
    code += "; file.swmr_mode = True; file.flush(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, path], check=True)
    with pytest.raises(
        OSError, match=r"a.h5: its writer still has the file open, or was killed: close it, or run h5clear"
    ):
        read(from_hdf5(path, "x"))


def test_a_locked_file_is_named_with_the_fix(digits: Path) -> None:
    path = digits / "digits-0.h5"
    code = "import h5py, sys; file = h5py.File(sys.argv[1], 'a'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=-1, stdout=-1) as writer:
        assert writer.stdout is not None
        assert writer.stdin is not None
        writer.stdout.readline()
        with pytest.raises(OSError, match="another process has locked the file"):
            read(from_hdf5(path))
        writer.stdin.close()
    assert len(read(from_hdf5(path, locking=False))) == ROWS


def test_a_file_that_changes_is_an_error(digits: Path) -> None:
    path = digits / "digits-0.h5"
    feed = from_hdf5(path)
    split = feed.splits()[0]  # type: ignore[operator]
    with h5py.File(path, "a") as file:
        file["more"] = np.zeros(100_000)
    with pytest.raises(OSError, match=r"digits-0.h5 has changed: it had \d+ bytes"):
        list(feed.generate(split))  # type: ignore[operator]
    assert len(read(feed)) == ROWS, "the next epoch lists the file as it is now"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leaves": {}}, "leaves is empty"),
        ({"leaves": ["images"]}, "a tuple or a dict of names"),
        ({"files": []}, "files is an empty list"),
        ({"files": [3]}, "files must be paths"),
        ({"rows": (5, 5)}, "0 <= start < stop"),
        ({"rows": 5}, "rows must be"),
        ({"split_rows": 0}, "split_rows must be at least 1"),
        ({"splits": [1]}, "leave splits= out"),
        ({"locking": "no"}, "locking must be"),
        ({"shuffle": -1}, "shuffle must be"),
    ],
)
def test_an_option_that_cannot_work_is_refused_when_the_feed_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        from_hdf5(**{"files": "a.h5", **options})


@pytest.mark.parametrize("rows", [(0, 5000), (1200, None)])
def test_rows_beyond_the_end_are_an_error(digits: Path, rows: Any) -> None:
    with pytest.raises(ValueError, match="have 1200 rows"):
        read(from_hdf5(str(digits / "digits-*.h5"), rows=rows))


def test_a_file_that_is_truncated_while_it_is_read_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.ones((4000, 1000), np.int32)
    feed = from_hdf5(path, "x", split_rows=4000)
    (split,) = feed.splits()  # type: ignore[operator]
    rows = feed.generate(split)  # type: ignore[operator]
    assert next(rows).all()
    os.truncate(path, 2_000_000)
    read = 1
    with pytest.raises(OSError, match=r"a.h5 has changed: it had \d+ bytes when its splits were listed, and now has 2"):
        for row in rows:
            assert row.all()
            read += 1
    assert read < 500


def test_a_source_that_is_truncated_while_it_is_read_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["x"] = np.ones((4000, 1000), np.int32)
    layout = h5py.VirtualLayout((4000, 1000), np.int32)
    layout[:] = h5py.VirtualSource("part.h5", "x", (4000, 1000))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    feed = from_hdf5(tmp_path / "all.h5", "x", split_rows=4000)
    (split,) = feed.splits()  # type: ignore[operator]
    rows = feed.generate(split)  # type: ignore[operator]
    assert next(rows).all()
    os.truncate(tmp_path / "part.h5", 2_000_000)
    with pytest.raises(OSError, match=r"part.h5 has changed"):
        for row in rows:
            assert row.all()
