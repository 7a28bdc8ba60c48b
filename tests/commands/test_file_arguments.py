"""What the arguments of `penstock serve` and `check` say about data files: the message names what works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from penstock_command import main
from penstock_server import Feed
from penstock_server.cli.file_options import targets_of
from penstock_server.targets.file_target import load_target


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ("x.tar.gz", {}, "x.tar.gz is tar (WebDataset), and needs --leaf NAME=EXTENSION for each leaf of a sample"),
        ("x.tgz", {}, "such as --leaf image=jpg: penstock peek x.tgz proposes them"),
        ("cells.h5ad", {}, "cells.h5ad is HDF5, and needs --leaf NAME=DATASET"),
        ("x.npy", {"batch_size": None}, "x.npy is a data file, and needs --batch-size"),
        ("x.tfrecord", {"leaves": ("a=b",)}, "`penstock peek x.tfrecord` prints one"),
        ("x.npy x.tgz", {}, "one format, and x.npy is NumPy and x.tgz is tar (WebDataset)"),
        ("x.npy scenes.py:feed", {}, "x.npy is a data file, and scenes.py:feed is a feed"),
        ("tcp://user:secret@h:1/f", {}, "tcp://...@h:1/f is the address of a running daemon"),
        ("x.npyy", {}, "x.npyy: no such file. Did you mean x.npy?"),
        ("table.xls", {}, "table.xls: no such file; expected a data file, which ends in .h5, .hdf5"),
        ("notes.xyz", {}, "notes.xyz: no kind of file that Penstock reads"),
        ("notes.xyz", {}, "Other files need a Feed with a generator"),
        ("x.npy photo.jpg", {}, "photo.jpg: no such file; expected a data file"),
        ("localhost:5555", {}, "localhost:5555 is the address of a running daemon, not a feed or data file to serve"),
        ("user:secret@h:1/f", {}, "...@h:1/f is the address of a running daemon"),
        ("[::1]:5555", {}, "[::1]:5555 is the address of a running daemon"),
        ("tcp://loader:5555/train", {}, "penstock.connect('tcp://loader:5555/train') reads from it"),
        ("s3://bucket/a.pkl", {}, "s3://bucket/a.pkl is a pickle"),
        ("s3://bucket/a.xyz", {}, "s3://bucket/a.xyz: expected the URL of a data file, which ends in .h5"),
        ("shards", {}, "shards is a directory: give the files in it"),
    ],
)
def test_a_mistake_is_named_with_what_works(
    arguments: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.arange(3))
    (tmp_path / "cells.h5ad").write_bytes(b"\x89HDF\r\n\x1a\n")
    (tmp_path / "notes.xyz").write_text("?")
    (tmp_path / "shards").mkdir()
    with pytest.raises(click.UsageError) as raised:
        targets_of(arguments.split(), {"batch_size": 2, "leaves": (), "name": None, **options})
    assert message in raised.value.message


@pytest.mark.parametrize("words", [["check", ""], ["serve", " "], ["peek", ""]])
def test_an_empty_name_is_said_to_be_empty(words: list[str]) -> None:
    ended = CliRunner().invoke(main, words)
    assert ended.exit_code
    assert re.search("the name( of the feed or data file)? is empty, perhaps as a variable is not set", ended.output)
    assert "no such file" not in ended.output


def test_a_parquet_file_of_no_rows_is_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "none.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"x": pa.array([], pa.int64())}), path)
    listed: Any = Feed.from_parquet(str(path), batch_size=2).splits
    with pytest.raises(ValueError, match=r"no samples to read: .*none.parquet has no rows"):
        listed()


def test_what_cannot_be_read_is_left_out_if_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("x,y\n1,2\n3,4\n")
    options = {"batch_size": 2, "leaves": (), "name": None, "on_error": "skip"}
    (target,) = targets_of([str(tmp_path / "rows.csv")], options)
    feed: Any = load_target(target, str)
    assert feed.on_error.action == "skip"


def test_a_missing_data_file_is_compared_with_those_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("digits.npy", np.arange(3))
    listed: Any = Feed.from_numpy("digts.npy", batch_size=2).splits
    with pytest.raises(FileNotFoundError, match=r"digts\.npy: no such file in .*\. Did you mean digits\.npy\?"):
        listed()
