"""`Feed.from_csv`: tables with a header, whose columns may hold the paths of images."""

from __future__ import annotations

import csv
import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from penstock_command import main
from penstock_server import Feed
from penstock_server.sources.tables import table
from penstock_server.targets.file_target import load_target, make_target
from tests.conftest import Serve
from tests.reference.one_stream import one_stream

TABLE = "id,weight,tame,breed\n1,0.5,True,dog\n-2,3e2,false,cat\n30,7,TRUE,dog\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str | bytes, name: str = "t.csv") -> str:
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def rows(*args: Any, **options: Any) -> list[Any]:
    source: Any = Feed.from_csv(*args, batch_size=2, **options).generate
    return [source[index] for index in range(len(source))]


def column(text: str, name: str = "x", **options: Any) -> list[Any]:
    return rows(write(text), name, **options)


def test_columns_have_the_dtype_that_all_of_their_cells_fit() -> None:
    samples = rows(write(TABLE))
    assert [sample["id"] for sample in samples] == [1, -2, 30]
    assert [sample["weight"] for sample in samples] == [0.5, 300, 7]
    assert [sample["tame"] for sample in samples] == [True, False, True]
    assert [sample["breed"] for sample in samples] == ["dog", "cat", "dog"]
    kinds = [getattr(samples[0][name], "dtype", str) for name in ("id", "weight", "tame", "breed")]
    assert kinds == [np.int64, np.float64, np.bool_, str]


def test_only_a_star_makes_a_pattern_and_an_exact_name_is_never_one() -> None:
    names = [*(f"w[kg]{number}" for number in range(8)), "wk0", "a?", "ab", "c*", "cd"]
    file = write(f"{','.join(names)}\n{','.join(map(str, range(len(names))))}\n")
    assert rows(file, "w[kg]*")[0].tolist() == list(range(8))
    assert rows(file, "*?")[0].shape == (1,)
    assert rows(file, ("w[kg]0", "a?", "c*")) == [(0, 9, 11)]
    assert '"w[kg]": "w[kg]*"' in CliRunner().invoke(main, ["peek", file]).output


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["007", "010"], ["007", "010"]),
        (["0", "10"], [0, 10]),
        (["0.5", "-0.25"], [0.5, -0.25]),
        (["1_000", "2"], ["1_000", "2"]),
        (["12345678901234567890", "12345678901234567891"], [12345678901234567890, 12345678901234567891]),
        (["12345678901234567890", "-1"], ["12345678901234567890", "-1"]),
        (["123456789012345678901", "1"], ["123456789012345678901", "1"]),
        (["123456789012345678901", "0.5"], [123456789012345678901.0, 0.5]),
        (["", "a"], ["", "a"]),
        (['"a, ""b""\nc"', "d"], ['a, "b"\nc', "d"]),
        (["ü", "猫"], ["ü", "猫"]),
    ],
)
def test_cells_that_only_look_like_numbers_are_text(cells: list[str], values: list[Any]) -> None:
    assert column("y,x\n" + "".join(f"1,{cell}\n" for cell in cells)) == values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", b"\xef\xbb\xbfa,b\r\n1,x\r\n\r\n2,y"),
        ("t.csv", b"a;b\n1;x\n2;y\n"),
        ("t.tsv", b"a\tb\n1\tx\n2\ty\n"),
        ("t.csv.gz", gzip.compress(b"a,b\n1,x\n2,y\n", mtime=0)),
        ("t.csv", gzip.compress(b"a , b\n1,x\n2,y\n", mtime=0)),
    ],
)
def test_files_are_read_as_spreadsheets_and_people_write_them(name: str, text: bytes) -> None:
    assert rows(write(text, name), ("a", "b")) == [(1, "x"), (2, "y")]


def test_a_cell_may_be_long() -> None:
    assert [len(cell) for cell in column(f"x,y\n{'a' * 300_000},1\nb,2\n")] == [300_000, 1]
    assert csv.field_size_limit() == 131072, "the limit of user code is another one"


def test_a_pattern_makes_one_array_of_its_columns() -> None:
    header = "label," + ",".join(f"pixel{number}" for number in range(12))
    write(f"{header}\n7,{','.join(map(str, range(12)))}\n8,{','.join('5' * 12)}\n")
    samples = rows("t.csv", {"x": "pixel*", "y": "label"})
    assert samples[0]["x"].tolist() == list(range(12))
    assert (samples[1]["x"].shape, samples[1]["y"]) == ((12,), 8)
    text = CliRunner().invoke(main, ["peek", "t.csv"]).output
    assert "pixel: int64[12]" in text
    assert "12 columns as one array" in text
    assert "--leaf label=label --leaf 'pixel=pixel*'" in text
    samples = rows("t.csv", {"x": "pixel*", "y": "label"}, dtypes={"pixel*": "uint8", "label": np.float32})
    assert (samples[0]["x"].dtype, samples[0]["y"].dtype) == (np.uint8, np.float32)


