"""A format of data files that Penstock does not have: one class, which a package registers by an entry point.

The format is written in this file alone, and all commands know its files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

import penstock
from penstock_server.formats import Format
from penstock_server.sources.registry import BUILT_IN, format_of
from tests.conftest import Daemon

ROOT = Path(__file__).resolve().parents[2]

GRIDS = """
import os
from typing import NamedTuple

import numpy as np

from penstock_server.formats import Column, Columns, Description, Format, Reader, Source, open_binary

ROWS = 10


class Part(NamedTuple):
    file: str
    start: int


def opened(file):
    with open_binary(file) as stream:
        if stream.read(4) != b"GRID":
            raise OSError(f"{file}: this is not a grid: write it again")
        return np.frombuffer(stream.read(), np.int32)


class Splits:
    def __init__(self, files, rows):
        self.files, self.rows = [files] if isinstance(files, str) else files, rows or (0, None)

    def __call__(self):
        rows = slice(*self.rows, ROWS)
        return [Part(file, start) for file in self.files for start in range(len(opened(file)))[rows]]


class Rows(Reader):
    def __init__(self, leaves):
        self.columns = Columns(leaves, "column")

    @property
    def cached_as(self):
        return self.columns

    def files_of(self, split):
        return [split.file, f"{split.file}.scale"]

    def __call__(self, split):
        with open(os.environ["READ"], "a") as read:
            read.write(f"{split.start}\\n")
        numbers = opened(split.file)[split.start : split.start + ROWS]
        with open(f"{split.file}.scale") as scale:
            columns = {"number": numbers, "scaled": numbers * float(scale.read())}
        yield from self.columns.samples([columns[name] for name in self.columns.names])


class Grid(Format):
    name = "grid"
    endings = (".grid",)
    magic = b"GRID"

    def source(self, files, leaves=None, *, rows=None):
        return Source(Splits(files, rows), Rows(leaves or {"number": "number", "scaled": "scaled"}))

    def describe(self, file):
        columns = Column("number", storage="the numbers"), Column("scaled", "value")
        return Description(columns, {"spare": "is not used"}, ("a grid of numbers",), len(opened(file)))
