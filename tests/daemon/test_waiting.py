"""Waiting for a daemon whose feeds are being started: what is said meanwhile, for how long, and what ends it.

The feeds' module waits for a file during its import. So each test decides how long the import takes.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import penstock
from penstock._stream import connecting, reconnecting
from penstock._transport import waiting
from penstock_proto.status import readiness
from penstock_proto.status.status_shape import Status
from penstock_server.cli import main
from penstock_server.cli.wait_command import NOBODY, NOT_READY
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Join, Serve, wait_until
from tests.processes.free_ports import free_address

SLOW = """
    import os, time
    while not os.path.exists("go"):
        time.sleep(0.01)
    if os.path.exists("bad"):
        raise RuntimeError("no licence for the simulator")
    import numpy as np
    from penstock_server import Feed

    def numbers(split):
        for i in range(5):
            yield np.int64(10 * split + i)

    def listed():
        while os.path.exists("lists"):
            time.sleep(0.01)
        return range(4)

    def away():
        raise OSError("the disk is away")

    feed = Feed(numbers, splits=range(4), batch_size=5)
    other = Feed(numbers, splits=listed, batch_size=5)
    failing = Feed(numbers, splits=away, batch_size=5, on_error="retry")
"""

PATIENCE = 8.0
"""Seconds. Longer than a daemon on a busy machine needs for an answer."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients ask and speak sooner, and give up after `PATIENCE` seconds without progress."""
    for module, name, value in (
        (waiting, "ASK_AFTER", 0.1),
        (waiting, "ASK_AGAIN", 0.2),
        (waiting, "SAY_AFTER", 0.3),
        (readiness, "NO_PROGRESS", PATIENCE),
        (connecting, "NO_PROGRESS", PATIENCE),
        (reconnecting, "SECONDS", PATIENCE),
    ):
        monkeypatch.setattr(module, name, value)


def starting(serve: Serve, *feeds: str, **options: Any) -> tuple[Daemon, str]:
    """Start a daemon that imports, and return its endpoint."""
    endpoint = free_address()
    return serve(SLOW, *(feeds or ("feed",)), ready=False, bind=endpoint, **options), endpoint


def finish(daemon: Daemon) -> None:
    (daemon.folder / "go").touch()


def until_importing(endpoint: str) -> Status:
    """Wait until a worker imports the module."""
    found: list[Status] = []

    def imports() -> bool:
        with contextlib.suppress(penstock.Unreachable):
            found.append(control.status(endpoint, 10))
        return bool(found) and "importing feeds.py" in found[-1].phase

    wait_until(imports)
    return found[-1]


