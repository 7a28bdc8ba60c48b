"""HDF5 files of anndata, pandas and PyTables: sparse rows, categorical columns, and fields of tables are leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from penstock_command import main
from penstock_server import Feed
from penstock_server.sources.hdf5 import reader, views
from tests.conftest import Serve
from tests.reference.one_stream import one_stream

ROWS, GENES = 90, 7
DENSE = np.where(np.random.default_rng(0).random((ROWS, GENES)) < 0.3, np.arange(ROWS * GENES).reshape(ROWS, GENES), 0)
RECORDS = np.zeros(ROWS, [("index", "<i8"), ("a", ">f8"), ("name", "S4"), ("box", "<f4", (2, 2))])
RECORDS["index"], RECORDS["a"], RECORDS["name"] = np.arange(ROWS), np.arange(ROWS) / 2, np.arange(ROWS).astype("S4")
RECORDS["box"] = np.arange(ROWS * 4).reshape(ROWS, 2, 2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sparse(
    file: h5py.File, name: str, kind: str = "csr_matrix", shape: tuple[int, int] = DENSE.shape, **changes: Any
) -> None:
    """Write a matrix as anndata does."""
    group = file.create_group(name)
    group.attrs.update({"encoding-type": kind, "encoding-version": "0.1.0", "shape": shape})
    row, column = np.nonzero(DENSE)
    parts = {
        "data": DENSE[row, column].astype(np.float32),
        "indices": column.astype(np.int32),
        "indptr": np.searchsorted(row, np.arange(ROWS + 1)).astype(np.int32),
    }
    for part, values in {**parts, **changes}.items():
        group.create_dataset(part, data=values, chunks=(len(values),), compression="gzip")


def cells(name: str = "cells.h5ad", **changes: Any) -> str:
    with h5py.File(name, "w") as file:
        sparse(file, "X", **changes)
        kind = file.create_group("obs/kind")
        kind.attrs["encoding-type"] = "categorical"
        kind["codes"], kind["categories"] = np.arange(ROWS, dtype=np.int8) % 3, ["B", "NK", "T"]
        file["var/length"] = np.arange(GENES)
    return name


def table(name: str = "frame.h5") -> str:
    """Write a table and its indices as PyTables does."""
    with h5py.File(name, "w") as file:
        file.create_dataset("df/table", data=RECORDS, chunks=(10,), compression="gzip")
        index = file.create_group("df/_i_table/a")
        file["df/_i_table"].attrs["CLASS"] = np.bytes_("TINDEX")
        index["sorted"] = np.zeros(1000)
    return name


def read(*args: Any, **options: Any) -> list[Any]:
    feed = Feed.from_hdf5(*args, batch_size=4, **options)
    splits: Any = feed.splits
    generate: Any = feed.generate
    return [sample for split in splits() for sample in generate(split)]


def test_sparse_rows_are_served_dense_with_any_workers_through_a_kill_and_a_resume(folder: Path, serve: Serve) -> None:
    cells()
    table()
    source = """
        import os
        from penstock_server import Feed
        leaves = {"x": "X", "kind": "obs/kind"}
        feed = Feed.from_hdf5(os.environ["DATA"] + "/cells.h5ad", leaves, batch_size=8, shuffle=40, seed=3)
        """
    batches = one_stream(serve, source, folder)
    x = np.concatenate([batch["x"] for batch in batches])
    assert x.dtype == np.float32
    assert sorted(map(tuple, x)) == sorted(map(tuple, DENSE))


@pytest.mark.parametrize("rows", [None, (3, 17), (0, 1)])
@pytest.mark.parametrize(("slab", "dense"), [(1, 1), (1 << 20, 100), (1 << 20, 256 << 10)])
def test_sparse_rows_are_those_of_the_matrix(rows: Any, slab: int, dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_SLAB", slab)
    monkeypatch.setattr(views, "_DENSE", dense)
    found = read(cells(), ("X", "obs/kind"), rows=rows)
    start, stop = rows or (0, ROWS)
    np.testing.assert_array_equal([row for row, _ in found], DENSE[start:stop])
    assert [kind for _, kind in found] == [number % 3 for number in range(start, stop)]


def test_values_of_one_place_are_added_as_scipy_adds_them() -> None:
    indptr = np.full(ROWS + 1, 3)
    indptr[0] = 0
    changes = {"data": np.float32([1, 2, 4]), "indices": [5, 5, 0], "indptr": indptr}
    assert read(cells(**changes), "X")[0].tolist() == [4, 0, 0, 0, 0, 3, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": np.arange(5)}, r"cells\.h5ad: rows 0 to .* of 'X' cannot be read \(indptr has 5 numbers, not 91"),
        ({"indptr": np.arange(ROWS + 1)[::-1]}, r"indptr does not ascend, or a row has more values than columns"),
        ({"indptr": np.arange(ROWS + 1) * 1000}, r"indptr does not ascend, or a row has more values than columns"),
        ({"indptr": np.arange(ROWS + 1) * 7}, r"data and indices have fewer values than indptr says"),
        ({"indices": np.full(np.count_nonzero(DENSE), 7)}, r"an index is not a column from 0 to 6"),
    ],
)
def test_a_damaged_matrix_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OSError, match=message):
        read(cells(**changes), "X")


def test_a_matrix_by_columns_is_refused_with_what_to_do() -> None:
    cells(kind="csc_matrix")
    with pytest.raises(TypeError, match=r"cells\.h5ad: 'X' is a sparse matrix that is stored by columns .*tocsr\(\)"):
        read("cells.h5ad", "X")
    assert "'X' is a sparse matrix that is stored by columns" in CliRunner().invoke(main, ["peek", "cells.h5ad"]).output


@pytest.mark.parametrize("slab", [1, 100, 1 << 20])
def test_fields_of_a_table_are_leaves(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_SLAB", slab)
    found = read(table(), {"a": "df/table/a", "n": "/df/table/name", "b": "df/table/box"})
    assert [row["a"] for row in found] == RECORDS["a"].tolist()
    assert found[0]["a"].dtype == np.dtype("=f8")
    assert [row["n"] for row in found] == RECORDS["name"].tolist()
    np.testing.assert_array_equal([row["b"] for row in found], RECORDS["box"])


def test_each_slab_of_a_table_is_read_once_for_all_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    table()
    slabs = []
    read_slab = h5py.Dataset.__getitem__

    def counted(self: Any, rows: Any, *more: Any) -> Any:
        slabs.append(self.name)
        return read_slab(self, rows, *more)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counted)
    read("frame.h5", ("df/table/a", "df/table/index", "df/table/box"), split_rows=30)
    assert slabs == ["/df/table"] * 3


def test_tables_of_one_name_in_two_files_are_two_tables() -> None:
    for number in range(2):
        with h5py.File(f"{number}.h5", "w") as file:
            file["t"] = np.full(ROWS, number, [("x", "i4")])
    with h5py.File("both.h5", "w") as file:
        file["a"], file["b"] = h5py.ExternalLink("0.h5", "/t"), h5py.ExternalLink("1.h5", "/t")
    assert [tuple(row) for row in read("both.h5", ("a/x", "b/x"))] == [(0, 1)] * ROWS


def test_attributes_of_any_kind_are_no_obstacle() -> None:
    with h5py.File("a.h5", "w") as file:
        file["x"] = np.arange(ROWS)
        for kind, value in {"text": "TINDEX", "number": 5, "array": np.zeros(3)}.items():
            file.create_group(kind).attrs.update({"CLASS": value, "encoding-type": value, "pandas_type": value})
        file["x"].attrs["PSEUDOATOM"] = "text"
    assert f"{ROWS} samples" in CliRunner().invoke(main, ["peek", "a.h5"]).output
    with h5py.File("empty.h5ad", "w") as file:
        sparse(file, "X", shape=(0, GENES), indptr=np.zeros(1), data=np.zeros(1), indices=np.zeros(1))
    with pytest.raises(ValueError, match="no samples to read"):
        read("empty.h5ad", "X")


def test_a_table_or_a_field_that_is_not_there_is_named() -> None:
    with pytest.raises(TypeError, match=r"'df/table' is a table of records: name its fields, such as 'df/table/index'"):
        read(table(), "df/table")
    with pytest.raises(
        LookupError, match=r"frame\.h5 has no dataset 'df/table/c'; .*a table with the fields index, a,"
    ):
        read("frame.h5", "df/table/c")


def test_parts_of_a_sparse_matrix_in_other_files_are_files_on_which_it_depends(folder: Path) -> None:
    (folder / "other").mkdir()
    cells("other/parts.h5")
    with h5py.File("cells.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": DENSE.shape})
        for part in ("data", "indices", "indptr"):
            group[part] = h5py.ExternalLink("../parts.h5", f"/X/{part}")
    with pytest.raises(FileNotFoundError, match=r"'X' is a link to '/X/data' in \.\./parts\.h5"):
        read("cells.h5ad", "X")
    (folder / "other/parts.h5").rename(folder.parent / "parts.h5")
    with pytest.raises(PermissionError, match=r"which is outside the file's folder"):
        read("cells.h5ad", "X")
    np.testing.assert_array_equal(read("cells.h5ad", "X", allow_outside=True), DENSE)
    (folder.parent / "parts.h5").unlink()


def test_peek_shows_the_fields_of_a_frame_and_the_categories_of_a_column() -> None:
    text = CliRunner().invoke(main, ["peek", table()]).output
    assert "--leaf a=df/table/a" in text
    assert "sorted" not in text
    text = CliRunner().invoke(main, ["peek", cells()]).output
    assert "cell" in text
    assert "codes of 3 categories:" in text
    assert "share chunks" not in text
    assert "sparse matrix 'X' (CSR), float32[90, 7]" in text
    assert "--leaf kind=obs/kind" in text


def test_peek_leaves_out_what_pandas_keeps_beside_the_columns() -> None:
    with h5py.File("fixed.h5", "w") as file:
        frame = file.create_group("df")
        frame.attrs["pandas_type"] = np.bytes_("frame")
        frame["axis0"] = np.array([b"a", b"b"])
        frame["block0_items"] = np.array([b"a", b"b"])
        frame["block0_values"] = np.zeros((ROWS, 2))
        pickled = frame.create_dataset("block1_values", (1,), h5py.vlen_dtype(np.uint8))
        pickled.attrs["PSEUDOATOM"] = np.bytes_("object")
    text = CliRunner().invoke(main, ["peek", "fixed.h5"]).output
    assert f"{ROWS} samples" in text
    assert "'df/block0_values' holds the columns a, b" in text
    assert "'df/axis0' holds names of columns" in text
    assert "'df/block1_values' holds pickled Python objects" in text


def test_peek_does_not_take_the_groups_of_samples_for_leaves() -> None:
    with h5py.File("samples.h5", "w") as file:
        for number in range(30):
            file[f"s{number}/image"] = np.zeros((8, 8))
    text = CliRunner().invoke(main, ["peek", "samples.h5"]).output
    assert "has 30 datasets such as 's0/image' and 's1/image', as if each were a sample" in text
    assert "Groups of an HDF5 file" in text
