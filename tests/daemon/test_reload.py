"""`penstock serve --reload`: each epoch is read with the code that it began with, and the next one with new code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock_proto import StartError
from penstock_proto.status.status_shape import Status
from penstock_server.reloading.reloader import Reloader
from penstock_server.targets import saved_sources
from penstock_server.targets.sources import Sources, changed
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve, wait_until
from tests.fakes.statuses import of

FEED = """
    from penstock_server import Feed
    from package import helper
    def numbers(split):
        for _ in range(10):
            yield helper.VALUE
    feed = Feed(numbers, splits=range(10), batch_size=1, turn=1, samples=100)
"""


def write(folder: Path, value: str) -> None:
    """Write the module that the feed imports, atomically."""
    (folder / "package").mkdir(exist_ok=True)
    (folder / "new").write_text(f"VALUE = {value}\n")
    os.replace(folder / "new", folder / "package" / "helper.py")


def until(condition: Callable[[], bool]) -> None:
    """Wait as long as it takes; pytest's timeout ends a test that waits in vain."""
    while not condition():
        time.sleep(0.02)


def says(daemon: Daemon, text: str, times: int = 1) -> None:
    """Wait until the log contains this text `times` times."""
    until(lambda: daemon.stderr().count(text) >= times)


def start(serve: Serve, tmp_path: Path) -> Daemon:
    folder = tmp_path / "daemon0"
    folder.mkdir()
    write(folder, "1")
    return serve(FEED, words=("--reload",))


def state_of(daemon: Daemon) -> Status:
    return control.status(daemon.url, 60)


def read_epoch(connection: penstock.Connection) -> set[float]:
    return {batch.item() for batch in connection.batches()}


def test_an_epoch_finishes_with_its_code_and_the_next_one_has_the_new_code(serve: Serve, tmp_path: Path) -> None:
    daemon = start(serve, tmp_path)
    with penstock.connect(daemon.url) as training, penstock.connect(daemon.url) as validation:
        before = state_of(daemon)
        batches = training.batches()
        values = [next(batches).item()]
        write(daemon.folder, "2")
        says(daemon, "the next epoch is read from the new code")

        # A worker that starts meanwhile has the old code, too.
        wait_until(lambda: len(daemon.workers()) == 2)  # the process that tried the new code has ended
        daemon.workers()[0].kill()
        says(daemon, "is ready", 3)
        values += [batch.item() for batch in batches]
        assert values == [1] * 100
        assert read_epoch(validation) == {2}
        assert read_epoch(training) == {2}
        after = state_of(daemon)
        assert (after.pid, after.id != before.id) == (before.pid, True), "a reader of two statuses can tell"

        write(daemon.folder, "")
        says(daemon, "the new code cannot be served, so the old code goes on: ")
        assert "SyntaxError: invalid syntax (helper.py, line 1)" in daemon.stderr()
        assert read_epoch(training) == {2}

        # Nobody reads an epoch now.
        write(daemon.folder, "3")
        says(daemon, "restarting with the new code", 2)
        assert read_epoch(training) == read_epoch(validation) == {3}

        batches = training.batches()
        next(batches)
        write(daemon.folder, "3.5")
        says(daemon, "the next epoch is read from the new code", 3)
        assert sum(1 for _ in batches) == 99
        with pytest.raises(penstock.StateMismatch, match=r"spec was int64\[\] and is float64\[\] now"):
            read_epoch(training)
    says(daemon, "feed feed: samples are now float64[] and were int64[]: trainers that read it get an error")
    with penstock.connect(daemon.url) as connection:
        assert read_epoch(connection) == {3.5}
        batches = connection.batches()
        next(batches)
        write(daemon.folder, "4.5")
        says(daemon, "the next epoch is read from the new code", 4)
        daemon.process.send_signal(signal.SIGTERM)  # the user wants it to end, and no other daemon instead
        assert sum(1 for _ in batches) == 99
        assert daemon.process.wait(50) == 0


@pytest.mark.parametrize("edit", ["2", ""], ids=["good", "bad"])
def test_the_only_worker_is_replaced_with_the_old_code_after_an_edit(serve: Serve, tmp_path: Path, edit: str) -> None:
    folder = tmp_path / "daemon0"
    folder.mkdir()
    write(folder, "1")
    daemon = serve(FEED, words=("--reload",), workers=1)
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        values = [next(batches).item()]
        write(folder, edit)
        for times in (2, 3):
            (worker,) = daemon.workers()
            worker.kill()
            says(daemon, "worker 0 is ready", times)
            values += [next(batches).item() for _ in range(20)]
        if edit:
            says(daemon, "the next epoch is read from the new code")
        else:
            says(daemon, "the new code cannot be served, so the old code goes on: ")
        values += [batch.item() for batch in batches]
        assert values == [1] * 100
        if not edit:
            daemon.workers()[0].kill()
        assert read_epoch(connection) == {2 if edit else 1}


