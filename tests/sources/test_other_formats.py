"""Files that Penstock does not serve get an answer that names them and the next step."""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from penstock_command import main
from penstock_server import Feed
from penstock_server.cli.file_options import targets_of
from penstock_server.sources import other_formats
from penstock_server.sources.other_formats import words_for
from tests.docs.pages import DOCS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("a.png", b"x")
    return stream.getvalue()


COCO = json.dumps({"images": [{"id": 1}], "annotations": []}).encode()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.pkl", b"?", r"x\.pkl is a pickle, which can run any code .* as in the recipe 'Pickles"),
        ("x.bin", pickle.dumps({"a": 1}, protocol=4), r"x\.bin is a pickle"),
        ("x.pt", zipped(), r"x\.pt is a file of PyTorch, which is a pickle"),
        ("x.safetensors", b"?", r"Convert it to \.npz once, as in the recipe 'Safetensors'"),
        ("scan", bytes(128) + b"DICM", r"scan is a DICOM file\. Read it with pydicom"),
        ("x.nii.gz", b"\x1f\x8b", r"x\.nii\.gz is a NIfTI file"),
        ("x.tar.zst", b"?", r"Decompress it with zstd -d x\.tar\.zst"),
        ("x.xlsx", zipped(), r"Read it with pandas\.read_excel\('x\.xlsx'\)"),
        ("x.zip", zipped(), r"x\.zip is a zip archive\. Unpack it"),
        ("x.wav", b"RIFF\0\0\0\0WAVE", r"a sound recording\. .* the recipe 'Audio'"),
        ("x", b"\0\0\0\x18ftypmp42", r"x is a video\. .* the recipe 'Video'"),
        ("x.dat", b"SQLite format 3\0", r"x\.dat is a SQLite database"),
        ("x.nc", b"CDF\x01", r"a netCDF 3 file, which is not HDF5\. Convert it once"),
        ("x.png", b"\x89PNG\r\n\x1a\n", r"x\.png is one image \(PNG\)\. Give the folder of all images"),
        ("notes.txt", b"some words", r"notes\.txt is text\. .* the recipe 'Lines of text'"),
        ("a.json", b'{"x": 1}\n{"x": 2}\n', r"a\.json is JSON lines\. Rename it to a\.jsonl"),
        ("a.json", b'[\n {"x": 1}]', r"Write an object on each line, such as with jq -c '\.\[\]' a\.json > a\.jsonl"),
        ("coco.json", COCO, r"annotations such as those of COCO in a module, as in the recipe 'Lists of dicts'"),
        ("a.json", b'{"x": {"y": 1}}', r"with json\.load, and give a list of samples to Feed"),
    ],
)
def test_each_is_named_by_peek_serve_and_the_constructor(name: str, data: bytes, message: str) -> None:
    Path(name).write_bytes(data)
    assert re.search(message, CliRunner().invoke(main, ["peek", name]).output)
    with pytest.raises(click.UsageError) as raised:
        targets_of([name], {"batch_size": 2, "leaves": (), "name": None})
    assert re.search(message, raised.value.message)
    with pytest.raises(ValueError, match=message):
        Feed.from_files(name, batch_size=2)


@pytest.mark.parametrize("name", ["x.h5", "x.parquet", "x.csv", "x.npz"])
def test_what_stands_in_the_place_of_data_is_named(name: str) -> None:
    for data, message in (
        (b"version https://git-lfs.github.com/spec/v1\n", f"{name} is a Git LFS pointer, not the data. Fetch the data"),
        (b"<!DOCTYPE html><html>404</html>", f"{name} is an HTML page, not the data. A download has failed"),
    ):
        Path(name).write_bytes(data)
        assert message in CliRunner().invoke(main, ["peek", name]).output
        with pytest.raises(click.UsageError) as raised:
            targets_of([name], {"batch_size": 2, "leaves": (), "name": None})
        assert message in raised.value.message


