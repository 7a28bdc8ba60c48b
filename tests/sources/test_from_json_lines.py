"""`Feed.from_json_lines`: files with a JSON object on each line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import penstock
from penstock_command import main
from penstock_server import Feed, Pad
from penstock_server.sources.json_lines import reader
from penstock_server.sources.splits.byte_range import ByteRange
from tests.conftest import Serve
from tests.reference.one_stream import one_stream

ROWS = [{"id": number, "text": f"row {number} ü\n", "box": [number, 2]} for number in range(200)]


def lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str | bytes, name: str = "a.jsonl") -> str:
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def read(*args: Any, **options: Any) -> list[Any]:
    feed = Feed.from_json_lines(*args, batch_size=4, **options)
    splits: Any = feed.splits
    generate: Any = feed.generate
    return [sample for split in splits() for sample in generate(split)]


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(folder: Path, serve: Serve) -> None:
    write(lines(ROWS))
    source = """
        import os
        from penstock_server import Feed
        from penstock_server.sources.json_lines import reader
        reader._LEAST = reader._MOST = 700
        files = os.environ["DATA"] + "/*.jsonl"
        feed = Feed.from_json_lines(files, {"x": "id", "b": "box"}, batch_size=16, shuffle=100, seed=3)
        """
    batches = one_stream(serve, source, folder)
    assert sorted(np.concatenate([batch["x"] for batch in batches])) == list(range(200))
    for batch in batches:
        np.testing.assert_array_equal(batch["b"][:, 0], batch["x"])


@pytest.mark.parametrize("about", [1, 37, 80, 300, 10_000])
@pytest.mark.parametrize("end", ["\n", "", "\r\n", "\n\n"])
def test_ranges_of_any_length_have_each_line_once(about: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_LEAST", about)
    monkeypatch.setattr(reader, "_MOST", about)
    text = lines(ROWS[:20])
    write(text.rstrip("\n") if not end else text.replace("\n", end))
    assert read("a.jsonl", "id") == list(range(20))


def test_values_are_numbers_text_arrays_and_dicts() -> None:
    row = {"i": 3, "f": 0.5, "b": True, "t": "ü", "l": [[1, 2], [3, 4]], "w": ["a", "bc"], "o": {"x": [1.5]}}
    (sample,) = read(write(lines([row])))
    assert [sample[key] for key in "ifbt"] == [3, 0.5, True, "ü"]
    assert (sample["l"].tolist(), sample["l"].dtype) == ([[1, 2], [3, 4]], np.int64)
    assert sample["w"].tolist() == ["a", "bc"]
    assert sample["o"]["x"].tolist() == [1.5]
    assert read("a.jsonl", ("o.x", "i"))[0][1] == 3
    sample = read("a.jsonl", ("i", "l"), dtypes={"i": "float32", "l": np.uint8})[0]
    assert [value.dtype for value in sample] == [np.float32, np.uint8]


def test_texts_in_lists_keep_their_nuls_and_lists_may_be_empty() -> None:
    texts = [["a\0", "b"], ["\0", ""], [["x\0", "y"], ["z", ""]]]
    assert [value.tolist() for value in read(write(lines([{"t": text} for text in texts])), "t")] == texts
    tokens = [[1, 2], [], [3]]
    write(lines([{"t": token, "m": [True] * len(token)} for token in tokens]))
    for batching in ("pad", Pad(value=0)):
        with penstock.connect(
            Feed.from_json_lines("a.jsonl", batch_size=3, batching=batching), workers=0
        ) as connection:
            batch = next(connection.batches())
        assert batch["t"].tolist() == [[1, 2], [0, 0], [3, 0]]
        assert batch["m"].tolist() == [[True, True], [False, False], [True, False]]


def test_a_transform_gets_what_cannot_be_a_leaf() -> None:
    chat = {"messages": [{"role": "user", "text": "hi"}], "tags": [[1], [2, 3]], "score": None, "ids": [1, 2]}
    write(lines([chat] * 3))
    feed = Feed.from_json_lines("a.jsonl", batch_size=3, transform=lambda row: row["messages"][0]["text"])
    with penstock.connect(feed, workers=0) as connection:
        assert next(connection.batches()).tolist() == [b"hi"] * 3
    found = read("a.jsonl", transform=lambda row: row)[0]
    assert (found["messages"], found["tags"], found["score"]) == (chat["messages"], chat["tags"], None)
    assert found["ids"].dtype == np.int64
    with pytest.raises(
        ValueError, match=r"a list must hold numbers or text, and no null or object; or give transform="
    ):
        read("a.jsonl", "messages")


def test_compressed_files_are_read() -> None:
    write(gzip.compress(lines(ROWS[:100]).encode()) + gzip.compress(lines(ROWS[100:]).encode()), "a.jsonl.gz")
    assert read("a.jsonl.gz", "text") == [row["text"] for row in ROWS]


def test_numbers_in_lists_of_lists_get_a_dtype() -> None:
    write('{"x": [[1, 2], [3]]}\n{"x": [[1, 2], [3, 4]]}\n{"x": [[]]}\n{"x": []}\n')
    uneven, even, *empty = read("a.jsonl", "x", dtypes={"x": "float32"})
    assert [(row.dtype, row.tolist()) for row in uneven] == [(np.float32, [1, 2]), (np.float32, [3])]
    assert (even.dtype, even.tolist()) == (np.float32, [[1, 2], [3, 4]])
    assert [(row.dtype, row.shape) for row in empty] == [(np.float32, (1, 0)), (np.float32, (0,))]


@pytest.mark.parametrize(
    "text",
    [
        *("0", "-0", "-0.0", "1E5", "1e23", "2.5e-324", "1e400", "1e-400", "9007199254740993.0", "NaN", "-Infinity"),
        *("18446744073709551615", "18446744073709551616", "-9223372036854775809", "true", '"\\u0000"', '"\\ud800"'),
        *('"ü"', '"\\/"', "[1, [2.5, {}]]", '{"a": 1, "a": 2}'),
    ],
)
def test_a_line_is_what_python_makes_of_it(text: str) -> None:
    line = f'{{"x": {text}}}\r\n'
    split = ByteRange(write(line), 0, None, len(line.encode()))
    ((_, found),) = reader.objects(split)
    assert repr(found) == repr(json.loads(line))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1}\n{"id": }\n', r"a\.jsonl: the line at byte 10 is not JSON \(JSONDecodeError"),
        ('[\n{"id": 1}\n]\n', r"the line at byte 0 is not JSON .*: is the file one JSON document\? Write one object a"),
        ('{"id": 1}\n[2]\n', r"the line at byte 10 is no JSON object, but \[2\]: write objects"),
        ('{"id": 1}\n{"no": 1}\n', r"the line at byte 10 has no key 'id'; its keys are 'no'"),
        ('{"id": null}\n', r"the line at byte 0: 'id' is None: an array cannot hold null"),
        ('{"id": [1, null]}\n', r"a list must hold numbers or text, and no null or object"),
        ('{"id": %s}\n' % ("[" * 17 + "]" * 17), r"its lists are nested more than 16 deep: flatten them"),
        ('{"id": [%s, []]}\n' % ("[" * 900 + "1" + "]" * 900), r"its lists are nested more than 16 deep: flatten them"),
        ('{"id": [[1], null]}\n', r"a list must hold numbers or text, and no null"),
        ('{"id": [[1], 2]}\n', r"a list holds both lists and other values: write two lists"),
        ('{"id": [[[1], [2, 3]], [["a"], [4]]]}\n', r"a list mixes text and numbers: write two lists"),
        ('{"id": ["a", 1]}\n', r"a list mixes text and numbers: write two lists"),
        ('{"id": [9223372036854775808, -1]}\n', r"its integers need more than 64 bits: write them as text"),
        ('{"id": [18446744073709551616]}\n', r"its integers need more than 64 bits: write them as text"),
        ("[" * 100_000 + "\n", r"is not JSON \(RecursionError"),
        (b'{"id": "\xff"}\n', r"is not JSON \(UnicodeDecodeError"),
        (gzip.compress(lines(ROWS).encode(), mtime=0)[:-30], r"a\.jsonl is truncated or damaged \(.+\): copy it again"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(text: str | bytes, message: str) -> None:
    with pytest.raises((OSError, ValueError), match=message):
        read(write(text), "id")


def test_dtypes_are_checked() -> None:
    write('{"id": 300, "t": "x"}\n')
    with pytest.raises(ValueError, match=r"'id' is 300: uint8 cannot hold it"):
        read("a.jsonl", "id", dtypes={"id": "uint8"})
    with pytest.raises(ValueError, match=r"'t' is 'x': dtypes= cannot make int64 of it"):
        read("a.jsonl", "t", dtypes={"t": "int64"})
    write('{"id": 70000}\n', "b.jsonl")
    with pytest.raises(ValueError, match=r"'id' is 70000: float16 cannot hold it"):
        read("b.jsonl", "id", dtypes={"id": "float16"})
    with pytest.raises(TypeError, match="dtypes= takes a dtype of numbers for 't'"):
        read("a.jsonl", "t", dtypes={"t": "words"})


def test_a_line_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    text = write('{"id": 1}\n')
    monkeypatch.setattr(reader, "MOST_LINE", 10)
    assert read(text, "id") == [1]
    monkeypatch.setattr(reader, "MOST_LINE", 9)
    with pytest.raises(ValueError, match="the line at byte 0 has more than 0 MiB, and lines are read as a whole"):
        read(text, "id")


def test_peek_finds_the_keys_that_all_lines_have_and_its_module_serves_them() -> None:
    rows = [{"id": number, "score": number if number % 2 else 0.5, "odd": None} for number in range(20)]
    rows[3]["more"] = 1
    write(lines(rows))
    text = CliRunner().invoke(main, ["peek", "a.jsonl"]).output
    assert "score: float64" in text
    assert "'odd' is null in 20 of the first 20 lines" in text
    assert "'more' is missing in 19 of the first 20 lines" in text
    names: dict[str, Any] = {}
    exec(text[text.index("from penstock_server import Feed") :], names)
    splits, generate = names["feed"].splits, names["feed"].generate
    assert [*generate(splits()[0])][1] == {"id": 1, "score": 1.0}


def test_what_peek_proposes_leaves_out_the_columns_that_cannot_be_served() -> None:
    write('{"a": 1, "b": "t", "c": [1, "x"]}\n{"a": 2, "b": 3, "c": [1, 2]}\n')
    text = CliRunner().invoke(main, ["peek", "a.jsonl"]).output
    assert "'b' its dtype differs from sample to sample" in text
    assert "--leaf a=a " in text
    names: dict[str, Any] = {}
    exec(text[text.index("from penstock_server import Feed") :], names)
    feed = names["feed"]
    assert [sample for split in feed.splits() for sample in feed.generate(split)] == [{"a": 1}, {"a": 2}]
