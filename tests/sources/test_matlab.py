"""MATLAB files of versions 5 to 7.3: `Feed.from_files` and `penstock peek`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from penstock_command import main
from penstock_server import Feed
from penstock_server.sources.matlab import reader
from tests.conftest import Serve
from tests.reference.one_stream import one_stream

scipy_io: Any = pytest.importorskip("scipy.io")

ROWS = 60
TABLE = np.arange(ROWS * 5, dtype=np.float32).reshape(ROWS, 5)
IMAGES = np.arange(4 * 6 * 3 * ROWS, dtype=np.uint16).reshape(4, 6, 3, ROWS)
LABELS = np.arange(ROWS, dtype=np.uint8)[:, None]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save5(file: str, arrays: dict[str, Any]) -> str:
    scipy_io.savemat(file, arrays, do_compression=True)
    return file


def save73(file: str, arrays: dict[str, Any]) -> str:
    """Write a file as MATLAB does with -v7.3: in HDF5, with dimensions in reverse order, after 512 bytes of its own."""
    with h5py.File(file, "w", userblock_size=512) as h5:
        for name, array in arrays.items():
            kind = {"float32": "single", "float64": "double", "bool": "logical"}.get(array.dtype.name, array.dtype.name)
            stored = array.astype(np.uint8) if kind == "logical" else array
            dataset = h5.create_dataset(name, data=stored.T, chunks=True, compression="gzip")
            dataset.attrs["MATLAB_class"] = np.bytes_(kind)
            for above in {name.rpartition("/")[0]} - {""}:
                h5[above].attrs["MATLAB_class"] = np.bytes_("struct")
    with open(file, "r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(116) + bytes(8) + b"\x00\x02IM")
    return file


SAVES = pytest.mark.parametrize("save", [save5, save73])


def read(*args: Any, **options: Any) -> list[Any]:
    feed = Feed.from_files(*args, batch_size=4, **options)
    splits: Any = feed.splits
    generate: Any = feed.generate
    return [one for split in splits() for one in generate(split)]


@SAVES
def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(
    save: Any, folder: Path, serve: Serve
) -> None:
    save("a.mat", {"X": TABLE, "y": LABELS})
    source = """
        import os
        from penstock_server import Feed
        feed = Feed.from_files(os.environ["DATA"] + "/a.mat", {"x": "X", "y": "y"}, batch_size=8, shuffle=40, seed=3)
        """
    batches = one_stream(serve, source, folder)
    assert sorted(np.concatenate([batch["y"] for batch in batches])) == list(range(ROWS))
    for batch in batches:
        np.testing.assert_array_equal(batch["x"], TABLE[batch["y"].astype(int)])


@SAVES
@pytest.mark.parametrize("slab", [1, 1 << 20])
@pytest.mark.parametrize("labels", [LABELS, LABELS.T])
def test_samples_are_those_of_the_dimension_that_all_share(
    save: Any, slab: int, labels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_SLAB", slab)
    save("a.mat", {"image": IMAGES, "table": TABLE, "y": labels, "ok": LABELS % 2 == 0})
    found = read("a.mat", ("image", "table", "y", "ok"), split_rows=7)
    for number, (image, row, label, ok) in enumerate(found):
        np.testing.assert_array_equal(image, IMAGES[..., number])
        np.testing.assert_array_equal(row, TABLE[number])
        assert (label, ok) == (number, number % 2 == 0)
    assert len(found) == ROWS
    assert [value.dtype.name for value in found[0]] == ["uint16", "float32", "uint8", "bool"]
    assert [row[2] for row in read("a.mat", ("image", "table", "y"), rows=(10, 30))] == list(range(10, 30))


@SAVES
def test_axis_says_which_dimension_counts_where_both_could(save: Any) -> None:
    square = np.arange(16.0).reshape(4, 4)
    save("a.mat", {"x": square})
    np.testing.assert_array_equal(read("a.mat", "x"), square)
    np.testing.assert_array_equal(read("a.mat", "x", axis=-1), square.T)
    with pytest.raises(ValueError, match="axis must be 0"):
        read("a.mat", "x", axis=1)


def test_fields_of_a_struct_are_leaves_in_version_7_3() -> None:
    save73("a.mat", {"data/X": TABLE, "data/y": LABELS})
    assert [label for _, label in read("a.mat", ("data/X", "data/y"))] == list(range(ROWS))


@SAVES
def test_what_cannot_be_served_is_named(save: Any) -> None:
    save("a.mat", {"x": TABLE, "other": np.zeros((7, 2)), "one": np.zeros((1, 1))})
    with pytest.raises(LookupError, match=r"a\.mat has no variable 'z'; its variables are .*x \(single 60x5\)"):
        read("a.mat", "z")
    with pytest.raises(ValueError, match=r"'x' is 60x5 and 'other' is 7x2: .*must have one length"):
        read("a.mat", ("x", "other"))
    with pytest.raises(TypeError, match=r"'one' is a single value"):
        read("a.mat", "one")


def test_variables_that_are_no_arrays_are_named() -> None:
    save5("a.mat", {"x": TABLE, "names": np.array(["a", "bc"], object), "s": {"a": 1}, "text": "abc"})
    text = " ".join(CliRunner().invoke(main, ["peek", "a.mat"]).output.split())
    assert "'names' is a cell array: save one array" in text
    assert "'s' is of the class struct" in text
    assert "'text' is text" in text
    assert "penstock serve a.mat --leaf x=x" in text


def test_a_type_that_numpy_lacks_is_left_out() -> None:
    save73("a.mat", {"x": TABLE})
    with h5py.File("a.mat", "r+") as file:
        space = h5py.h5s.create_simple((ROWS, 2))
        h5py.h5d.create(file.id, b"odd", h5py.h5t.UNIX_D32LE, space)
    text = " ".join(CliRunner().invoke(main, ["peek", "a.mat"]).output.split())
    assert "--leaf x=x" in text
    assert "'odd'" in text


@SAVES
def test_peek_proposes_the_arrays_that_share_their_samples(save: Any) -> None:
    save("a.mat", {"image": IMAGES, "y": LABELS, "mean": np.zeros((4, 6))})
    text = " ".join(CliRunner().invoke(main, ["peek", "a.mat"]).output.split())
    assert "60 samples" in text
    assert "uint16 4x6x3x60, with the samples in its last dimension" in text
    assert "'mean' is 4x6, and has no dimension of 60 samples, first or last" in text
    assert "--leaf image=image --leaf y=y" in text


@SAVES
def test_a_truncated_file_is_named(save: Any) -> None:
    data = Path(save("a.mat", {"x": np.random.default_rng(0).random((ROWS, 50))})).read_bytes()
    Path("a.mat").write_bytes(data[: len(data) // 2])
    with pytest.raises(OSError, match=r"a\.mat.* truncated.*copy it again"):
        read("a.mat", "x")
    assert "a.mat" in CliRunner().invoke(main, ["peek", "a.mat"]).output


def test_a_file_of_version_5_names_scipy_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    save5("a.mat", {"x": TABLE})
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ImportError, match=r"a\.mat .*needs scipy: pip install .*\[matlab\]"):
        read("a.mat", "x")


def test_a_worker_holds_arrays_of_version_5_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    for name in "ab":
        save5(f"{name}.mat", {"x": TABLE})
    loadmat = scipy_io.loadmat
    monkeypatch.setattr(scipy_io, "loadmat", lambda *args, **more: loads.append(1) or loadmat(*args, **more))
    assert len(read(["a.mat", "b.mat"], "x", split_rows=10)) == 2 * ROWS
    assert len(loads) == 2
    monkeypatch.setattr(reader, "HELD", TABLE.nbytes)
    feed = Feed.from_files(["a.mat", "b.mat"], "x", batch_size=4, split_rows=10)
    splits: Any = feed.splits
    generate: Any = feed.generate
    for split in (splits()[0], splits()[-1], splits()[0]):
        list(generate(split))
    assert len(loads) == 5
    monkeypatch.setattr(reader, "HELD", TABLE.nbytes - 1)
    with pytest.raises(ValueError, match=r"'x' has 1\.2 KiB, which each worker would hold: save it with -v7\.3"):
        read("a.mat", "x")


def test_a_file_that_is_truncated_while_it_is_read_is_an_error_and_not_zeros() -> None:
    with h5py.File("a.mat", "w", userblock_size=512) as h5:
        h5.create_dataset("x", data=np.ones((1000, 4000))).attrs["MATLAB_class"] = np.bytes_("double")
    feed = Feed.from_files("a.mat", "x", batch_size=4, axis=-1, split_rows=1000)
    splits: Any = feed.splits
    generate: Any = feed.generate
    (split,) = splits()
    rows = generate(split)
    assert next(rows).all()
    os.truncate("a.mat", 2_000_000)
    with pytest.raises(OSError, match=r"a.mat has changed"):
        for row in rows:
            assert row.all()


def test_a_complex_array_is_an_error_and_does_not_lose_its_imaginary_part() -> None:
    save5("a.mat", {"z": TABLE + 2j * TABLE, "y": LABELS})
    with pytest.raises(TypeError, match=r"a.mat: 'z' is complex: save its real and imaginary parts"):
        read("a.mat", ("z", "y"))
    assert len(read("a.mat", "y")) == ROWS


@pytest.mark.parametrize("dtype", ["float64", "float32", "uint8", "int8", "int64", "uint64", "uint16", "bool"])
def test_arrays_have_the_dtypes_of_their_classes(dtype: str) -> None:
    save5("a.mat", {"x": np.arange(6).astype(dtype)[:, None]})
    (first, *_) = read("a.mat", "x")
    assert first.dtype == dtype
