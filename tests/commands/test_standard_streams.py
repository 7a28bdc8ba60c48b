"""A daemon whose standard input, output or error is closed, full, or has nobody at its other end."""

from __future__ import annotations

import errno
import logging
import os
import pty
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import penstock
from penstock_command import main
from penstock_server.cli import standard_streams
from penstock_server.cli.terminal import Line
from tests.conftest import Serve
from tests.processes.free_ports import free_port

FEED = """
    from penstock_server import Feed
    feed = Feed(lambda: iter(range(20)), batch_size=10)
"""


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "> /dev/full", "> >(true)", "2> >(true)"])
def test_a_daemon_serves_whatever_its_standard_streams_are(tmp_path: Path, streams: str) -> None:
    (tmp_path / "feeds.py").write_text(textwrap.dedent(FEED))
    url = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "penstock_server", "serve", "feeds:feed", "--workers", "1", "--bind", url]
    with subprocess.Popen(["bash", "-c", f"exec {shlex.join(command)} {streams}"], cwd=tmp_path) as daemon:
        try:
            with penstock.connect(f"{url}/feed", timeout=60) as connection:
                assert sum(len(batch) for batch in connection.batches()) == 20
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(50) == 0
        finally:
            daemon.kill()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--version"], ["--help"], ["params", "feeds.py:make"]])
def test_a_command_says_that_its_output_cannot_be_written(tmp_path: Path, words: list[str], unbuffered: str) -> None:
    (tmp_path / "feeds.py").write_text(
        "from penstock_server import Feed\ndef make(n: int = 1) -> Feed:\n    return Feed(range(n), batch_size=1)\n"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "penstock_command", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == "penstock: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["wait"], ["top", "--once"], ["peek"], ["check"]])
def test_a_command_for_a_daemon_says_that_its_output_cannot_be_written(serve: Serve, words: list[str]) -> None:
    daemon = serve(FEED)
    url = daemon.url if words[0] in ("peek", "check") else daemon.url.rpartition("/")[0]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "penstock_command", *words, url],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == "penstock: cannot write the output: No space left on device\n"


def test_another_error_is_not_taken_for_one_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock_server.to_daemon.control.status", raises)
    assert isinstance(CliRunner().invoke(main, ["status", "tcp://127.0.0.1:1"]).exception, OSError)


def test_a_line_at_a_terminal_that_has_gone_is_no_longer_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        line = Line()
        line.show("starting")
        handler = logging.StreamHandler(stderr)
        line.log_to(handler)
        os.close(ours)
        handler.emit(logging.makeLogRecord({"msg": "ready"}))
        line.show("stopping")
        assert not line.drawn
        standard_streams.flush()