@contextlib.contextmanager
def meanwhile(call: Callable[[], Any]) -> Iterator[Any]:
    """Call something in a thread while the context runs."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


def until_told(log: pytest.LogCaptureFixture, endpoint: str) -> None:
    """Wait until a trainer knows from the daemon, and has said, that it imports."""
    wait_until(lambda: any(line.startswith(f"waiting for {endpoint}/feed: importing") for line in log.messages))


def failure(call: Callable[[], Any]) -> Exception:
    with pytest.raises(penstock.PenstockError) as caught:
        call()
    return caught.value


def wait(*words: str) -> Result:
    return CliRunner().invoke(main.main, ["wait", *words])


# --- trainers ---


def test_a_trainer_waits_as_long_as_the_import_takes_and_says_for_what(
    serve: Serve, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    daemon, endpoint = starting(serve)
    url = f"{endpoint}/feed"
    until_importing(endpoint)
    timer = threading.Timer(PATIENCE + 2, finish, [daemon])  # longer than it waits without progress
    timer.start()
    with penstock.connect(url) as connection:
        assert len(list(connection.batches())) == 4
    timer.join()
    said = [line for line in caplog.messages if line.startswith(f"waiting for {url}: importing")]
    assert all(re.fullmatch(r"waiting for \S+: importing feeds.py:feed \(\d+ s\)", line) for line in said)
    assert 1 <= len(said) <= 8, "the pauses between two lines grow"


def test_a_trainer_that_is_started_before_its_daemon_says_that_none_answers(
    serve: Serve, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = free_address()
    with meanwhile(lambda: penstock.connect(f"{endpoint}/feed", timeout=60)) as trainer:
        wait_until(lambda: f"waiting for {endpoint}/feed: no daemon answers (Connection refused)" in caplog.messages)
        finish(serve(SLOW, ready=False, bind=endpoint))
        with trainer.result() as connection:
            assert len(list(connection.batches())) == 4


def test_a_timeout_that_was_given_is_a_deadline_and_the_error_says_what_the_daemon_does(
    serve: Serve, impatient: None
) -> None:
    daemon, endpoint = starting(serve)
    until_importing(endpoint)
    began = time.monotonic()
    error = failure(lambda: penstock.connect(f"{endpoint}/feed", timeout=1.5))
    assert isinstance(error, penstock.Unreachable)
    assert time.monotonic() - began < 30
    assert re.search(r"tried for 1.5 s, is not ready: importing feeds.py:feed \(\d+ s\): give it more time", str(error))
    finish(daemon)


def test_a_feed_that_fails_and_is_tried_again_is_no_progress(serve: Serve, impatient: None) -> None:
    daemon, endpoint = starting(serve, "failing")
    finish(daemon)
    error = failure(lambda: penstock.connect(f"{endpoint}/failing"))
    assert isinstance(error, penstock.Unreachable)
    assert re.search(r"is not ready: feed failing failed \d+ times? and is tried again: .*the disk is away", str(error))


def test_a_trainer_that_has_lost_its_daemon_waits_as_long_as_the_next_one_imports(
    serve: Serve, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    first, endpoint = starting(serve)
    finish(first)
    first.wait_ready(1)
    with penstock.connect(f"{endpoint}/feed") as connection:
        list(connection.batches())
        first.process.kill()
        first.process.wait()
        second = serve(SLOW, ready=False, bind=endpoint)
        timer = threading.Timer(PATIENCE + 2, finish, [second])  # longer than a loss may last
        timer.start()
        assert len(list(connection.batches())) == 4
        timer.join()
    assert any(line.startswith(f"waiting for {endpoint}/feed: importing") for line in caplog.messages)


def test_a_private_daemon_says_what_it_imports(
    impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scenes.py").write_text(textwrap.dedent(SLOW))
    monkeypatch.chdir(tmp_path)
    said = re.compile(r"waiting for the private daemon of scenes.py:feed: importing scenes.py:feed \(\d+ s\)")
    with meanwhile(lambda: penstock.connect("scenes.py:feed", workers=1)) as trainer:
        wait_until(lambda: any(map(said.fullmatch, caplog.messages)))
        (tmp_path / "go").touch()
        with trainer.result() as connection:
            assert len(list(connection.batches())) == 4


# --- a daemon that cannot start ---


def test_why_an_import_failed_reaches_all_who_wait_and_ends_the_daemon(serve: Serve, tmp_path: Path) -> None:
    daemon, endpoint = starting(serve, workers=1)
    (tmp_path / "feeds.py").write_bytes((daemon.folder / "feeds.py").read_bytes())
    (tmp_path / "go").touch()
    until_importing(endpoint)
    penstock_command = [sys.executable, "-m", "penstock_server"]
    with (
        meanwhile(lambda: failure(lambda: penstock.connect(f"{endpoint}/feed"))) as trainer,
        subprocess.Popen(
            [*penstock_command, "join", endpoint, "feeds.py:feed"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        ) as host,
        subprocess.Popen([*penstock_command, "wait", endpoint], stderr=subprocess.PIPE, text=True) as waits,
    ):
        wait_until(lambda: "waits until the feeds are ready" in daemon.stderr())
        assert waits.stderr is not None
        assert host.stderr is not None
        assert waits.stderr.readline().startswith(f"waiting for {endpoint}: importing feeds.py:feed (")
        (daemon.folder / "bad").touch()
        finish(daemon)
        error = trainer.result()
        told = [waits.stderr.read(), host.stderr.read(), str(error)]
    assert isinstance(error, penstock.StartError)
    for said in told:
        assert "raised RuntimeError: no licence for the simulator" in said
        assert 'raise RuntimeError("no licence for the simulator")' in said, "with the traceback"
    assert (waits.returncode, host.returncode, daemon.process.wait(30)) == (1, 1, 1)


def test_a_worker_that_is_killed_while_it_imports_ends_the_wait_and_is_named(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    daemon, endpoint = starting(serve, workers=1)
    (worker,) = until_importing(endpoint).workers
    assert worker.doing is not None
    assert worker.doing.what == "importing feeds.py:feed"
    with meanwhile(lambda: failure(lambda: penstock.connect(f"{endpoint}/feed"))) as trainer:
        until_told(caplog, endpoint)
        (process,) = daemon.workers()
        process.kill()
        error = trainer.result()
    said = "worker 0 was killed by SIGKILL (the kernel's out-of-memory killer sends it too) while it was importing "
    assert said + "feeds.py:feed before it could serve a feed. If memory ran out" in str(error)
    assert daemon.process.wait(30) == 1


def test_a_daemon_that_vanishes_while_it_imports_is_told_from_one_that_never_was_there(
    serve: Serve, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    daemon, endpoint = starting(serve)
    until_importing(endpoint)
    with meanwhile(lambda: failure(lambda: penstock.connect(f"{endpoint}/feed"))) as trainer:
        until_told(caplog, endpoint)
        daemon.process.kill()
        daemon.process.wait()
        assert "ended before its feeds were ready (importing feeds.py:feed (" in str(trainer.result())


# --- what a wait says of the import ---


def test_a_long_import_is_shown_with_its_line(serve: Serve) -> None:
    daemon, endpoint = starting(serve, workers=1, patched={"workers.worker_handle.LONG_IMPORT": 0.1})
    wait_until(lambda: "/feeds.py:4 in <module> (" in control.status(endpoint, 10).phase)
    said = CliRunner().invoke(main.main, ["status", endpoint]).output
    assert re.search(r"^starting importing feeds.py:feed, at \S+/feeds.py:4 in <module> \(\d+ s\)$", said, re.MULTILINE)
    finish(daemon)
    daemon.wait_ready(1)
    assert "starting" not in CliRunner().invoke(main.main, ["status", endpoint]).output


def test_a_host_says_that_it_waits_for_the_head(serve: Serve, join: Join) -> None:
    daemon, endpoint = starting(serve, "other", workers=1)
    daemon.urls["other"] = f"{endpoint}/other"
    (daemon.folder / "lists").touch()
    finish(daemon)  # also for the host, which imports the same file
    host = join(daemon, "other", working=False, patched={"join.agent.SAY_EVERY": 1})
    said = f"waiting for the head at {endpoint}: listed(), which lists the splits"
    wait_until(lambda: said in host.log(), said=host.log)
    (daemon.folder / "lists").unlink()
    host.wait_working()


def test_the_status_shows_what_the_workers_of_a_host_import(serve: Serve, join: Join, tmp_path: Path) -> None:
    daemon, endpoint = starting(serve, workers=1)
    finish(daemon)
    daemon.wait_ready(1)
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / "feeds.py").write_bytes((daemon.folder / "feeds.py").read_bytes())
    host = join(daemon, folder=folder, working=False, workers=1, patched={"join.agent.SAY_EVERY": 1})

    def shown() -> list[str]:
        workers = control.status(endpoint, 10).workers
        return [worker.doing.what for worker in workers if worker.host == host.name and worker.doing is not None]

    wait_until(lambda: shown() == ["importing feeds.py:feed"], said=host.log)
    wait_until(lambda: re.search(r"no worker is ready after \d+ s: importing feeds.py:feed \(\d+ s\)", host.log()))
    (folder / "go").touch()
    host.wait_working()


# --- penstock wait ---


def test_wait_ends_when_the_feed_of_its_url_can_be_read(serve: Serve) -> None:
    daemon, endpoint = starting(serve, "feed", "other")
    (daemon.folder / "lists").touch()
    finish(daemon)
    assert wait(f"{endpoint}/feed").output == f"ready {endpoint}/feed\n"
    assert wait(endpoint, "--timeout", "0").exit_code == NOT_READY
    (daemon.folder / "lists").unlink()
    assert sorted(wait(endpoint).output.splitlines()) == [f"ready {endpoint}/feed", f"ready {endpoint}/other"]
    refused = wait(f"{endpoint}/third")
    assert refused.exit_code == 1
    assert "no feed 'third' is served" in refused.output


def test_wait_tells_a_daemon_that_is_not_ready_in_time_from_none(serve: Serve) -> None:
    daemon, endpoint = starting(serve)
    until_importing(endpoint)
    late = wait(endpoint, "--timeout", "0")
    assert late.exit_code == NOT_READY
    assert re.fullmatch(rf"penstock: the daemon at {endpoint} is not ready: importing feeds.py:feed .*\n", late.output)
    assert wait(endpoint, "--timeout", "0.5").exit_code == NOT_READY
    finish(daemon)
    assert wait(endpoint, "--timeout", "60").exit_code == 0
    nobody = wait(free_address(), "--timeout", "0.5")
    assert nobody.exit_code == NOBODY
    assert "no daemon answers (Connection refused)" in nobody.output


def test_wait_begins_before_the_daemon(serve: Serve) -> None:
    endpoint = free_address()
    with meanwhile(lambda: wait(endpoint, "--timeout", "60")) as waits:
        daemon = serve(SLOW, ready=False, bind=endpoint)
        finish(daemon)
        assert waits.result().exit_code == 0


def test_those_that_wait_hear_that_the_memory_is_too_small(serve: Serve) -> None:
    daemon, endpoint = starting(serve, memory="1K")
    until_importing(endpoint)
    told: list[str] = []
    waits = partial(control.wait, endpoint, readiness.Patience(60), None, told.append)
    with meanwhile(lambda: failure(waits)) as waiter:
        wait_until(lambda: bool(told))
        finish(daemon)
        error = waiter.result()
    assert isinstance(error, penstock.MemoryBound)
    assert "--memory 1.0 KiB is too small: at least" in str(error)
    assert daemon.process.wait(30) == 1


def test_something_else_at_the_port_is_not_taken_for_a_daemon_that_starts(impatient: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        says = "accepts connections but does not answer: is it a Penstock daemon"
        assert says in str(failure(lambda: penstock.connect(f"{endpoint}/feed")))
        silent = wait(endpoint, "--timeout", "0.5")
        assert silent.exit_code == NOBODY
        assert says in silent.output


def test_another_server_at_the_port_ends_the_wait_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, meanwhile(server.accept) as accepted:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with meanwhile(lambda: wait(endpoint)) as waits:
            connection, _ = accepted.result()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n".ljust(100))
                said = waits.result()
    assert (said.exit_code, "is not a Penstock daemon" in said.output) == (1, True), said.output
