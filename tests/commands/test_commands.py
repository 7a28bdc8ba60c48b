"""`penstock serve`, `status`, `scale`, `stop`, as a user calls them; and the private daemon of a one-line start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

import penstock
from penstock_proto.messages import Doing
from penstock_proto.status import status_parsing
from penstock_proto.status.feed_status import Feed, Skipped
from penstock_proto.status.status_shape import Memory, Status
from penstock_proto.status.stream_status import Stream
from penstock_proto.status.worker_status import Worker
from penstock_server.cli.main import main
from penstock_server.consumers.starting_feeds import WAITS, StartingFeeds
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve, wait_until
from tests.fakes.statuses import of
from tests.processes.forked import children

FEED = """
    import numpy as np
    from penstock_server import Feed
    def numbers(split):
        print("user code prints")
        for i in range(50):
            yield np.int64(50 * split + i)
    feed = Feed(numbers, splits=range(4), batch_size=10, samples=200, turn=5)
"""


def penstock_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock_server", *arguments], capture_output=True, text=True, timeout=30
    )


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true. If it never is, pytest's timeout ends the test."""
    while not condition():
        time.sleep(0.02)


def test_status_shows_feeds_workers_and_streams(serve: Serve) -> None:
    daemon = serve(FEED)
    before = control.status(daemon.url, 60)
    with penstock.connect(daemon.url) as connection:
        for _ in connection.batches():
            pass
        shown = penstock_command("status", daemon.url)
        state = status_parsing.parse(penstock_command("status", daemon.url, "--json").stdout)
    assert shown.returncode == 0, shown.stderr
    for words in ("worker   0: pid", daemon.url, "20 batches an epoch", "stream   feed to", "(local)", "epoch 0"):
        assert words in shown.stdout
    assert state.feeds[0].name == "feed"
    unknown = penstock_command("status", f"{daemon.url}s")
    assert "no feed 'feeds' is served at" in unknown.stderr
    assert "there are: feed" in unknown.stderr
    assert len(state.workers) == 2
    assert state.streams[0].transport == "local"
    assert state.cpus == len(os.sched_getaffinity(0))
    assert state.cpu_seconds > before.cpu_seconds > 0
    for then, now in zip(before.workers, state.workers, strict=True):
        spent = now.spent
        if then.spent is not None:  # the worker was ready
            assert spent.user_seconds > then.spent.user_seconds
            assert spent.idle_seconds > then.spent.idle_seconds
        assert spent.idle_seconds > 0
        assert spent.user_seconds + spent.idle_seconds <= spent.seconds
        assert spent.cpu_seconds + spent.cpu_wait_seconds > 0


def test_status_of_nothing_says_where_it_looked() -> None:
    said = penstock_command("status", "tcp://127.0.0.1:9", "--timeout", "0.3")
    assert said.returncode == 1
    assert "no daemon answered at tcp://127.0.0.1:9 within 0.3 s" in said.stderr
    assert "such as tcp://" in penstock_command("status", "localhost").stderr


@pytest.mark.parametrize("path", ["/train/val", "/train#x", "/a feed"])
def test_an_address_that_cannot_be_one_is_refused(path: str) -> None:
    url = f"tcp://127.0.0.1:9{path}"
    assert f"got {url!r}" in penstock_command("status", url).stderr


STATUS = of(
    Status,
    pid=41,
    endpoint="tcp://127.0.0.1:5555",
    seconds=12.4,
    draining=True,
    memory=of(Memory, allowed=1 << 30, reserved=1 << 20, arena=1 << 20),
    workers=[
        of(
            Worker,
            name="0",
            makes_batches=True,
            pid=42,
            ready=True,
            doing=Doing(what="a.h5", split="a.h5", samples=1, seconds=0.2),
        ),
        of(Worker, name="1", makes_batches=True, pid=43, restarts=1, ready=True, leaving=True),
        of(Worker, name="2", pid=44, restarts=2),
        of(Worker, name="3", restarts=3),
        of(Worker, name="4", restarts=4, given_up=True),
        of(
            Worker,
            name="5",
            makes_batches=True,
            pid=45,
            ready=True,
            stopped=True,
            doing=Doing(what="files(), which lists the splits", split=None, samples=0, seconds=3.21),
        ),
    ],
    feeds=[
        of(
            Feed,
            name="train",
            url="tcp://127.0.0.1:5555/train",
            spec="int64[]",
            batch_size=10,
            skipped=[Skipped(epoch=2, split="b.h5", samples=17, why="ValueError:\nnot\x1b[31m a scene")],
            skipped_count=5,
        ),
        of(Feed, name="endless", url="tcp://127.0.0.1:5555/endless", spec="int64[]", batch_size=8, segment=30),
        of(Feed, name="ready", url="tcp://127.0.0.1:5555/ready", spec="int64[]", batches=6, segment=2),
    ],
    streams=[
        of(Stream, feed="train", client="x:1", transport="tcp", epoch=3, reading=True, batches=1, slots=4),
        of(Stream, feed="train", client="y:1", transport="local", error="it\nbroke"),
    ],
    more_streams=2,
)