def test_a_directory_of_such_files_is_named(folder: Path) -> None:
    (folder / "sounds").mkdir()
    (folder / "sounds/a.wav").write_bytes(b"RIFF\0\0\0\0WAVE")
    assert "(it has 1 *.wav): sounds/a.wav is a sound recording" in CliRunner().invoke(main, ["peek", "sounds"]).output


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["a.tfrecord-00000-of-00002", "a.tfrecord-00001-of-00002"], "shards/*.tfrecord*"),
        (["a.tar.gz", "b.tar.gz", "c.csv.gz"], "shards/*.tar.gz"),
        (["x/a.npz", "x/b.npz"], "shards/**/*.npz"),
    ],
)
def test_a_directory_of_data_files_is_named_with_a_pattern_of_them(
    names: list[str], pattern: str, folder: Path
) -> None:
    for name in names:
        (folder / "shards" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "shards" / name).write_bytes(b"?")
    assert f"give the files in it, such as '{pattern}' (2)" in CliRunner().invoke(main, ["peek", "shards"]).output


def test_the_weights_of_a_keras_model_are_not_taken_for_a_dataset(folder: Path) -> None:
    with h5py.File(folder / "model.h5", "w") as file:
        file.attrs["keras_version"] = "3.0"
        file["dense/kernel"] = np.zeros((20, 5))
    assert "it holds the weights of a Keras model" in CliRunner().invoke(main, ["peek", "model.h5"]).output


def test_a_missing_file_is_compared_with_those_that_are_there() -> None:
    np.save("train.npy", np.arange(3))
    assert "Did you mean train.npy?" in CliRunner().invoke(main, ["peek", "trian.np"]).output


def test_a_folder_of_kinds_of_files_is_not_taken_for_classes(folder: Path) -> None:
    image: Any = pytest.importorskip("PIL.Image")
    for name in ("images", "labels"):
        (folder / "yolo" / name).mkdir(parents=True)
    image.new("RGB", (4, 4)).save(folder / "yolo/images/0.png")
    text = " ".join(CliRunner().invoke(main, ["peek", "yolo"]).output.split())
    assert "look like kinds of files, not like classes: give the folder of images, such as yolo/images" in text


def test_numbers_and_times_that_are_text_are_told(folder: Path) -> None:
    rows = [f'"{1000 + i:,}";{i},5;2024-01-{i % 28 + 1:02} 10:00:00;n{i % 3}' for i in range(60)]
    (folder / "a.csv").write_text("big;price;when;name\n" + "\n".join(rows) + "\n")
    text = " ".join(CliRunner().invoke(main, ["peek", "a.csv"]).output.split())
    assert "numbers have commas between thousands: write them without" in text
    assert "numbers have a decimal comma: write them with a point" in text
    assert "it holds times: a transform= can make numbers of them" in text
    assert 'classes="name"' in text


def test_columns_of_parquet_files_that_cannot_be_served_say_what_to_write(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"t": pa.array([0], pa.timestamp("us")), "m": pa.array([[("a", 1)]], pa.map_("string", "int64"))})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "a.parquet")
    text = " ".join(CliRunner().invoke(main, ["peek", "a.parquet"]).output.split())
    assert (
        "'t' has type timestamp[us], which cannot be served: write it as numbers, such as column.cast('int64')" in text
    )
    assert "write a column of lists for each field" in text


def test_recipes_that_messages_name_are_those_of_the_page() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "recipes.md").read_text(), re.MULTILINE)
    sources = Path(other_formats.__file__).parent
    named = [
        title for file in sources.rglob("*.py") for title in re.findall(r"recipe\(['\"](.+?)['\"]\)", file.read_text())
    ]
    assert len(named) > 5
    assert {*named} <= {*headings}


def test_a_file_of_an_unknown_kind_is_not_guessed(folder: Path) -> None:
    (folder / "x.ply").write_text("ply\n")
    assert words_for("x.ply") == ""
    assert words_for("missing.bin") == ""
