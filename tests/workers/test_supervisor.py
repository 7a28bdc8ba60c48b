"""Workers that die, hang, come and go: what the supervisor reports of them, and that they leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock_proto import messages as m
from penstock_proto.transport import codec
from penstock_server.worker_state.activity import Activity
from penstock_server.workers import hang_detection, supervisor
from penstock_server.workers.supervisor import Supervisor
from penstock_server.workers.worker_config import WorkerConfig
from tests.processes.forked import children

FAREWELL = codec.encode(m.Shutdown())
LIST = codec.encode(m.ListSplits(run=7, feed="feed", epoch=0))
"""Makes a worker run `files` of its feed."""

FEED = """
    import ctypes, os, re, signal, time
    from pathlib import Path
    from penstock_server import Feed
    {top}
    def files():
        {files}
        return [0]
    def numbers(split):
        yield split
    feed = Feed(numbers, splits=files, batch_size=1)
"""


class Watched:
    """A supervisor and its reports, in order: ("imported", 0), ("died", 0), ("given up", 0)."""

    def __init__(self, feed: str, count: int = 1, hang_timeout: float | None = None) -> None:
        self.told: list[tuple[str, int]] = []
        self.how: list[str] = []
        self.did: list[Activity | None] = []
        self.why: list[str] = []
        self.at_death: Callable[[int], None] = lambda number: None
        config = WorkerConfig(feeds=(feed,), hang_timeout=hang_timeout)
        self.supervisor = Supervisor(config, count)
        self.supervisor.start(self)

    def count(self, what: str, number: int) -> int:
        return self.told.count((what, number))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait without a limit. Pytest's timeout ends a test in which the event never comes."""
        while not condition():
            await asyncio.sleep(0.01)

    async def imported(self, number: int, times: int = 1) -> None:
        await self.until(lambda: self.count("imported", number) >= times)

    def heard(self, number: int, data: bytes, fd: int | None) -> None:
        if fd is not None:
            os.close(fd)
        message = codec.from_worker(data)
        self.told.append((type(message).__name__.lower(), number))
        if isinstance(message, m.Imported):
            self.supervisor.ready(number)

    def died(self, number: int, how: str, doing: Activity | None) -> None:
        self.told.append(("died", number))
        self.how.append(how)
        self.did.append(doing)
        self.at_death(number)

    def given_up(self, number: int, why: str) -> None:
        self.told.append(("given up", number))
        self.why.append(why)


Watch = Callable[..., None]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """`watch(body, top=..., files=..., count=...)` runs `body(watched)` beside workers, and stops the workers after
    it."""

    def run(
        body: Callable[[Watched], Coroutine[Any, Any, None]],
        *,
        top: str = "",
        files: str = "pass",
        count: int = 1,
        hang_timeout: float | None = None,
    ) -> None:
        module = tmp_path / "feeds.py"
        module.write_text(textwrap.dedent(FEED).format(top=top, files=files))

        async def main() -> None:
            watched = Watched(f"{module}:feed", count, hang_timeout)
            try:
                await body(watched)
            finally:
                await watched.supervisor.stop(FAREWELL)

        asyncio.run(main())

    return run


@pytest.mark.parametrize(
    ("files", "how"),
    [
        ("os._exit(7)", "exited with status 7"),
        ("ctypes.string_at(0)", "was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (the kernel's out-of-memory killer sends it too)"),
    ],
)
def test_a_death_is_told_with_how_it_came_and_what_the_worker_did(watch: Watch, files: str, how: str) -> None:
    async def body(watched: Watched) -> None:
        await watched.imported(0)
        first = watched.supervisor.workers[0].pid
        watched.supervisor.send(0, LIST)
        await watched.imported(0, times=2)
        assert watched.told == [("imported", 0), ("died", 0), ("imported", 0)]
        assert watched.how == [how]
        (did,) = watched.did
        assert did is not None
        assert did.in_user_code
        assert did.run == 7
        worker = watched.supervisor.workers[0]
        assert worker.pid not in (None, first)
        assert worker.restarts == 1
        assert worker.doing is None, "the new process has its own page"

    watch(body, files=files)


