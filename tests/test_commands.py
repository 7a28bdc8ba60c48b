"""`penstock serve`, `status`, `stop`, as a user calls them; and the private daemon of a one-line start."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from conftest import Serve

import penstock

FEED = """
    import numpy as np
    from penstock_server import Feed
    def numbers(split):
        print("user code prints")
        for i in range(50):
            yield np.int64(50 * split + i)
    feed = Feed(numbers, splits=range(4), batch_size=10, samples=200)
"""


def penstock_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock_server", *arguments], capture_output=True, text=True, timeout=30
    )


def test_status_shows_feeds_workers_and_streams(serve: Serve) -> None:
    daemon = serve(FEED)
    with penstock.connect(daemon.url) as connection:
        next(connection.batches())
        shown = penstock_command("status", daemon.url)
        state = json.loads(penstock_command("status", daemon.url, "--json").stdout)
    assert shown.returncode == 0, shown.stderr
    for words in ("worker   0: pid", daemon.url, "20 batches an epoch", "stream   feed to", "(local)", "epoch 0"):
        assert words in shown.stdout
    assert state["feeds"][0]["name"] == "feed"
    assert len(state["workers"]) == 2
    assert state["streams"][0]["transport"] == "local"


def test_status_of_nothing_says_where_it_looked() -> None:
    said = penstock_command("status", "tcp://127.0.0.1:9", "--timeout", "0.3")
    assert said.returncode == 1
    assert "no daemon answered at tcp://127.0.0.1:9 within 0.3 s" in said.stderr
    assert "looks like tcp://" in penstock_command("status", "localhost").stderr


@pytest.mark.parametrize("how", ["penstock stop", signal.SIGTERM, signal.SIGINT])
def test_a_daemon_stops_cleanly(serve: Serve, how: object) -> None:
    daemon = serve(FEED)
    workers = daemon.workers()
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        next(batches)
        start = time.monotonic()
        if isinstance(how, str):
            stopped = penstock_command("stop", daemon.url)
            assert stopped.stdout == "stopped\n", stopped.stderr
            assert daemon.process.wait(5) == 0
        else:
            assert daemon.stop(how) == 0
            assert time.monotonic() - start < 2
        with pytest.raises((penstock.DaemonStopped, penstock.ConnectionLost)):
            for _ in range(3):
                list(batches)
                batches = connection.batches()
    assert not any(worker.is_running() for worker in workers)
    daemon.stop()


def test_workers_end_with_a_killed_daemon(serve: Serve) -> None:
    daemon = serve(FEED)
    workers = daemon.workers()
    assert len(workers) == 2
    daemon.process.kill()
    daemon.process.wait()
    _gone, alive = psutil.wait_procs(workers, timeout=2)
    assert not alive


def test_only_ready_lines_go_to_stdout(serve: Serve) -> None:
    daemon = serve(FEED)
    with penstock.connect(daemon.url) as connection:
        list(connection.batches())
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.stdout is not None
    assert daemon.process.stdout.read() == b""
    assert daemon.stop() == 0
    assert "user code prints" in daemon.stderr()


def test_user_code_that_imports_tensorflow_is_warned_of_the_cost(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "daemon0").mkdir()
    (tmp_path / "daemon0" / "tensorflow.py").write_text("# stands in for the real one, which takes seconds\n")
    daemon = serve("import tensorflow\n" + textwrap.dedent(FEED))
    assert daemon.stderr().count("your module imports TensorFlow: each worker takes about 500 MB more") == 1


def test_few_splits_and_workers_that_do_not_divide_the_lanes_are_pointed_out(serve: Serve) -> None:
    daemon = serve(FEED.replace("batch_size=10", "batch_size=10, shuffle=100"), workers=3)
    log = daemon.stderr()
    assert "each batch mixes only 1 of its 4 splits" in log
    assert "with which 3 workers run no faster than 2" in log


def test_help_ends_in_examples() -> None:
    shown = penstock_command("serve", "--help").stdout
    assert re.search(r"Examples:\n +penstock serve scenes:feed --workers 8", shown)


def write_module(folder: Path) -> str:
    (folder / "scenes.py").write_text(textwrap.dedent(FEED))
    return f"{folder}/scenes.py:feed"


def test_one_line_starts_a_private_daemon_that_ends_with_its_connection(tmp_path: Path) -> None:
    with penstock.connect(write_module(tmp_path), workers=2) as connection:
        children = psutil.Process().children(recursive=True)
        assert sum("penstock_server.worker" in " ".join(child.cmdline()) for child in children) == 2
        assert sum(len(batch) for batch in connection.batches()) == 200
    _gone, alive = psutil.wait_procs(children, timeout=3)
    assert not alive


def test_a_private_daemon_ends_with_a_killed_trainer(tmp_path: Path) -> None:
    code = f"""
import penstock, sys, time
connection = penstock.connect({write_module(tmp_path)!r}, workers=2)
next(connection.batches())
print("reading", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"reading\n"
        children = psutil.Process(trainer.pid).children(recursive=True)
        assert len(children) == 3
        trainer.kill()
    _gone, alive = psutil.wait_procs(children, timeout=3)
    assert not alive


def test_a_private_daemon_that_cannot_start_raises_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import does_not_exist\n")
    with pytest.raises(penstock.StartError, match="does_not_exist"):
        penstock.connect(f"{tmp_path}/broken.py:feed", workers=1)
