"""An error of a data file is a message with the file, the place and the next step, without a library's traceback."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock_server import Feed, Leaf
from penstock_server.sources.json_lines import reader
from penstock_server.targets import importing


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n{"x": 2}\n')
    return str(path)


def told(feed: Feed) -> str:
    """Return all that a worker tells of the error."""
    error = error_of(feed)
    assert error.__cause__ is not None
    return f"{error}\n{importing.user_traceback(error.__cause__)}"


def error_of(feed: Feed) -> penstock.PenstockError:
    with pytest.raises(penstock.PenstockError) as raised, penstock.connect(feed, workers=0) as connection:
        list(connection.batches())
    return raised.value


def test_an_exception_that_a_library_raises_in_a_reader_becomes_a_message(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_decode", Fraction)  # raises a TypeError of its own
    monkeypatch.setattr(reader, "json", SimpleNamespace(loads=Fraction))
    feed = Feed.from_json_lines(file, batch_size=1, spec={"x": Leaf("int64", ())})
    said = told(feed)
    assert "raised TypeError: " in said
    assert "Is the file damaged, or does it use something that Penstock's reader does not know?" in said
    assert f"split {file}" in said
    assert "Traceback" not in said
    monkeypatch.setattr(importing, "_DEBUG", True)
    assert "fractions.py" in told(feed)


def test_a_message_of_a_reader_is_said_once(file: str) -> None:
    Path(file).write_text('{"x": 1}\n{"x": }\n')
    said = told(Feed.from_json_lines(file, batch_size=1))
    assert said.count("is not JSON") == 1
    assert "Traceback" not in said


def test_the_traceback_of_a_feed_that_is_refused_ends_with_the_line_that_declares_it(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("from penstock_server import Feed\nfeed = Feed([], shuffle=-1)\n")
    with pytest.raises(penstock.StartError) as failed:
        importing.load(f"{tmp_path}/wrong.py:feed")
    *_, frame, line = [line for line in (failed.value.remote_traceback or "").splitlines() if line.startswith("  ")][:2]
    assert frame.endswith('wrong.py", line 2, in <module>')
    assert line.strip() == "feed = Feed([], shuffle=-1)"
    assert "penstock_server/" not in (failed.value.remote_traceback or "")


def test_an_error_of_the_users_own_function_keeps_its_traceback(file: str) -> None:
    def fails(sample: Any) -> Any:
        return sample["nothing"]

    failed: Any = error_of(Feed.from_json_lines(file, batch_size=1, transform=fails)).__cause__
    assert 'return sample["nothing"]' in importing.user_traceback(failed.error)