SHOWN = """\
tcp://127.0.0.1:5555  pid 41  up 12 s  draining: stops when the epochs that are being read have finished
memory   1.0 MiB in slots, 1.0 MiB reserved, 1.0 GiB allowed
worker   0: pid 42, restarted 0 times, split a.h5: 1 sample as of 0.2 s ago
worker   1: pid 43, restarted 1 time, leaving, idle
worker   2: pid 44, restarted 2 times, starting
worker   3: starting, restarted 3 times
worker   4: given up, restarted 4 times: its processes died before they were ready, see the log
worker   5: pid 45, restarted 0 times, stopped by a signal, files(), which lists the splits, for 3.2 s
feed     tcp://127.0.0.1:5555/train  int64[], batch size 10
skipped  train, epoch 2: split b.h5 after 17 samples: ValueError: not\\x1b[31m a scene
skipped  train: 4 more splits
feed     tcp://127.0.0.1:5555/endless  int64[], batch size 8, segments of 30 samples, endless
feed     tcp://127.0.0.1:5555/ready  int64[], whole batches, 6 batches an epoch, segments of 2 batches
stream   train to x:1 (tcp): epoch 3, 1 batch sent, 4 slots
stream   train to y:1 (local): not begun, 0 slots, FAILED: it broke
stream   2 more
"""


def test_status_shows_a_line_for_each_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "status", lambda url, timeout, keys: STATUS)
    assert CliRunner().invoke(main, ["status", "tcp://127.0.0.1:5555"]).output == SHOWN


def begin_to_stop(daemon: Daemon, how: str | int) -> None:
    """Ask the daemon to stop, and do not wait for its end."""
    if isinstance(how, int):
        daemon.process.send_signal(how)
        return

    class ItWaits(Exception):
        pass

    def still_waiting(state: Status) -> None:
        raise ItWaits

    with pytest.raises(ItWaits):
        control.stop(daemon.url, now=False, timeout=None, still_waiting=still_waiting, every=0.01)


def draining(daemon: Daemon) -> bool:
    return control.status(daemon.url, 60).draining


