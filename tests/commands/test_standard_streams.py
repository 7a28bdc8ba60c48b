"""A daemon whose standard input, output or error is closed, full, or has nobody at its other end."""

from __future__ import annotations

import logging
import os
import pty
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import penstock
from penstock_server.cli import standard_streams
from penstock_server.cli.terminal import Line
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
