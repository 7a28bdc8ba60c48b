"""Mistakes in the environment of a command give a message, not a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock_command import main


def test_an_open_quote_in_a_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CHECK_PARAM", "size='1")
    result = CliRunner().invoke(main, ["check", "feeds.py:feed"])
    assert result.exit_code == 2
    assert 'got "size=\'1" (No closing quotation)' in result.output


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.example", ".a"])
def test_a_host_that_cannot_be_a_name_is_refused(host: str) -> None:
    result = CliRunner().invoke(main, ["status", f"tcp://{host}:5555"])
    assert result.exit_code == 1
    assert "its parts between the dots need 1 to 63 characters each" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["status", "tcp://user:secret@127.0.0.1:1"],
        ["wait", "tcp://user:secret@127.0.0.1:1/f", "--timeout", "0"],
        ["status", "user:secret@127.0.0.1:1"],
        ["check", "tcp://user:secret@127.0.0.1:1/f"],
        ["check", "user:secret@127.0.0.1:1/f"],
        ["peek", "tcp://user:secret@127.0.0.1:1/f"],
        ["peek", "tcp://user:secret@127.0.0.1:1/f?group=a"],
        ["serve", "tcp://user:secret@127.0.0.1:1/f"],
        ["serve", "feeds.py:feed", "--bind", "tcp://user:secret@127.0.0.1:1"],
        ["status", "tcp://127.0.0.1:1?token=secret"],
    ],
)
def test_no_message_repeats_a_password(words: list[str]) -> None:
    ended = CliRunner().invoke(main, words)
    assert ended.exit_code in (1, 2)
    assert ended.output
    assert "secret" not in ended.output
    assert isinstance(ended.exception, SystemExit)


def test_a_deleted_working_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); from penstock_command import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "gone"],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr == "penstock: the working directory has been deleted: change to one that exists\n"
