"""What a user at a terminal and a service manager see while feeds start, epochs finish, and commands work."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import penstock
from penstock_proto import Unreachable
from penstock_proto.messages import Doing
from penstock_proto.status.feed_status import Feed
from penstock_proto.status.status_shape import Failing, Status
from penstock_proto.status.stream_status import Stream
from penstock_proto.status.worker_status import Worker
from penstock_server.cli.progress import words
from penstock_server.cli.service_manager import Phase, ServiceManager
from penstock_server.status.phase import phase
from penstock_server.to_daemon import control
from tests.conftest import Serve
from tests.fakes.statuses import of

ROOT = Path(__file__).resolve().parents[2]

FEED = """
    import os, time
    from penstock_server import Feed
    def splits():
        while not os.path.exists("go"):
            time.sleep(0.02)
        return range(20)
    def numbers(split):
        yield "NOTIFY_SOCKET" in os.environ or "WATCHDOG_USEC" in os.environ
    feed = Feed(numbers, splits=splits, batch_size=1, turn=1, samples=20)
"""


class Terminal:
    """A terminal on which a program writes; `wait_for` returns when a regular expression matches what it has shown."""

    def __init__(self) -> None:
        self._ours, self.fd = pty.openpty()
        self._shown = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 4096)
            except OSError:  # the other end is closed
                return
            with self._changed:
                self._shown += data.decode(errors="replace")
                self._changed.notify()

    def wait_for(self, pattern: str) -> str:
        """Return the text that matched. pytest's timeout ends a wait in vain."""
        with self._changed:
            self._changed.wait_for(lambda: re.search(pattern, self._shown))
            found = re.search(pattern, self._shown)
            assert found is not None
            return found[0]

    @property
    def last_line(self) -> str:
        """The text after the last line end, as a user sees it."""
        return re.split(r"\n|\x1b\[2?K", self._shown)[-1]

    def close(self) -> None:
        os.close(self.fd)
        self._reader.join()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    """Yield the socket of a service manager. An address that begins with "@" is abstract, and not a file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + address[1:] if address.startswith("@") else address)
        listening.settimeout(60)
        yield listening


@contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process in any case."""
    with process:
        try:
            yield
        finally:
            process.kill()


def hear_until(listening: socket.socket, line: str) -> list[str]:
    """Return the lines that the manager receives, up to the message with this line."""
    heard: list[str] = []
    while line not in heard:
        heard += listening.recv(4096).decode().splitlines()
    return heard


# --- the service manager ---


def test_the_manager_hears_each_change_once_and_is_asked_for_time_while_something_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with manager(str(tmp_path / "notify")) as listening:
        told = ServiceManager()
        assert "NOTIFY_SOCKET" not in os.environ

        def said(phase: Phase) -> list[str]:
            told.tell(phase)
            listening.setblocking(False)
            try:
                return listening.recv(4096).decode().splitlines()
            except BlockingIOError:
                return []

        more_time = "EXTEND_TIMEOUT_USEC=15000000"
        assert said(Phase(False, False, "starting")) == ["STATUS=starting", more_time]
        assert said(Phase(False, False, "starting")) == [more_time]
        assert said(Phase(True, False, "serving")) == ["READY=1", "STATUS=serving"]
        assert said(Phase(True, False, "serving")) == []
        assert said(Phase(True, True, "finishing")) == ["STATUS=finishing", "STOPPING=1", more_time]
        assert said(Phase(True, True, "finishing")) == [more_time]
    told.tell(Phase(True, True, "stopping"))  # the manager is gone, and the daemon goes on
    (tmp_path / "notify").unlink()
    with manager(str(tmp_path / "notify")) as listening:
        assert said(Phase(True, True, "stopping"))[0] == "STATUS=stopping", "a status that was not heard is sent again"


def test_without_a_manager_nothing_is_said_and_a_private_daemon_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ServiceManager().listens
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with manager(str(tmp_path / "notify")) as listening:
        ServiceManager(private=True).tell(Phase(True, False, "serving"))
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.recv(4096)


