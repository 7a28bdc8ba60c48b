"""Named pipes are no data files: reading one could wait for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock_command import main
from penstock_server import Feed


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "*.jsonl"])
def test_a_named_pipe_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(name.replace("*", "a"))
    result = CliRunner().invoke(main, ["peek", name])
    assert result.exit_code == 1
    assert "is a named pipe, and data files are read in several parts" in " ".join(result.output.split())


def test_one_without_a_known_ending_is_no_data_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.unknown")
    assert CliRunner().invoke(main, ["peek", str(tmp_path / "pipe.unknown")]).exit_code


def test_a_feed_refuses_it_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(OSError, match=r"a\.csv is a named pipe"):
        len(Feed.from_csv(str(tmp_path / "a.csv"), batch_size=2).generate)


@pytest.mark.parametrize("words", [("status",), ("stop",), ("scale",), ("wait",)])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_time_must_be_a_finite_number(words: tuple[str, ...], value: str) -> None:
    result = CliRunner().invoke(main, [*words, "tcp://127.0.0.1:1", "--timeout", value])
    assert result.exit_code == 2
    assert "Invalid value for '--timeout'" in result.output