@pytest.mark.parametrize(
    ("early", "late", "value"),
    [
        ("1", "2.5", 1.0),
        ("1", "x", "1"),
        ("1.50", "x", "1.50"),
        ("true", "1", "true"),
        ("true", "no", "true"),
        ("", "x", ""),
        ("1", "007", "1"),
        ("9", "12345678901234567890", 9),
        ("-9", "12345678901234567890", "-9"),
        ("12345678901234567890", "-9", "12345678901234567890"),
        ("12345678901234567890", "0.5", 12345678901234567890.0),
        ("0.5", "12345678901234567890", 0.5),
    ],
)
def test_a_late_cell_of_another_kind_decides_for_the_whole_column(
    early: str, late: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_CHUNK", 8)
    samples = rows(write("x,y\n" + f"{early},1\n" * 10 + f"{late},2\n"))
    assert [sample["x"] for sample in samples[:10]] == [value] * 10
    assert [type(sample["x"]) for sample in samples] == [type(samples[0]["x"])] * 11
    assert [sample["y"] for sample in samples] == [1] * 10 + [2]


def test_a_column_may_become_wider_again_when_the_file_is_read_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_CHUNK", 4)
    assert column("x\n" + "1\n" * 4 + "-1\n" * 4 + f"{2**63}\n") == ["1"] * 4 + ["-1"] * 4 + [str(2**63)]


def test_classes_are_numbered_in_the_order_of_their_values() -> None:
    source: Any = Feed.from_csv(write(TABLE), ("id", "breed"), classes="breed", batch_size=2).generate
    assert [int(source[index][1]) for index in range(3)] == [1, 0, 1]
    assert source[0][1].dtype == np.int32
    assert source.classes == {"breed": ("cat", "dog")}
    assert source.column("breed").tolist() == [1, 0, 1]


class TestImages:
    @pytest.fixture(autouse=True)
    def photos(self, folder: Path) -> None:
        images = pytest.importorskip("PIL.Image")
        (folder / "data" / "photos").mkdir(parents=True)
        lines = ["file,id,breed"]
        for number in range(20):
            path = folder / "data" / "photos" / f"{number:03}.png"
            images.fromarray(np.full((6, 8 + number % 2, 3), number, np.uint8)).save(path)
            lines.append(f"photos/{path.name},{path.stem},{'cat dog'.split()[number % 2]}")
        write("\n".join(lines), "data/t.csv")

    def test_the_images_that_a_column_names_are_read_in_its_place(self, folder: Path, serve: Serve) -> None:
        source = """
            import os
            from penstock_server import Feed
            feed = Feed.from_csv(os.environ["DATA"] + "/data/t.csv", ("file", "breed"), images="file", size=(4, 4),
                                 classes="breed", batch_size=3, shuffle=1, seed=3)
            """
        batches = one_stream(serve, source, folder)
        values = np.concatenate([images[:, 0, 0, 0] for images, _ in batches])
        assert sorted(values) == list(range(20))
        assert values.tolist() != sorted(values)
        assert np.concatenate([labels for _, labels in batches]).tolist() == (values % 2).tolist()

    def test_a_path_may_be_made_of_a_cell(self) -> None:
        images = rows("data/t.csv", "id", images={"id": "photos/{}.png"}, size=(4, 4), mode="L")
        assert [int(image[0, 0, 0]) for image in images] == list(range(20))

    def test_a_missing_or_damaged_image_is_named_with_its_row(self, folder: Path) -> None:
        (folder / "data" / "photos" / "003.png").unlink()
        (folder / "data" / "photos" / "004.png").write_bytes(b"junk")
        source: Any = Feed.from_csv("data/t.csv", "file", images="file", batch_size=2).generate
        with pytest.raises(FileNotFoundError, match=r"003\.png: no such file\. Row 4 of data/t\.csv names it, in col"):
            source[3]
        with pytest.raises(OSError, match=r"004\.png cannot be decoded"):
            source[4]

    def test_peek_proposes_images_and_classes_and_its_command_works(self) -> None:
        text = CliRunner().invoke(main, ["peek", "data/t.csv"]).output
        assert "file: uint8[224, 224, 3], an image" in text
        assert "text of 2 values, which become numbers in their sorted order" in text
        assert 'images="file"' in text
        assert 'classes="breed"' in text
        names: dict[str, Any] = {}
        exec(text[text.index("from penstock_server import Feed") :], names)
        assert names["feed"].generate[0]["file"].shape == (224, 224, 3)
        target = make_target(["data/t.csv"], ["file"], name=None, batch_size=2, images="file", size=(5, 6))
        feed: Any = load_target(target, lambda name: None)
        assert feed.generate[0].shape == (5, 6, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv has no first line with the names of its columns"),
        ("x,y\n", r"t\.csv has no rows, only the names"),
        (
            "x,y\n1,2\n3\n",
            r"line 3 has 1 cell, and the first line 2: does a cell have a separator that is not in quotes",
        ),
        ("x,y\n1,2,3\n", r"line 2 has 3 cells, and the first line 2"),
        ("1,2\n3,4\n", r"its first line has numbers, not the names of columns \('1'\): add a line with names"),
        ("x,x\n1,2\n", r"the column 'x' is there more than once"),
        ("x,y\n1,2\n,3\n", r"row 2 of column 'x' is empty, and others are numbers: fill the empty cells"),
        ('x,y\n1,"2\n', r"line 2 is not CSV"),
        (b"x,y\n1,caf\xe9\n", r"t\.csv is not UTF-8: convert it, such as with iconv -f latin1 "),
        ("x,y\n1,2\n".encode("utf-16"), r"t\.csv is not UTF-8: convert it, such as with iconv -f utf-16 "),
        (b"x|y|z\n1|2|3\n", r"t\.csv: columns seem to be separated by '\|'.*read_csv\('t\.csv', sep='\|'\)"),
        (
            gzip.compress(b"x\n" + b"1\n" * 100_000, mtime=0)[:-20],
            r"t\.csv is truncated or damaged \(.+\): copy it again",
        ),
        ("y\n1\n", r"t\.csv has no column 'x'\. Its columns are 'y'"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(text: str | bytes, message: str) -> None:
    with pytest.raises((OSError, ValueError), match=message):
        rows(write(text), "x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": "breed", "leaves": "id"}, r"'breed' is in images=, .* not in leaves=\. Its columns are 'id', 'w"),
        ({"dtypes": {"id": "uint8"}}, r"column 'id' has values that uint8 cannot hold \(-2 to 30\)"),
        ({"dtypes": {"weight": "int32"}}, r"column 'weight' has values that int32 cannot hold \(0\.5 to 300"),
        ({"dtypes": {"breed": "int32"}}, r"column 'breed' is text, which dtypes= cannot make int32"),
        ({"dtypes": {"id": "text"}}, r"dtypes= takes a dtype of numbers for 'id'"),
        ({"images": {"id": "photos/x.jpg"}}, r"needs \{\} in PATH"),
        ({"size": 3}, r"size must be \(height, width\)"),
        ({"splits": [1]}, r"from_csv divides the files itself: leave splits= out"),
        ({"leaves": "bre*"}, r"'bre\*' takes columns of numbers, and 'breed' is text"),
    ],
)
def test_an_option_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rows(write(TABLE), options.pop("leaves", None), **options)
    with pytest.raises(ValueError, match="a feed has one CSV file"):
        Feed.from_files([write(TABLE), "u.csv"], batch_size=2)


