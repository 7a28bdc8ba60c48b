"""LMDB stores: `Feed.from_files` and `penstock peek`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from penstock_command import main
from penstock_server import Feed
from penstock_server.sources import registry
from penstock_server.sources.lmdb_stores import opening
from penstock_server.sources.lmdb_stores import reader as lmdb_reader
from tests.conftest import Serve
from tests.reference.one_stream import one_stream

lmdb: Any = pytest.importorskip("lmdb")

ROWS = 200


def write(file: str = "a.lmdb", values: dict[str, bytes] | None = None, **options: Any) -> str:
    """Write a store; by default as programs for text in images do."""
    if values is None:
        values = {f"image-{number:05}": bytes([number]) * 50 for number in range(ROWS)}
        values |= {f"label-{number:05}": f"text {number}".encode() for number in range(ROWS)}
        values["num-samples"] = str(ROWS).encode()
    with lmdb.open(file, map_size=1 << 24, **options) as env, env.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key.encode(), value)
    return file


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*args: Any, **options: Any) -> list[Any]:
    feed = Feed.from_files(*args, batch_size=4, **options)
    splits: Any = feed.splits
    generate: Any = feed.generate
    found = [one for split in splits() for one in generate(split)]
    assert not opening._open  # each store is closed
    return found


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(folder: Path, serve: Serve) -> None:
    write()
    source = """
        import os
        import numpy as np
        from penstock_server import Feed
        def number(data):
            return np.int64(data.split()[1])
        leaves = {"n": "label-*", "image": "image-*"}
        decode = {"label-*": number, "image-*": lambda data: np.frombuffer(data, np.uint8)}
        feed = Feed.from_files(
            os.environ["DATA"] + "/a.lmdb", leaves, decode=decode, batch_size=16, shuffle=100, seed=3
        )
        """
    batches = one_stream(serve, source, folder)
    assert sorted(np.concatenate([batch["n"] for batch in batches])) == list(range(ROWS))
    for batch in batches:
        np.testing.assert_array_equal(batch["image"][:, 0], batch["n"])


@pytest.mark.parametrize("least", [1, 7, 64, 1000])
def test_values_of_patterns_with_the_same_key_are_a_sample(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_reader, "_LEAST", least)
    found = read(write(), ("label-*", "key", "image-*"))
    assert [label for label, _, _ in found] == [f"text {number}".encode() for number in range(ROWS)]
    assert found[3] == (b"text 3", b"label-00003", bytes([3]) * 50)


def test_a_star_stands_for_all_keys_but_those_of_programs(folder: Path) -> None:
    write("single.mdb", {"b": b"2", "a": b"1", "__len__": pickle.dumps(2)}, subdir=False)
    assert read("single.mdb", "*") == [b"1", b"2"]
    assert read("single.mdb", {"k": "key", "v": "*"}) == [{"k": b"a", "v": b"1"}, {"k": b"b", "v": b"2"}]
    (folder / "single.mdb").rename("data.bin")
    found = registry.format_of("data.bin")
    assert found is not None
    assert found.name == "LMDB"
    write("folder", {"a": b"1"})
    assert read("folder", "*") == [b"1"]


def test_several_splits_of_a_worker_share_the_store() -> None:
    feed = Feed.from_files(write(), "image-*", batch_size=4)
    splits: Any = feed.splits
    generate: Any = feed.generate
    first, second = (generate(split) for split in splits()[:2])
    assert next(first)[:1] == b"\0"
    assert next(second)[:1] == bytes([64])
    first.close()
    assert next(second)[:1] == bytes([65])
    second.close()
    assert not opening._open


def test_what_cannot_be_served_is_named() -> None:
    write("a.lmdb", {"x-1": b"1", "x-2": b"2", "y-1": b"1"})
    with pytest.raises(LookupError, match=r"a\.lmdb has no key b'y-2', which 'y-\*' stands for: correct leaves="):
        read("a.lmdb", ("x-*", "y-*"))
    with pytest.raises(ValueError, match=r"a\.lmdb: no key matches 'z-\*': its keys are b'x-1', b'x-2', b'y-1'"):
        read("a.lmdb", "z-*")
    with pytest.raises(ValueError, match=r"a pattern of keys with one \*, such as 'image-\*', or 'key', got 'x'"):
        read("a.lmdb", "x")
    with pytest.raises(ValueError, match=r"the value of key b'x-1' cannot be decoded: ValueError"):
        read("a.lmdb", "x-*", decode={"x-*": lambda data: int(data + b"?")})
    with (
        pytest.raises(OSError, match=r"is a URL, and LMDB stores are mapped into memory"),
        opening.opened("s3://bucket/a.lmdb"),
    ):
        pass


@pytest.mark.parametrize("keep", [0, 100, 4096, -4096])
def test_a_truncated_store_is_named_before_it_ends_the_process(keep: int) -> None:
    write("a.mdb", subdir=False)
    data = Path("a.mdb").read_bytes()
    Path("a.mdb").write_bytes(data[:keep])
    with pytest.raises(OSError, match=r"a\.mdb (is truncated|cannot be read as an LMDB store)"):
        read("a.mdb", "image-*")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ImportError, match=r"a\.lmdb is an LMDB store, which needs lmdb: pip install .*\[lmdb\]"):
        read("a.lmdb", "*")


def test_peek_proposes_the_patterns_of_keys() -> None:
    write()
    text = CliRunner().invoke(main, ["peek", "a.lmdb"]).output
    assert "a.lmdb: LMDB, 200 samples" in text
    assert "--leaf 'image=image-*' --leaf 'label=label-*'" in text
    names: dict[str, Any] = {}
    exec(text[text.index("from penstock_server import Feed") :], names)
    splits, generate = names["feed"].splits, names["feed"].generate
    assert next(generate(splits()[0]))["label"] == b"text 0"
    write("names.lmdb", {f"cats/{name}.jpg": pickle.dumps(1, 4) for name in "abcdef"})
    text = CliRunner().invoke(main, ["peek", "names.lmdb"]).output
    assert "--leaf 'value=*'" in text
    assert "values seem to be pickles" in text


def test_named_databases_are_refused_and_values_that_look_like_one_are_not() -> None:
    with lmdb.open("named.lmdb", max_dbs=2) as env:
        images = env.open_db(b"images")
        with env.begin(write=True) as transaction:
            transaction.put(b"a", b"value")
            transaction.put(b"1", b"value", db=images)
    with pytest.raises(
        OSError, match=r"named\.lmdb has named databases, such as 'images', .* write their keys to a store"
    ):
        read("named.lmdb", "*")
    assert not opening._open
    values = {f"x-{number}": bytes([number]) * 48 for number in range(9)}
    write("plain.lmdb", values)
    assert list(read("plain.lmdb", "x-*")) == list(values.values())
