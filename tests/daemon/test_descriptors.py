"""When file descriptors or memory run out, a stream waits or fails. The daemon and its workers go on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import zmq

import penstock
from penstock_proto import messages as m
from penstock_proto.transport import codec
from penstock_server.machine import descriptors
from penstock_server.shared_memory import arena
from penstock_server.shared_memory.arena import Arena
from penstock_server.to_daemon import control
from penstock_server.workers import worker_handle
from penstock_server.workers.supervisor import Supervisor
from penstock_server.workers.worker_config import WorkerConfig
from tests.conftest import Daemon, Serve

FEED = """
    import os, time
    import numpy as np
    from penstock_server import Feed

    def numbers(split):
        for i in range(100):
            yield np.full(64, 1000 * split + i)

    feed = Feed(numbers, splits=range(4), batch_size=1, turn=1, lanes=2)
"""
WHOLE = sorted(1000 * split + i for split in range(4) for i in range(100))
"""More batches, and without limits more slots, than the 256 descriptors that most daemons here may have."""


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Victim:
    """Reads a feed again and again, over a connection that was opened before, until it is stopped."""

    def __init__(self, url: str, transport: str) -> None:
        self.epochs = 0
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._connection = penstock.connect(url, transport=transport)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        until(lambda: self.epochs or self.error)

    def _read(self) -> None:
        try:
            while not self._over.is_set():
                assert sorted(int(batch[0, 0]) for batch in self._connection.batches()) == WHOLE
                self.epochs += 1
        except BaseException as error:
            self.error = error

    def goes_on(self) -> None:
        epochs = self.epochs
        until(lambda: self.epochs > epochs + 1 or self.error, 60)
        assert self.error is None

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._connection.close()
        assert self.error is None


@contextlib.contextmanager
def victim(daemon: Daemon, transport: str = "local") -> Iterator[Victim]:
    reading = Victim(daemon.url, transport)
    try:
        yield reading
    finally:
        reading.close()


def files(daemon: Daemon) -> int:
    return psutil.Process(daemon.process.pid).num_fds()


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_consumers_that_ask_for_thousands_of_slots_get_a_share_and_others_are_read(
    serve: Serve, transport: str
) -> None:
    daemon = serve(FEED, nofile=256)
    quiet = files(daemon)
    with victim(daemon, transport) as reading:
        context = zmq.Context()
        greedy = []
        try:
            for _ in range(4):
                connection = context.socket(zmq.DEALER)
                greedy.append(connection)
                connection.connect(daemon.url.rpartition("/")[0])
                connection.send(codec.encode(m.Hello(m.VERSION, "feed")))
                welcome = codec.from_server(connection.recv())
                assert isinstance(welcome, m.Welcome)
                connection.send(codec.encode(m.Open(welcome.session, b"", 4096, 1 << 40, 0)))
                assert isinstance(codec.from_server(connection.recv()), m.Opened | m.Failed)
                connection.send(codec.encode(m.Begin(0)))
            reading.goes_on()
            assert files(daemon) < 256
        finally:
            for connection in greedy:
                connection.close(0)
            context.term()
        reading.goes_on()
    until(lambda: files(daemon) <= quiet + 4)  # 4 for threads, and for files that are kept for later processes
    assert "restarted" not in daemon.stderr()


def test_a_stream_for_which_there_are_no_descriptors_is_refused_with_figures(serve: Serve) -> None:
    daemon = serve(FEED, nofile=256)
    connections = []
    try:
        with pytest.raises(penstock.MemoryBound, match=r"needs \d+ slots.*may have files open.*limit of open files"):
            for _ in range(40):
                connections.append(penstock.connect(daemon.url, transport="tcp"))
        assert len(connections) >= 3
        reading = [connection.batches() for connection in connections]
        for batches in reading:
            assert len(list(batches)) == len(WHOLE)
    finally:
        for connection in connections:
            connection.close()
    with penstock.connect(daemon.url) as connection:
        assert len(list(connection.batches())) == len(WHOLE)


def test_connections_on_this_host_that_only_lie_there_take_nothing_from_streams(serve: Serve) -> None:
    daemon = serve(FEED, nofile=256)
    unix = control.status(daemon.url, 60).unix
    with victim(daemon) as reading:
        idle = []
        try:
            for _ in range(60):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.setblocking(False)
                idle.append(connection)
                connection.connect("\0" + unix)
            assert reads(daemon), "the oldest connection without a session must make room"
            daemon.workers()[0].kill()
            reading.goes_on()
            until(lambda: len(daemon.workers()) == 2)
            assert files(daemon) < 256
        finally:
            for connection in idle:
                connection.close()
        until(lambda: reads(daemon))
        reading.goes_on()


def test_connections_over_tcp_that_only_lie_there_end_neither_the_daemon_nor_what_is_read(serve: Serve) -> None:
    daemon = serve(FEED, nofile=256)
    host, port = daemon.url.removeprefix("tcp://").partition("/")[0].split(":")
    with victim(daemon) as reading:
        idle = []
        try:
            for _ in range(290):
                connection = socket.socket()
                connection.setblocking(False)
                idle.append(connection)
                with contextlib.suppress(BlockingIOError):
                    connection.connect((host, int(port)))
            reading.goes_on()
            daemon.workers()[0].kill()
            reading.goes_on()
        finally:
            for connection in idle:
                connection.close()
        until(lambda: len(daemon.workers()) == 2)
        until(lambda: reads(daemon))
        reading.goes_on()


def reads(daemon: Daemon) -> bool:
    try:
        with penstock.connect(daemon.url, transport="local", timeout=5) as connection:
            return len(list(connection.batches())) == len(WHOLE)
    except penstock.PenstockError:
        return False


@pytest.mark.parametrize("spare", [0, 1, 2, 4, 7])
def test_a_worker_that_dies_while_there_are_no_descriptors_is_replaced_when_there_are(serve: Serve, spare: int) -> None:
    daemon = serve(FEED, patched={"workers.supervisor.LAST_PAUSE": 0.1, "workers.supervisor.FIRST_PAUSE": 0.1})
    process = psutil.Process(daemon.process.pid)
    with penstock.connect(daemon.url, transport="tcp") as connection:
        assert len(list(connection.batches())) == len(WHOLE)
        before = sorted(worker.pid for worker in daemon.workers())
        hard = process.rlimit(psutil.RLIMIT_NOFILE)[1]
        process.rlimit(psutil.RLIMIT_NOFILE, (files(daemon) + spare, hard))
        for worker in daemon.workers():
            worker.kill()
        until(lambda: daemon.stderr().count("was killed by SIGKILL") >= 2)
        time.sleep(0.7)  # time for several attempts to start workers
        assert daemon.process.poll() is None, daemon.stderr()
        process.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))
        until(lambda: len(daemon.workers()) == 2)
        assert sorted(worker.pid for worker in daemon.workers()) != before
        assert sorted(int(batch[0, 0]) for batch in connection.batches()) == WHOLE


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_stream_that_finds_no_descriptor_for_a_slot_waits_or_fails_and_the_daemon_goes_on(
    serve: Serve, transport: str
) -> None:
    daemon = serve(FEED, patched={"shared_memory.slot_assignment.PATIENCE": 0.5})
    process = psutil.Process(daemon.process.pid)
    hard = process.rlimit(psutil.RLIMIT_NOFILE)[1]
    with penstock.connect(daemon.url, transport=transport) as connection:
        process.rlimit(psutil.RLIMIT_NOFILE, (files(daemon), hard))
        try:
            seen = sorted(int(batch[0, 0]) for batch in connection.batches())
        except penstock.MemoryBound as error:
            said = str(error)
        else:
            said = "" if seen == WHOLE else "something is missing"
    assert not said or "raise the limit on open files" in said, "with the slots that it had before, it must go on"
    assert daemon.process.poll() is None
    process.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))
    until(lambda: reads(daemon))


def test_more_workers_than_there_are_descriptors_for_are_refused(serve: Serve) -> None:
    daemon = serve(FEED, ready=False, nofile=128, workers=4)
    assert daemon.process.wait(60) == 1
    assert "--workers 4 needs" in daemon.stderr()
    assert "may have 128: raise the limit on open files" in daemon.stderr()
    needed = descriptors.needed(3, 4)
    assert serve(FEED, nofile=needed, workers=4).process.poll() is None
    daemon = serve(FEED, nofile=256, workers=1)
    assert control.scale(daemon.url, 50, now=False, timeout=60).after < 10
    assert "file descriptors for" in daemon.stderr()
    assert reads(daemon)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC])
@pytest.mark.parametrize("call", ["available", "os.memfd_create", "os.ftruncate", "fcntl.fcntl", "os.posix_fallocate"])
def test_a_slot_that_cannot_be_made_is_an_error_of_its_stream(
    monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    where, _, name = f"arena.{call}".rpartition(".")
    target: Any = arena
    for part in where.split(".")[1:]:
        target = getattr(target, part)

    async def body() -> None:
        slots = Arena()
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fail)
            with pytest.raises(penstock.MemoryBound, match=f"no file desc.*ulimit|{os.strerror(number)}"):
                await slots.grow(5000)
        assert (slots.nbytes, slots.count) == (0, 0)
        memfd = await slots.grow(5000)
        assert (slots.nbytes, slots.count) == (8192, 1)
        slots.retire(memfd)

    asyncio.run(body())


def test_bytes_go_out_over_the_network_even_if_they_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def body() -> None:
        slots = Arena()
        memfd = await slots.grow(5000)
        os.pwrite(memfd.fd, b"abcdef", 100)
        monkeypatch.setattr(arena.mmap, "mmap", fail)
        assert bytes(memfd.view(101, 105)) == b"bcde"
        monkeypatch.undo()
        assert bytes(memfd.view(101, 105)) == b"bcde"
        slots.retire(memfd)

    asyncio.run(body())


def test_free_slots_beyond_the_streams_shares_go_back_by_their_number_too() -> None:
    async def body() -> None:
        slots = Arena()
        for memfd in [await slots.grow(4096) for _ in range(5)]:
            slots.free(memfd)
        assert len(slots.trim(1 << 30, 3)) == 2
        assert (slots.count, slots.nbytes) == (3, 3 * 4096)
        assert len(slots.trim(0, 3)) == 3

    asyncio.run(body())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_worker_that_cannot_be_started_for_want_of_descriptors_is_not_given_up(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("penstock_server.workers.supervisor.LAST_PAUSE", 0.05)
    source = "from penstock_server import Feed\nfeed = Feed(lambda split: iter(split), splits=[[1]], batch_size=1)\n"
    (tmp_path / "feeds.py").write_text(source)
    wanting = {"left": 12}

    def memfd_create(*arguments: Any) -> int:
        if wanting["left"]:
            wanting["left"] -= 1
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    real = os.memfd_create
    monkeypatch.setattr(worker_handle.os, "memfd_create", memfd_create)

    async def body() -> None:
        heard: list[Any] = []
        supervisor = Supervisor(
            WorkerConfig(feeds=(f"{tmp_path / 'feeds.py'}:feed",)),
            1,
        )
        reports: Any = SimpleNamespace(
            heard=lambda number, data, fd: heard.append(codec.from_worker(data)),
            died=lambda number, how, doing: supervisor.send(0, codec.encode(m.Shutdown())) if wanting["left"] else None,
            given_up=lambda number, why: heard.append(why),
        )
        supervisor.start(reports)
        try:
            while not heard:
                await asyncio.sleep(0.01)
            assert isinstance(heard[0], m.Imported), "it must not get messages for the workers before it"
        finally:
            await supervisor.stop(codec.encode(m.Shutdown()))

    asyncio.run(body())