def test_a_feed_that_cannot_be_started_waits_for_a_change(tmp_path: Path) -> None:
    (tmp_path / "feeds.py").write_text(textwrap.dedent(FEED))
    command = [sys.executable, "-m", "penstock_server", "serve", "feeds:feed", "--reload", "--workers", "1", "--bind"]
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        daemon = subprocess.Popen(
            [*command, "tcp://127.0.0.1:0"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    with daemon:
        try:
            until(lambda: "waiting for a change of feeds.py" in log.read_text())
            write(tmp_path, "7")  # a module that did not exist before
            assert daemon.stdout is not None
            with penstock.connect(daemon.stdout.readline().split()[1]) as connection:
                assert read_epoch(connection) == {7}
            daemon.send_signal(signal.SIGINT)
            assert daemon.wait(50) == 0
        finally:
            daemon.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_change(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "feeds.py").write_text(textwrap.dedent(FEED))
    command = [sys.executable, "-m", "penstock_server", "serve", "feeds:feed", "--reload", "--workers", "1", "--bind"]
    log = tmp_path / "log"
    with log.open("wb") as stderr, subprocess.Popen([*command, "tcp://127.0.0.1:0"], cwd=tmp_path, stderr=stderr) as it:
        try:
            until(lambda: "waiting for a change of feeds.py" in log.read_text())
            it.send_signal(number)
            assert it.wait(50) == 0
            assert log.read_text().endswith("stopped\n")
        finally:
            it.kill()


@pytest.mark.parametrize(("feed", "port", "why"), [("feeds:feed", None, "in use"), ("nothing:feed", 0, "no module")])
def test_an_error_that_is_not_in_the_code_ends_the_daemon(
    tmp_path: Path, feed: str, port: int | None, why: str
) -> None:
    (tmp_path / "feeds.py").write_text(textwrap.dedent(FEED))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1] if port is None else port}"
        ended = subprocess.run(
            [sys.executable, "-m", "penstock_server", "serve", feed, "--reload", "--workers", "1", "--bind", bind],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 1
    assert why in ended.stderr


# --- which files ---


def test_sources_are_the_modules_and_what_they_import_from_their_tree(tmp_path: Path) -> None:
    def module(path: str, text: str = "") -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    wanted = {
        module("feeds.py", "import numpy, one.two\nfrom three import four, five\ndef f():\n    import late\n"),
        module("one/__init__.py"),
        module("one/two.py", "from . import sibling\nfrom .deep.er import name\nfrom .. import outside"),
        module("one/sibling.py", "import feeds"),
        module("one/deep/er.py"),
        module("three/four.py", "this is no Python"),
        module("late.py"),
    }
    module("train.py", "import feeds")
    module("outside.py")
    wanted.add(tmp_path / "outside.py")
    sources = Sources([f"{tmp_path}/feeds.py:train", f"{tmp_path}/feeds.py:val"])
    before = sources.contents()
    assert set(before) == wanted
    module("three/four.py", "import six")
    module("six.py")
    now = sources.contents()
    assert set(now) == wanted | {tmp_path / "six.py"}
    assert changed(before, now) == "four.py, six.py"
    module("three/four.py", "this is no Python")
    assert sources.contents() == before, "back to what it was"
    feeds = (tmp_path / "feeds.py").read_text()
    module("feeds.py", "def f(:\n")
    assert changed(before, sources.contents()) == "feeds.py", "what it imports is unknown, and has not changed"
    module("late.py", "1")
    assert changed(before, sources.contents()) == "feeds.py, late.py"
    module("late.py")
    module("feeds.py", feeds)
    (tmp_path / "late.py").unlink()
    assert changed(before, sources.contents()) == "late.py"


# --- when ---


class FakeDaemon:
    ready, draining, between_epochs = True, False, False

    def renew(self) -> None:
        self.draining = True

    def status(self) -> Status:
        return of(Status)


class FakeTrial:
    def __init__(self) -> None:
        self.result: bool | StartError = False
        self.stopped = False

    def outcome(self) -> bool | StartError:
        return self.result

    def stop(self) -> None:
        self.stopped = True


def test_the_daemon_goes_over_when_the_code_is_tried_and_no_epoch_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "feeds.py"
    file.write_text("version = 1")
    trials: list[FakeTrial] = []

    def trial() -> Any:
        trials.append(FakeTrial())
        return trials[-1]

    kept: list[bytes] = []
    monkeypatch.setattr(saved_sources, "keep", lambda sources: kept.append(sources[file]))
    reloader, daemon = Reloader([f"{file}:feed"], trial), FakeDaemon()

    def look(times: int = 1) -> tuple[int, bool, bool]:
        for _ in range(times):
            reloader.look(daemon)
        return len(trials), reloader.pending, daemon.draining

    assert look(3) == (0, False, False)
    file.write_text("version = 2")
    assert reloader.stale()
    assert look() == (0, False, False), "somebody may still be writing"
    assert look(3) == (1, False, False), "it is tried once"
    file.write_text("version = 3")
    assert look() == (1, False, False)
    assert trials[0].stopped
    assert look() == (2, False, False)
    trials[1].result = StartError("no")
    assert look(5) == (2, False, False), "and not again"
    file.write_text("version = 4")
    assert look(2) == (3, False, False)
    trials[2].result = True
    assert look(2) == (3, True, False), "an epoch is being read"
    file.write_text("version = 1")
    assert look(2) == (3, False, False), "there is no longer any new code"
    assert not reloader.stale()
    file.write_text("version = 5")
    assert look(2) == (4, False, False)
    trials[3].result = True
    daemon.between_epochs = True
    assert look() == (4, True, True)
    file.write_text("version = 6")  # which nobody has tried
    reloader.begin()
    assert kept == [b"version = 1", b"version = 5"]
    assert not reloader.pending
    assert reloader.stale()
    daemon = FakeDaemon()
    assert look(2) == (5, False, False)