"""


def install(folder: Path, module: str, text: str, **formats: str) -> None:
    """Install a package with this module and these entry points into a folder."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{module}_package-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}-package\nVersion: 1.5\n")
    lines = [f"{name} = {value}" for name, value in formats.items()]
    (info / "entry_points.txt").write_text("\n".join(["[penstock.formats]", *lines, ""]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of 40 numbers, and an empty one for installed packages on the Python path."""
    (tmp_path / "a.grid").write_bytes(b"GRID" + np.arange(40, dtype=np.int32).tobytes())
    (tmp_path / "a.grid.scale").write_text("0.5")
    (tmp_path / "installed").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.setenv("READ", str(tmp_path / "read"))
    return tmp_path


@pytest.fixture
def grids(folder: Path) -> Path:
    """The folder, with the format installed."""
    install(folder / "installed", "grids", GRIDS, grid="grids:Grid")
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock` with these words."""
    command = [sys.executable, "-m", "penstock_command", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def served(folder: Path, *words: str) -> list[dict[str, float]]:
    """Return the samples that `penstock serve` with these words serves, in the order of their numbers."""
    command = [sys.executable, "-m", "penstock_command", "serve", *words, "--bind", "tcp://127.0.0.1:0"]
    daemon = Daemon([*command, "--workers", "1", "--batch-size", "4"], folder, folder / "log", dict(os.environ))
    try:
        daemon.wait_ready(1)
        with penstock.connect(daemon.url) as connection:
            rows = [
                {name: float(column[row]) for name, column in batch.items()}
                for batch in connection.batches()
                for row in range(len(next(iter(batch.values()))))
            ]
    finally:
        assert daemon.stop() == 0
    return sorted(rows, key=lambda row: row["number"])


def test_files_of_the_format_are_served(grids: Path) -> None:
    assert served(grids, "a.grid") == [{"number": number, "scaled": number / 2} for number in range(40)]
    assert served(grids, "a.grid", "--rows", "30:", "--leaf", "number=number") == [{"number": n} for n in range(30, 40)]


def test_peek_shows_them_and_proposes_a_command_and_a_module_that_serve_them(grids: Path) -> None:
    found = run(grids, "peek", "a.grid")
    assert found.returncode == 0, found.stderr
    assert "a.grid: grid, 164 bytes, 40 samples\n  a grid of numbers\n" in found.stdout
    assert "'spare' is not used" in found.stdout
    report = json.loads(run(grids, "peek", "a.grid", "--json").stdout)
    assert report["kind"] == "grid"
    assert report["storage"] == {"number": "the numbers", "value": ""}
    assert "penstock serve a.grid --leaf number=number --leaf value=scaled --batch-size" in report["command"]
    assert report["module"].splitlines()[2].startswith('feed = Feed.from_files("a.grid", {"number": "number", ')
    (grids / "feed.py").write_text(report["module"])
    with_module = [sys.executable, "-c", READ]
    read = subprocess.run(with_module, cwd=grids, capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(read.stdout) == sum(range(40))


READ = """
import json, penstock
with penstock.connect("feed.py:feed", workers=1) as connection:
    print(json.dumps(sum(int(number) for batch in connection.batches() for number in batch["number"])))
"""


def test_check_checks_them(grids: Path) -> None:
    found = run(grids, "check", "a.grid", "--batch-size", "4", "--seconds", "0.2", "--json")
    report = json.loads(found.stdout)
    assert report["target"] == "a.grid"
    assert [finding for finding in report["findings"] if finding["level"] == "error"] == []
    (grids / "a.grid").write_bytes(b"DIRG")
    found = run(grids, "check", "a.grid", "--batch-size", "4", "--seconds", "0.2")
    assert found.returncode == 1
    assert "a.grid: this is not a grid: write it again" in found.stdout + found.stderr


def test_cached_splits_are_used_until_a_file_changes_that_they_depend_on(grids: Path) -> None:
    words = "a.grid", "--cache", "cache"
    first = served(grids, *words)
    read = (grids / "read").read_text()
    assert sorted({*map(int, read.split())}) == [0, 10, 20, 30]
    (grids / "read").write_text("")
    assert served(grids, *words) == first
    assert {*(grids / "read").read_text().split()} <= {"0"}, "only a look at the first sample may read"
    (grids / "a.grid.scale").write_text("2")
    assert [row["scaled"] for row in served(grids, *words)] == [2 * number for number in range(40)]


def test_a_local_file_with_another_ending_is_recognized_by_its_first_bytes(grids: Path) -> None:
    (grids / "b.dat").write_bytes((grids / "a.grid").read_bytes())
    (grids / "b.dat.scale").write_text("3")
    with h5py.File(grids / "c.dat", "w") as file:
        file["number"] = np.arange(7)
    assert [row["scaled"] for row in served(grids, "b.dat")] == [3 * number for number in range(40)]
    report = json.loads(run(grids, "peek", "b.dat", "--json").stdout)
    assert 'format="grid"' in report["module"]
    assert json.loads(run(grids, "peek", "c.dat", "--json").stdout)["kind"] == "HDF5"
    (grids / "d.dat").write_text("none of them")
    found = run(grids, "peek", "d.dat")
    assert "expected a file that ends in .h5" in found.stderr
    assert ", .grid" in found.stderr


BAD = [
    ({"grid": "nothing:Grid"}, r"cannot be loaded: ModuleNotFoundError: No module named 'nothing'"),
    ({"grid": "grids:Nothing"}, r"cannot be loaded: AttributeError: .*Nothing"),
    ({"grid": "grids:Grid", "again": "grids:Grid"}, r"is named grid, and so is another one"),
    ({"grid": "grids:Rows.files_of"}, r"cannot be loaded: TypeError"),
    ({"grid": "builtins:dict"}, r"is not a subclass of penstock_server\.formats\.Format"),
]


@pytest.mark.parametrize(("formats", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_a_format_that_cannot_be_loaded_is_an_error_that_names_the_package(
    folder: Path, formats: dict[str, str], message: str
) -> None:
    install(folder / "installed", "grids", GRIDS, **formats)
    for words in (["peek", "a.grid"], ["serve", "a.grid", "--batch-size", "4"]):
        found = run(folder, *words)
        assert found.returncode == 1
        assert "Traceback" not in found.stderr
        assert re.search(rf"penstock: the data file format '\w+' of grids-package 1\.5 \(.*\) {message}", found.stderr)


def test_a_format_that_takes_an_ending_of_another_is_refused(folder: Path) -> None:
    install(folder / "installed", "grids", GRIDS.replace('(".grid",)', '(".grid", ".tar.gz")'), grid="grids:Grid")
    found = run(folder, "peek", "a.grid")
    assert "grids-package 1.5 (grids:Grid) has the ending .tar.gz, which is that of tar (WebDataset)" in found.stderr


def test_a_broken_format_does_not_hinder_others(folder: Path) -> None:
    install(folder / "installed", "grids", GRIDS, grid="nothing:Grid")
    np.save(folder / "x.npy", np.arange(5))
    (folder / "feed.py").write_text("from penstock_server import Feed\nfeed = Feed(range(40), batch_size=4)\n")
    assert run(folder, "peek", "x.npy").returncode == 0
    assert run(folder, "peek", "feed.py:feed").returncode == 0


def test_a_format_that_is_not_installed_is_named(folder: Path) -> None:
    (folder / "feed.py").write_text(
        "from penstock_server import Feed\nfeed = Feed.from_files('a.grid', batch_size=4)\n"
    )
    found = run(folder, "peek", "feed.py:feed")
    assert "a.grid has the ending of no format: give format=, or install the package" in found.stderr


def test_tfrecord_files_are_refused_by_serve_which_says_what_to_do(folder: Path) -> None:
    (folder / "a.tfrecord").write_bytes(b"")
    found = run(folder, "serve", "a.tfrecord")
    assert "`penstock peek a.tfrecord` prints one" in found.stderr


@pytest.mark.parametrize("format", BUILT_IN, ids=lambda format: format.name)
def test_each_ending_is_that_of_one_format(format: Format) -> None:
    for ending in format.endings:
        assert [one for one in BUILT_IN if one.matches(f"name{ending}")] == [format]
        assert format.matches(f"name{ending}*")


def test_feeds_of_a_daemon_may_have_names_that_end_like_files() -> None:
    assert format_of("s3://bucket/a.h5") is not None
    assert format_of("tcp://loader:5555/a.h5") is None


def blocks(language: str) -> Iterator[str]:
    text = (ROOT / "docs/bring-your-own-data.md").read_text()
    _, _, section = text.partition("\n### Your own format\n")
    assert section
    section, _, _ = section.partition("\n## ")
    yield from re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def test_the_example_in_the_documentation_works(folder: Path) -> None:
    (example,) = blocks("python")
    (registered,) = blocks("toml")
    group, line = registered.splitlines()
    assert group == '[project.entry-points."penstock.formats"]'
    name, value = line.replace('"', "").split(" = ")
    install(folder / "installed", value.partition(":")[0], example, **{name: value})
    (folder / "a.xyz").write_text("".join(f"{number} 1.5 2.5 {number % 3}\n" for number in range(50)))
    report = json.loads(run(folder, "peek", "a.xyz", "--json").stdout)
    assert (report["kind"], report["read"], report["error"]) == ("XYZ", 50, None)
    assert report["leaves"].keys() == {"point", "label"}
    found = served(folder, "a.xyz", "--leaf", "number=label")
    assert found == [{"number": n} for n in sorted(n % 3 for n in range(50))]
    (folder / "a.xyz").write_text("1 2\n")
    assert "a.xyz line 1: expected X Y Z LABEL, got '1 2'" in run(folder, "peek", "a.xyz").stderr
