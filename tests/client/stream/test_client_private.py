"""A private daemon: `penstock.connect("scenes.py:feed")` starts and ends one. Here it is a scripted daemon."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock
from penstock._stream import private_daemon, receiver
from penstock_proto import distribution
from tests.processes.forked import children

TESTS = Path(__file__).resolve().parents[3]

SERVE = """
import json, sys, time
sys.path.insert(0, TESTS)
from tests.fakes.fake_daemon import FakeDaemon, numbers
open(NOTES, "w").write(json.dumps(sys.argv[1:]))
print("a line of the user's own")
info, epoch = numbers(4)
with FakeDaemon(info, epoch) as daemon:
    print("ready " + daemon.url, flush=True)
    print("later words", flush=True)
    sys.stdin.read()
    time.sleep(LINGER)
"""


class Fake:
    """Replaces `penstock_server` in child processes with a package whose `__main__` is the code given to `is_`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._package = folder / "penstock_server"
        self._package.mkdir()
        (self._package / "__init__.py").touch()
        self.notes = folder / "notes"
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))

    def is_(self, code: str, **values: object) -> None:
        values |= {"TESTS": str(TESTS), "NOTES": str(self.notes)}
        settings = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        (self._package / "__main__.py").write_text(settings + code)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path, monkeypatch)


def daemons() -> list[psutil.Process]:
    return children()


def test_a_private_daemon_serves_and_ends_with_the_connection(server: Fake, capfd: pytest.CaptureFixture[str]) -> None:
    server.is_(SERVE, LINGER=0)
    with penstock.connect("scenes.py:feed", workers=3, memory=1 << 20) as connection:
        assert len(list(connection.batches())) == 4
        (process,) = daemons()
    assert not process.is_running()
    words = '["serve", "scenes.py:feed", "--bind", "tcp://127.0.0.1:0", "--workers", "3", "--memory", "1048576"'
    assert server.notes.read_text() == words + ', "--until-stdin-closes"]'
    err = capfd.readouterr().err
    assert "a line of the user's own\n" in err
    assert "later words\n" in err


def test_options_that_were_not_given_are_left_to_the_daemon(server: Fake) -> None:
    server.is_(SERVE, LINGER=0)
    penstock.connect("scenes:feed").close()
    assert '"--workers"' not in server.notes.read_text()
    assert '"--memory"' not in server.notes.read_text()


def test_a_private_daemon_ends_when_nobody_holds_the_connection(server: Fake) -> None:
    server.is_(SERVE, LINGER=0)
    batches = penstock.connect("scenes.py:feed").batches()
    next(batches)
    (process,) = daemons()
    del batches
    process.wait(60)


def _read(dataset: Any) -> Any:
    for _ in dataset:
        pass
    return dataset


def _broken_off(dataset: Any) -> Any:
    for _ in dataset:
        break
    return dataset


USES: dict[str, Callable[[Any], Any]] = {
    "not read": lambda dataset: dataset,
    "read": _read,
    "broken off": _broken_off,
    "an iterator over it": lambda dataset: (iterator := iter(dataset), next(iterator)),
    "one made from it": lambda dataset: _read(dataset.map(lambda x, y: x).batch(2)),
}


def test_a_private_daemon_ends_at_once_with_the_last_reference_to_its_dataset(tf: Any, server: Fake) -> None:
    server.is_(SERVE, LINGER=0)
    gc.disable()  # nothing may depend on the collector
    try:
        for use, of in USES.items():
            held = of(penstock.dataset("scenes.py:feed"))
            (process,) = daemons()
            ended, _ = psutil.wait_procs([process], timeout=0.2)
            assert not ended, f"{use}: the daemon ended before the last reference"
            del held
            _, alive = psutil.wait_procs([process], timeout=60)
            assert not alive, use
        arrays = list(penstock.dataset("scenes.py:feed").as_numpy_iterator())  # the arrays keep no dataset
        psutil.wait_procs(daemons(), timeout=60)
        assert not daemons()
        assert [y[0] for _, y in arrays] == [0, 1, 2, 3]
        del arrays
        tf.constant(0)  # TensorFlow frees the memory of NumPy arrays in its next call
    finally:
        gc.enable()


def test_a_private_daemon_ends_at_once_when_the_stream_failed_and_the_connection_is_gone(server: Fake) -> None:
    server.is_(SERVE.replace("numbers(4)", "numbers(4, batches=5)"), LINGER=0)
    gc.disable()
    try:
        batches = penstock.connect("scenes.py:feed").batches()
        (process,) = daemons()
        with contextlib.suppress(penstock.IncompleteEpoch):
            list(batches)
        del batches
        _, alive = psutil.wait_procs([process], timeout=60)
        assert not alive
    finally:
        gc.enable()


