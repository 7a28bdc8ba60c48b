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