def test_a_daemon_tells_its_terminal_and_its_manager_how_far_it_is(tmp_path: Path, terminal: Terminal) -> None:
    (tmp_path / "feeds.py").write_text(textwrap.dedent(FEED))
    environment = os.environ | {"NOTIFY_SOCKET": "@penstock-test-" + os.urandom(8).hex(), "WATCHDOG_USEC": "60000000"}
    command = [sys.executable, "-m", "penstock_server", "serve", "feeds:feed", "--workers", "2"]
    with manager(environment["NOTIFY_SOCKET"]) as listening:
        daemon = subprocess.Popen(
            [*command, "--bind", "tcp://127.0.0.1:0"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=terminal.fd,
            text=True,
        )
        with killed(daemon):
            assert daemon.stdout is not None
            terminal.wait_for(r"starting: [0-2] of 2 workers ready, splits\(\), which lists the splits \(\d+ s\)")
            heard = hear_until(listening, "EXTEND_TIMEOUT_USEC=15000000")
            assert any(line.startswith("STATUS=starting: ") for line in heard)
            assert "READY=1" not in heard
            (tmp_path / "go").touch()
            assert "WATCHDOG=1" in hear_until(listening, "READY=1")
            url = daemon.stdout.readline().split()[1]
            hear_until(listening, "WATCHDOG=1")
            assert terminal.last_line == "", "no line while nothing is waited for"
            with penstock.connect(url) as connection:
                batches = connection.batches()
                values = [next(batches).item()]
                daemon.send_signal(signal.SIGTERM)
                hear_until(listening, "STOPPING=1")
                shown = terminal.wait_for(
                    r"finishing the epoch of 1 consumer: \d+ of 20 batches sent; Ctrl-C again \w+"
                )
                assert int(re.findall(r"\d+", shown)[1]) < 20
                values += [batch.item() for batch in batches]
            assert values == [False] * 20, "workers do not see the manager's variables"
            assert daemon.wait(60) == 0
    assert terminal.last_line == ""


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        ("bench feeds.py:feed --seconds 0.2 --warmup 0.1 --workers 1", ["connecting", "first batch", "measuring"]),
        ("check feeds.py:feed --seconds 0.2", ["importing", "reading", "reading again"]),
    ],
)
def test_a_command_that_takes_its_time_shows_a_bar_that_is_gone_at_the_end(
    tmp_path: Path, terminal: Terminal, command: str, steps: list[str]
) -> None:
    (tmp_path / "feeds.py").write_text(textwrap.dedent(FEED).replace("yield", "time.sleep(0.02); yield"))
    (tmp_path / "go").touch()
    ran = subprocess.run(
        [sys.executable, "-m", "penstock_command", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=terminal.fd,
        timeout=60,
    )
    assert ran.returncode == 0
    assert b"\x1b" not in ran.stdout
    for step in steps:
        terminal.wait_for(step)
    assert terminal.last_line == ""


def test_nothing_is_drawn_where_standard_error_is_no_terminal(serve: Serve) -> None:
    daemon = serve(FEED.replace('os.path.exists("go")', "True"))
    with penstock.connect(daemon.url) as connection:
        next(connection.batches())
        daemon.process.send_signal(signal.SIGTERM)
        with suppress(Unreachable):  # it may be done already
            while not control.status(daemon.url, 5).draining:
                pass
    assert daemon.process.wait(50) == 0
    assert not {"\x1b", "\r"} & set(daemon.stderr())


# --- words ---

STREAM = of(Stream, feed="train", reading=True, batches=31)
WORKER = of(Worker, ready=True, makes_batches=True)
SERVING = of(
    Status,
    ready=True,
    workers=[WORKER],
    feeds=[of(Feed, name="train", batches=120), of(Feed, name="noise", batches=None)],
)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "serving 2 feeds to 0 consumers"),
        ({"draining": True, "streams": [STREAM]}, "finishing the epoch of 1 consumer: 31 of 120 batches sent"),
        (
            {"draining": True, "streams": [STREAM, STREAM, replace(STREAM, reading=False)]},
            "finishing the epochs of 2 consumers: 62 of 240 batches sent",
        ),
        (
            {"draining": True, "streams": [STREAM, replace(STREAM, feed="noise")]},
            "finishing the epochs of 2 consumers: 62 batches sent",
        ),
        (
            {"draining": True, "streams": [STREAM], "workers": [replace(WORKER, makes_batches=False)]},
            "no worker makes batches: run `penstock join`",
        ),
        ({"draining": True, "streams": [replace(STREAM, reading=False)]}, "stopping, 1 consumer left"),
        (
            {"ready": False, "workers": [WORKER, replace(WORKER, ready=False)]},
            "starting: 1 of 2 workers ready",
        ),
        (
            {"ready": False, "workers": [WORKER], "phase": "importing scenes.py:feed (7 s)"},
            "starting: 1 of 1 worker ready, importing scenes.py:feed (7 s)",
        ),
    ],
)
def test_what_is_waited_for_in_words(state: dict[str, Any], said: str) -> None:
    assert words(replace(SERVING, **state)) == said


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "starting workers"),
        (
            {"workers": [replace(WORKER, ready=False, doing=Doing("importing scenes.py:feed", None, 0, 12.1))]},
            "importing scenes.py:feed (12 s)",
        ),
        (
            {"workers": [replace(WORKER, ready=False, stopped=True, doing=Doing("importing a:b", None, 0, 2))]},
            "importing a:b (2 s, stopped by a signal)",
        ),
        (
            {
                "workers": [
                    replace(WORKER, ready=False, doing=Doing("importing scenes.py:feed", None, 0, 12.1)),
                    replace(WORKER, doing=Doing("splits(), which lists the splits", None, 0, 3.0)),
                ]
            },
            "splits(), which lists the splits (3 s)",
        ),
        (
            {"workers": [replace(WORKER, doing=Doing("a.h5", None, 0, 7.1))]},
            "reading a first sample: a.h5 (7 s)",
        ),
        (
            {"failing": [Failing(feed="train", times=3, error="no disk\non node 7")]},
            "feed train failed 3 times and is tried again: no disk on node 7",
        ),
        ({"ready": True}, ""),
        ({"ready": True, "draining": True}, "the daemon is stopping"),
    ],
)
def test_what_keeps_feeds_from_being_read_in_words(state: dict[str, Any], said: str) -> None:
    assert phase(replace(SERVING, **{"ready": False, "workers": []} | state)) == said