def test_what_a_worker_said_last_is_heard_before_its_death(watch: Watch) -> None:
    async def body(watched: Watched) -> None:
        await watched.imported(0)
        for _ in range(20):
            watched.supervisor.send(0, LIST)
        watched.supervisor.send(0, FAREWELL)
        await watched.until(lambda: watched.count("died", 0) == 1)
        assert watched.told == [("imported", 0), *[("splitslisted", 0)] * 20, ("died", 0)]
        assert watched.how == ["exited with status 0"]

    watch(body)


def test_what_is_said_to_a_dead_worker_reaches_the_next(watch: Watch) -> None:
    async def body(watched: Watched) -> None:
        await watched.imported(0)
        watched.at_death = lambda number: watched.supervisor.send(number, LIST)
        watched.supervisor.kill(0)
        await watched.until(lambda: watched.count("splitslisted", 0) == 1)
        assert watched.told == [("imported", 0), ("died", 0), ("imported", 0), ("splitslisted", 0)]

    watch(body)


@pytest.mark.parametrize(
    "files",
    ["time.sleep(3600)", "re.match('(a+)+$', 'a' * 99 + 'b')", "while True: pass"],
    ids=["sleeps", "holds the GIL in C", "spins"],
)
def test_a_worker_that_hangs_is_killed_with_the_line_it_stands_on(watch: Watch, files: str, tmp_path: Path) -> None:
    async def body(watched: Watched) -> None:
        await watched.imported(0)
        await watched.imported(1)
        watched.supervisor.send(0, LIST)
        await watched.imported(0, times=2)
        line = 1 + (tmp_path / "feeds.py").read_text().splitlines().index(f"    {files}")
        said = f"made no sample for 0.3 s and was killed; it was at {tmp_path}/feeds.py:{line} in files"
        assert watched.how == [said]
        assert watched.count("died", 1) == 0, "a worker that has no work does not hang"

    watch(body, files=files, count=2, hang_timeout=0.3)


def test_a_worker_that_cannot_say_where_it_stands_is_killed_all_the_same(watch: Watch) -> None:
    async def body(watched: Watched) -> None:
        await watched.imported(0)
        watched.supervisor.send(0, LIST)
        await watched.until(lambda: watched.count("died", 0) == 1)
        assert watched.how == ["made no sample for 0.3 s and was killed"]

    watch(body, files="os.kill(os.getpid(), signal.SIGSTOP)", hang_timeout=0.3)


def test_an_idle_worker_that_is_stopped_is_killed_when_it_is_given_work(watch: Watch) -> None:
    async def body(watched: Watched) -> None:
        await watched.imported(0)
        await watched.imported(1)
        workers = watched.supervisor.workers
        await watched.until(lambda: all(worker.look().waits for worker in workers.values()))  # type: ignore[union-attr]
        for worker in workers.values():
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
        await watched.until(lambda: workers[0].stopped and workers[1].stopped)
        await asyncio.sleep(1)
        assert watched.how == [], "nobody misses workers that have no work"
        watched.supervisor.send(0, LIST)
        watched.at_death = lambda number: watched.supervisor.send(number, LIST)
        await watched.until(lambda: watched.count("splitslisted", 0) == 1)
        assert watched.how == ["made no progress with its work for 0.3 s, stopped by a signal, and was killed"]
        assert watched.did[0] is not None
        assert not watched.did[0].in_user_code, "no split is to blame"
        assert watched.count("died", 1) == 0

    watch(body, count=2, hang_timeout=0.3)


def test_without_a_hang_timeout_a_worker_that_is_stopped_is_named_in_the_log(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hang_detection, "OUTSIDE_USER_CODE", 0.5)

    async def body(watched: Watched) -> None:
        await watched.imported(0)
        worker = watched.supervisor.workers[0]
        await watched.until(lambda: worker.look().waits)  # type: ignore[union-attr]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        watched.supervisor.send(0, LIST)
        await watched.until(lambda: "has not read its messages" in caplog.text)
        assert f"`kill -CONT {worker.pid}` continues it" in caplog.text
        os.kill(worker.pid, signal.SIGCONT)
        await watched.until(lambda: watched.count("splitslisted", 0) == 1)
        assert watched.how == []

    watch(body)