@pytest.mark.parametrize("how", ["stop", "stop --now", signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_nobody_reads_from_stops_at_once(serve: Serve, how: str | int) -> None:
    daemon = serve(FEED)
    workers = daemon.workers()
    if isinstance(how, str):
        stopped = penstock_command(*how.split(), daemon.url)
        assert (stopped.stdout, stopped.stderr) == ("stopped\n", "")
        assert daemon.process.wait(50) == 0
    else:
        assert daemon.stop(how) == 0
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.parametrize("how", ["stop", signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_is_asked_to_stop_lets_epochs_end_first(serve: Serve, how: str | int) -> None:
    daemon = serve(FEED)
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        count = len(next(batches))
        begin_to_stop(daemon, how)
        until(lambda: draining(daemon))
        count += sum(len(batch) for batch in batches)
        assert count == 200
        assert daemon.process.wait(50) == 0


@pytest.mark.parametrize("how", ["stop --now", signal.SIGTERM, signal.SIGINT])
def test_a_second_request_stops_a_daemon_at_once(serve: Serve, how: str | int) -> None:
    daemon = serve(FEED)
    workers = daemon.workers()
    with penstock.connect(daemon.url, reconnect=0) as connection:
        batches = connection.batches()
        next(batches)
        begin_to_stop(daemon, how)
        until(lambda: draining(daemon))
        if isinstance(how, str):
            stopped = penstock_command(*how.split(), daemon.url)
            assert (stopped.stdout, stopped.stderr) == ("stopped\n", "")
        else:
            daemon.process.send_signal(how)
        assert daemon.process.wait(50) == 0
        with pytest.raises((penstock.DaemonStopped, penstock.ConnectionLost)):
            list(batches)
            next(connection.batches())
    assert not any(worker.is_running() for worker in workers)


def test_stop_says_for_how_many_streams_it_waits(serve: Serve) -> None:
    daemon = serve(FEED)
    waited: list[Status] = []
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        next(batches)
        with pytest.raises(penstock.Unreachable, match=r"not stop within 3 s: .* `penstock stop --now` does not"):
            control.stop(daemon.url, now=False, timeout=3, still_waiting=waited.append, every=0.1)
    assert {len(state.streams) for state in waited} == {1}
    assert daemon.process.wait(50) == 0, "its last consumer is gone, so it must end"


def test_scale_adds_and_ends_workers_and_trainers_notice_nothing(serve: Serve) -> None:
    daemon = serve(FEED)
    with penstock.connect(daemon.url) as connection:
        seen = [int(n) for batch in connection.batches() for n in batch]
        again = connection.batches()
        kept = [int(n) for n in next(again)]
        assert penstock_command("scale", daemon.url, "4").stdout == "workers: 2 -> 4\n"
        until(lambda: len(daemon.workers()) == 4)
        kept += [int(n) for n in next(again)]
        assert penstock_command("scale", daemon.url, "1").stdout == "workers: 4 -> 1\n"
        kept += [int(n) for batch in again for n in batch]
    assert kept == seen
    until(lambda: len(daemon.workers()) == 1)
    assert penstock_command("scale", daemon.url, "3").stdout == "workers: 1 -> 3\n"
    assert penstock_command("scale", daemon.url, "1", "--now").stdout == "workers: 3 -> 1\n"
    until(lambda: len(daemon.workers()) == 1)


def test_signals_mean_one_worker_more_or_fewer_but_never_none(serve: Serve) -> None:
    daemon = serve(FEED, workers=1)
    daemon.process.send_signal(signal.SIGTTIN)
    until(lambda: len(daemon.workers()) == 2)
    for _ in range(3):
        daemon.process.send_signal(signal.SIGTTOU)
        until(lambda: len(daemon.workers()) == 1)
    assert len(control.status(daemon.url, 60).workers) == 1


def test_scale_says_what_is_wrong(serve: Serve) -> None:
    nobody = penstock_command("scale", "tcp://127.0.0.1:9", "2", "--timeout", "0.3")
    assert nobody.returncode == 1
    assert "no daemon answered at tcp://127.0.0.1:9 within 0.3 s" in nobody.stderr
    none = penstock_command("scale", "tcp://127.0.0.1:9", "0")
    assert none.returncode == 2
    assert "Invalid value for '[N]': 0 is not in the range 1<=x<=4096" in none.stderr
    nameless = penstock_command("scale", "tcp://127.0.0.1:9", "2", "--host", "")
    assert nameless.returncode == 2
    assert "--host needs the name of a host: `penstock status URL` shows them" in nameless.stderr
    for words, error in (
        (["16"], "'16' is not a URL: give both, penstock scale tcp://127.0.0.1:5555 N"),
        (["tcp://127.0.0.1:9"], "give the number of workers, N, or --hosts N"),
        (["tcp://127.0.0.1:9", "x"], "Invalid value for '[N]': 'x' is not a valid whole number."),
    ):
        assert error in penstock_command("scale", *words).stderr


def test_a_daemon_without_workers_says_so_when_it_is_ready_and_again_while_a_trainer_waits(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = serve(FEED, workers=0)
    root = daemon.url.rpartition("/")[0]
    assert f"no batches are made until a host joins: penstock join {root} FEED..." in daemon.stderr()
    coordinator: Any = SimpleNamespace(
        feeds={}, streams={0: None}, starting=SimpleNamespace(failing={}), workers=SimpleNamespace(makers=[])
    )
    feeds = StartingFeeds(coordinator, feeds=0, endpoint=root, advertise=None, on_ready=print)
    feeds.look_at_the_clock(WAITS - 1, str)
    assert not caplog.records
    feeds.look_at_the_clock(WAITS, str)
    assert f"trainers wait: start some on another host with penstock join {root} FEED..., or here" in caplog.text


@pytest.mark.parametrize("command", [["scale", "2"], ["stop"]])
def test_only_who_runs_a_daemon_may_stop_or_scale_it(serve: Serve, command: list[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    daemon = serve(FEED)
    name, *rest = command
    imports = "import os, encodings.idna"  # and other late imports, whose files the other user cannot read
    imports += "; from penstock_server import coordinator; from penstock_server.to_daemon import control"
    imports += "; from penstock_server.cli.main import main"
    code = f"{imports}; os.setuid(65534); main({[name, daemon.url, *rest]})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert said.returncode == 1
    assert f"cannot {name} the daemon at {daemon.url} from here (it belongs to another user)" in said.stderr
    assert re.search(rf"send SIGT[A-Z]+ .*to its process {daemon.process.pid}\n", said.stderr)


def test_a_split_that_hangs_is_told_with_its_line(serve: Serve) -> None:
    hanging = FEED.replace('print("user code prints")', "__import__('time').sleep(3600 * (split == 3))")
    daemon = serve(hanging, hang_timeout=0.5)
    with penstock.connect(daemon.url) as connection:
        with pytest.raises(penstock.WorkerDied, match=r"made no sample for 0\.5 s .*feeds\.py:\d+ in numbers"):
            list(connection.batches())
    assert re.search(r"worker \d made no sample for 0\.5 s and was killed; it was at \S+feeds\.py:\d+", daemon.stderr())


def test_workers_end_with_a_killed_daemon(serve: Serve) -> None:
    daemon = serve(FEED)
    wait_until(lambda: len(daemon.workers()) == 2)
    workers = daemon.workers()
    daemon.process.kill()
    daemon.process.wait()
    _gone, alive = psutil.wait_procs(workers, timeout=50)
    assert not alive


def test_only_ready_lines_go_to_stdout(serve: Serve) -> None:
    daemon = serve(FEED)
    with penstock.connect(daemon.url) as connection:
        list(connection.batches())
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.stdout is not None
    assert daemon.process.stdout.read() == ""
    assert daemon.stop() == 0
    assert "user code prints" in daemon.stderr()


def test_user_code_that_imports_tensorflow_is_warned_of_the_cost(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "daemon0").mkdir()
    (tmp_path / "daemon0" / "tensorflow.py").write_text("# stands in for the real one, which takes seconds\n")
    daemon = serve("print()\nimport tensorflow\n" + textwrap.dedent(FEED))
    assert daemon.stderr().count("your module imports TensorFlow, and each worker does so on its own") == 1
    assert re.search(r"or import it before /.*\.py:1: then that is done once for all workers", daemon.stderr())


def test_few_splits_and_workers_that_do_not_divide_the_lanes_are_pointed_out(serve: Serve) -> None:
    fast = serve(FEED.replace("batch_size=10", "batch_size=10, shuffle=100, order='fast'"), workers=3)
    assert "a batch of 10 has samples of 1 of its 4 splits; a full shuffle would have 4" in fast.stderr()
    exact = serve(FEED.replace("batch_size=10", "batch_size=10, shuffle=100"), workers=3)
    assert "a batch of 10 has samples of" not in exact.stderr()
    assert "so 3 workers run no faster than 2" in exact.stderr()


def write_module(folder: Path) -> str:
    (folder / "scenes.py").write_text(textwrap.dedent(FEED))
    return f"{folder}/scenes.py:feed"


def test_one_line_starts_a_private_daemon_that_ends_with_its_connection(tmp_path: Path) -> None:
    with penstock.connect(write_module(tmp_path), workers=2) as connection:
        started = children(recursive=True)
        assert sum(child.name() in {"penstock-w0", "penstock-w1"} for child in started) == 2
        assert sum(len(batch) for batch in connection.batches()) == 200
    _gone, alive = psutil.wait_procs(started, timeout=50)
    assert not alive


def test_a_private_daemon_ends_with_a_killed_trainer(tmp_path: Path) -> None:
    code = f"""
import penstock, sys, time
connection = penstock.connect({write_module(tmp_path)!r}, workers=2)
next(connection.batches())
print("reading", flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"reading\n"
        children = psutil.Process(trainer.pid).children(recursive=True)
        assert len(children) == 4, "the daemon, the fork server, and two workers"
        trainer.kill()
    _gone, alive = psutil.wait_procs(children, timeout=50)
    assert not alive


def test_a_private_daemon_that_cannot_start_raises_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import does_not_exist\n")
    with pytest.raises(penstock.StartError, match="does_not_exist"):
        penstock.connect(f"{tmp_path}/broken.py:feed", workers=1)