def test_a_table_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    write(gzip.compress(TABLE.encode()))
    monkeypatch.setattr(table, "MOST_BYTES", len(TABLE))
    monkeypatch.setattr(table, "MOST_COLUMNS", 4)
    assert len(rows("t.csv")) == 3
    monkeypatch.setattr(table, "MOST_COLUMNS", 3)
    with pytest.raises(ValueError, match=r"t\.csv has 4 columns, and at most 3 are read"):
        rows("t.csv")
    monkeypatch.setattr(table, "MOST_BYTES", len(TABLE) - 1)
    with pytest.raises(ValueError, match=r"t\.csv has more than 0 MiB, and each worker would hold .* write a Parquet"):
        rows("t.csv")


def test_a_feed_sent_to_workers_has_the_rows_that_the_trainer_saw() -> None:
    source: Any = Feed.from_csv(write(TABLE), batch_size=2).generate
    Path("t.csv").unlink()
    assert pickle.loads(pickle.dumps(source))[1]["breed"] == "cat"


def test_a_float_dtype_must_hold_the_numbers() -> None:
    dtypes = {"x": "float16"}
    assert column("x\n1\ninf\nnan\n65504\n", dtypes=dtypes)[1] == np.inf
    with pytest.raises(ValueError, match=r"column 'x' has values that float16 cannot hold \(1.0 to 70000.0\)"):
        column("x\n1\n70000\nnan\ninf\n", dtypes=dtypes)