def test_what_a_worker_has_done_is_not_shown_as_though_it_went_on(watch: Watch) -> None:
    async def body(watched: Watched) -> None:
        await watched.imported(0)
        watched.supervisor.send(0, LIST)
        await watched.until(lambda: watched.count("splitslisted", 0) == 1)
        worker = watched.supervisor.workers[0]
        await watched.until(lambda: worker.look().waits)  # type: ignore[union-attr]
        assert worker.doing is None

    watch(body)


BUSY = Activity(run=1, number=0, split="a", samples=0, since_seconds=9.0, in_user_code=False)


@pytest.mark.parametrize(
    ("last", "unread", "stopped", "still"),
    [
        (None, 99, False, ""),
        (replace(BUSY, in_user_code=True), 0, False, "made no sample for 5 s"),
        (replace(BUSY, in_user_code=True, since_seconds=4), 99, True, ""),
        (replace(BUSY, importing=True), 99, True, ""),
        (BUSY, 0, False, ""),
        (replace(BUSY, since_seconds=10), 0, False, "made no progress with its work for 10 s"),
        (BUSY, 0, True, "made no progress with its work for 5 s, stopped by a signal,"),
        (replace(BUSY, waits=True), 4, True, ""),
        (replace(BUSY, waits=True), 5, True, "made no progress with its work for 5 s, stopped by a signal,"),
        (replace(BUSY, waits=True, since_seconds=99), 9, False, ""),
        (replace(BUSY, waits=True), 10, False, "made no progress with its work for 10 s"),
    ],
)
def test_who_stands_still(last: Activity | None, unread: float, stopped: bool, still: str) -> None:
    assert hang_detection.stands_still(last, unread=unread, awake=99, stopped=stopped, timeout=5) == still
    assert not hang_detection.stands_still(last, unread=unread, awake=1, stopped=stopped, timeout=5), "we stood still"


def test_imports_may_take_longer_than_the_hang_timeout(watch: Watch) -> None:
    async def body(watched: Watched) -> None:
        await watched.imported(0)
        assert watched.told == [("imported", 0)]

    watch(body, top="time.sleep(1)", hang_timeout=0.1)


def test_without_a_hang_timeout_nobody_is_asked(watch: Watch, tmp_path: Path) -> None:
    async def body(watched: Watched) -> None:
        await watched.imported(0)
        watched.supervisor.send(0, LIST)
        await watched.until((tmp_path / "inside").exists)
        await asyncio.sleep(1)
        assert watched.told == [("imported", 0)]
        doing = watched.supervisor.workers[0].doing
        assert doing is not None
        assert (doing.what, doing.split, doing.samples) == ("files(), which lists the splits", None, 0)

    watch(body, files=f"Path({str(tmp_path / 'inside')!r}).touch(); time.sleep(3600)")


def test_a_retired_worker_ends_in_silence_and_its_number_is_free(watch: Watch) -> None:
    async def body(watched: Watched) -> None:
        workers = watched.supervisor.workers
        for number in range(3):
            await watched.imported(number)
        process = psutil.Process(workers[1].pid)
        watched.supervisor.retire(1, FAREWELL)
        assert list(workers) == [0, 2]
        assert watched.supervisor.add() == 1
        assert watched.supervisor.add() == 3
        await watched.imported(1, times=2)
        await watched.imported(3)
        await watched.until(lambda: not process.is_running())
        assert not any(what == "died" for what, _ in watched.told)
        assert sorted(workers) == [0, 1, 2, 3]

    watch(body, count=3)


def test_a_retired_worker_that_does_not_end_is_killed(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "FAREWELL_SECONDS", 0.1)

    async def body(watched: Watched) -> None:
        await watched.imported(0)
        watched.supervisor.send(0, LIST)
        await watched.until((tmp_path / "inside").exists)
        process = psutil.Process(watched.supervisor.workers[0].pid)
        watched.supervisor.retire(0, FAREWELL)
        await watched.until(lambda: not process.is_running())
        assert watched.told == [("imported", 0)]

    watch(body, files=f"Path({str(tmp_path / 'inside')!r}).touch(); time.sleep(3600)")