def test_a_private_daemon_that_is_killed_is_started_again_and_the_stream_goes_on(server: Fake) -> None:
    server.is_(SERVE, LINGER=0)
    with penstock.connect("scenes.py:feed", workers=3) as connection:
        batches = connection.batches()
        seen = [int(next(batches)[1][0]) for _ in range(2)]
        (process,) = daemons()
        process.kill()
        seen += [int(y[0]) for _, y in batches]
        seen += [int(y[0]) for _, y in connection.batches()]
        assert seen == [0, 1, 2, 3, 100, 101, 102, 103]
        assert connection.stats()["reconnects"] == 1
        (again,) = daemons()
        assert again.pid != process.pid
    assert not daemons()


def test_closing_while_a_killed_private_daemon_starts_again_ends_both(
    server: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "_CLOSE", 1000.0)  # so `close` cannot return because of a timeout
    server.is_(SERVE, LINGER=0)
    connection = penstock.connect("scenes.py:feed")
    batches = connection.batches()
    next(batches)
    (process,) = daemons()
    server.is_("import sys; open(NOTES, 'w').write('starts'); sys.stdin.read()")
    process.kill()
    deadline = time.monotonic() + 60
    while server.notes.read_text() != "starts":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    connection.close()
    with pytest.raises(penstock.StreamClosed):
        list(batches)
    assert not daemons()


def test_a_daemon_that_does_not_end_is_made_to(server: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_daemon, "_PATIENCE", 0.3)
    monkeypatch.setattr(receiver, "_CLOSE", 1000.0)
    server.is_("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE, LINGER=1000)
    connection = penstock.connect("scenes.py:feed")
    connection.close()
    assert not daemons()


def test_what_the_daemon_reports_is_raised(server: Fake) -> None:
    server.is_(
        """print('error {"kind": "StartError", "message": "scenes.py has no feed; it has: feeds"}', flush=True)"""
    )
    with pytest.raises(penstock.StartError, match=r"scenes\.py has no feed; it has: feeds"):
        penstock.connect("scenes.py:feed")
    assert not daemons()


def test_a_daemon_that_ends_before_it_is_ready_is_an_error(server: Fake) -> None:
    server.is_("import sys; sys.exit(7)")
    with pytest.raises(penstock.StartError, match=r"'scenes.py:feed' ended with status 7 .*stderr"):
        penstock.connect("scenes.py:feed")


def test_without_the_server_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(penstock.StartError, match=re.escape(distribution.pip_install("server"))):
        penstock.connect("scenes.py:feed")


def test_waiting_for_a_slow_import_can_be_broken_off(server: Fake) -> None:
    server.is_("import sys; sys.stdin.read()")
    threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        penstock.connect("scenes.py:feed", timeout=0.1)  # only the handshake has this timeout
    assert time.monotonic() - began > 0.6
    assert not daemons()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "exit"])
def test_a_private_daemon_ends_with_its_trainer_however_it_ends(server: Fake, how: str) -> None:
    server.is_(SERVE, LINGER=0)
    code = """
import os, sys, time, penstock
connection = penstock.connect("scenes.py:feed")
batches = connection.batches()
kept = next(batches)
child = os.fork()
if child == 0:  # which holds nothing open
    time.sleep(100)
    os._exit(0)
print(connection._handle.receiver._connector.daemon._process.pid, child, flush=True)
if sys.argv[1] != "exit":
    time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code, how], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    process, child = (psutil.Process(int(pid)) for pid in trainer.stdout.readline().split())
    if how != "exit":
        trainer.send_signal(getattr(signal, how))
    trainer.wait(60)
    process.wait(60)
    child.kill()
    trainer.stdout.read()
    trainer.stdout.close()


def test_a_script_that_serves_itself_without_a_guard_is_refused_and_starts_nothing_without_end(tmp_path: Path) -> None:
    script = tmp_path / "whole.py"
    script.write_text(
        "import penstock\nfrom penstock_server import Feed\n"
        "feed = Feed([1, 2, 3], batch_size=2)\n"
        "for batch in penstock.connect('whole.py:feed', workers=1).batches(): print(batch)\n"
    )
    done = subprocess.run([sys.executable, "whole.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'put the training code under `if __name__ == "__main__":`' in done.stderr


def test_output_without_lines_is_passed_on_and_not_collected(
    server: Fake, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_daemon, "MAX_LINE", 1000)
    server.is_(f"print('.' * 500_000, end='')\nprint('!' * 500_000)\n{SERVE}", LINGER=0)
    with penstock.connect("scenes.py:feed") as connection:
        assert len(list(connection.batches())) == 4
    err = capfd.readouterr().err
    assert err.count(".") >= 500_000
    assert err.count("!") >= 500_000