def test_a_worker_that_is_retired_while_it_is_dead_is_not_started_again(watch: Watch) -> None:
    async def body(watched: Watched) -> None:
        await watched.imported(0)
        place = watched.supervisor.workers[0]
        watched.at_death = lambda number: watched.supervisor.retire(number, FAREWELL)
        watched.supervisor.kill(0)
        await watched.until(lambda: watched.count("died", 0) == 1)
        assert watched.supervisor.workers == {}
        assert place.timer is None
        assert place.pid is None

    watch(body)


def test_workers_may_leave_or_be_killed_before_they_have_started(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, go = tmp_path / "site-packages" / "slow.py", tmp_path / "go"
    library.parent.mkdir()
    library.write_text(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n")
    monkeypatch.setenv("PYTHONPATH", str(library.parent), prepend=os.pathsep)

    async def body(watched: Watched) -> None:
        watched.supervisor.retire(1, FAREWELL)
        watched.supervisor.kill(2)
        await watched.until(lambda: watched.count("died", 2) == 1)
        assert watched.how == ["was killed before it started"]
        go.touch()
        await watched.imported(0)
        await watched.imported(2)
        assert sorted(watched.told) == [("died", 2), ("imported", 0), ("imported", 2)]
        assert watched.supervisor.add() == 1
        await watched.imported(1)

    watch(body, top="import slow", count=3)


def test_a_place_whose_workers_die_five_times_before_they_are_ready_is_given_up(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(watched: Watched) -> None:
        await watched.until(lambda: bool(watched.why))
        assert watched.told == [("died", 0)] * 5 + [("given up", 0)]
        why = "died 5 times in a row before it was ready, and will not be started again: it exited with status 3"
        assert watched.why == [why]
        assert watched.why[0] in caplog.text
        place = watched.supervisor.workers[0]
        assert place.given_up
        assert place.timer is None
        watched.supervisor.send(0, LIST)
        watched.supervisor.kill(0)
        watched.supervisor.retire(0, FAREWELL)
        assert watched.supervisor.add() == 0

    watch(body, top="os._exit(3)")


def test_deaths_of_workers_that_were_ready_do_not_count(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "MOST_EARLY_DEATHS", 2)
    seen = str(tmp_path / "seen")
    every_other = f"Path({seen!r}).exists() or (Path({seen!r}).touch(), os._exit(3)); os.unlink({seen!r})"

    async def body(watched: Watched) -> None:
        await watched.imported(0)
        watched.supervisor.kill(0)
        await watched.imported(0, times=2)
        died = ("died", 0)
        assert watched.told == [died, ("imported", 0), died, died, ("imported", 0)]
        assert watched.supervisor.workers[0].restarts == 3

    watch(body, top=every_other)


def test_workers_that_cannot_even_be_started_are_given_up(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")

    async def body(watched: Watched) -> None:
        await watched.until(lambda: bool(watched.why))
        assert len(watched.how) == 5
        assert "could not be started ([Errno 2] No such file or directory" in watched.how[0]

    watch(body)


def test_a_stop_ends_workers_that_are_stuck_leaving_or_about_to_start(watch: Watch, tmp_path: Path) -> None:
    inside = tmp_path / "inside"

    async def body(watched: Watched) -> None:
        for number in range(3):
            await watched.imported(number)
        watched.supervisor.send(0, LIST)
        await watched.until(inside.exists)
        watched.supervisor.retire(0, FAREWELL)
        inside.unlink()
        watched.supervisor.send(1, LIST)
        await watched.until(inside.exists)
        watched.supervisor.kill(2)
        await watched.until(lambda: watched.count("died", 2) == 1)
        await watched.supervisor.stop(FAREWELL, patience=0.1)
        assert children() == []
        watched.supervisor.stop = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign]

    watch(body, files=f"Path({str(inside)!r}).touch(); time.sleep(3600)", count=3)
