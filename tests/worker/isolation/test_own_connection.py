"""User code may fork, and may close files of the worker. No other feed notices, and the error names the feed at
fault."""

from __future__ import annotations

import os
import time

import psutil
import pytest

import penstock
from penstock_server.to_daemon import control
from tests.conftest import Serve, runs

HEAD = """
    import concurrent.futures, ctypes, multiprocessing, os, socket, sys, time
    import numpy as np
    from penstock_server import Feed

    def calm(split):
        for i in range(400):
            yield np.full(512, i % 251, "uint8"), np.int64(1000 * split + i)

    other = Feed(calm, splits=range(8), batch_size=4, turn=2, lanes=4)
"""


def numbers(connection: penstock.Connection) -> list[int]:
    """Check the bytes of the calm feed's epoch, and return its numbers."""
    seen = []
    for x, n in connection.batches():
        for row, number in zip(x, n, strict=True):
            assert (row == number % 1000 % 251).all()
            seen.append(int(number))
    return seen


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize(
    "how",
    [
        "os.closerange(3, 1000)",
        "null = os.open(os.devnull, os.O_RDWR); [os.dup2(null, fd) for fd in range(3, 64) if fd != null]",
        "os.closerange(3, 1000); kept.extend(socket.socketpair() for _ in range(20))",
    ],
    ids=["closes", "puts others over them", "opens others in their place"],
)
def test_a_split_that_closes_all_files_is_an_error_that_names_it(serve: Serve, how: str, transport: str) -> None:
    daemon = serve(
        HEAD
        + f"""
    kept = []
    def closing(split):
        for i in range(40):
            if split == 2 and i == 17:
                {how}
            yield np.int64(100 * split + i)
    feed = Feed(closing, splits=range(4), batch_size=4, lanes=2, turn=1)
    """,
        "feed",
        "other",
    )
    with penstock.connect(daemon.urls["other"], transport=transport) as other:
        expected = numbers(other)
        with penstock.connect(daemon.urls["feed"], transport=transport) as connection:
            with pytest.raises(penstock.WorkerDied, match=r"3 times.*closed or replaced its connection") as caught:
                list(connection.batches())
        assert caught.value.split == "2"
        assert caught.value.feed == "feed"
        assert sorted(numbers(other)) == sorted(expected)
    assert daemon.stderr().count(" while it read 2;") == 3


def test_a_list_of_splits_or_an_item_that_closes_all_files_is_named_too(serve: Serve) -> None:
    daemon = serve(
        HEAD
        + """
    def files():
        if os.path.exists("close"):
            os.closerange(3, 1000)
        return range(2)
    class Items:
        def __len__(self):
            return 100
        def __getitem__(self, i):
            if i == 50:
                os.closerange(3, 1000)
            return np.int64(i)
    listed = Feed(lambda split: iter([np.int64(split)]), splits=files, batch_size=1, name="listed")
    indexed = Feed(Items(), batch_size=10, turn=1, name="indexed")
    """,
        "listed",
        "indexed",
    )
    (daemon.folder / "close").touch()
    with penstock.connect(daemon.urls["listed"]) as connection:
        with pytest.raises(penstock.WorkerDied, match=r"lists the splits.*3 times.*closed or replaced its connection"):
            list(connection.batches())
    with penstock.connect(daemon.urls["indexed"]) as connection:
        with pytest.raises(penstock.WorkerDied, match=r"3 times.*closed or replaced its connection") as caught:
            list(connection.batches())
    assert caught.value.split == "batch 5"


def test_a_feed_that_closes_all_files_at_its_start_says_so(serve: Serve) -> None:
    source = """
    import os
    import numpy as np
    from penstock_server import Feed
    {at_import}
    def one(split):
        {at_first}
        yield np.int64(1)
    feed = Feed(one, splits=[7], batch_size=1)
    """
    for at_import, at_first, where in (
        ("os.closerange(3, 1000)", "", "importing feeds.py:feed"),
        ("", "os.closerange(3, 1000)", "7"),
    ):
        daemon = serve(source.format(at_import=at_import, at_first=at_first), ready=False)
        assert daemon.process.wait(60) == 1
        assert "closed or replaced its connection to the daemon" in daemon.stderr()
        assert where in daemon.stderr().splitlines()[-1]


def test_what_user_code_prints_never_gets_into_a_batch(serve: Serve) -> None:
    daemon = serve(
        HEAD
        + """
    closed = []
    def silent(split):
        if not closed:
            closed.append(os.closerange(0, 3))
        for i in range(100):
            yield np.full(4096, 7, "uint8")
            for fd in (1, 2):
                try:
                    os.write(fd, b"printed" * 100)
                except OSError:
                    pass
    feed = Feed(silent, splits=range(4), batch_size=4, lanes=2)
    """
    )
    for transport in ("local", "tcp"):
        with penstock.connect(daemon.url, transport=transport) as connection:
            assert all((batch == 7).all() for batch in connection.batches())
    assert "closed or replaced" not in daemon.stderr()


@pytest.mark.parametrize("shuffle", [0, 64])
@pytest.mark.parametrize("ending", ["", "return", "sys.exit()", "raise ValueError", "os._exit(0)"])
def test_a_child_that_comes_back_from_user_code_speaks_for_nobody(serve: Serve, ending: str, shuffle: int) -> None:
    daemon = serve(
        HEAD
        + f"""
    def forking(split):
        for i in range(40):
            if i == 5 and not os.fork():
                time.sleep(0.05)
                {ending or "pass"}
            yield np.full(64, 100 * split + i)
    feed = Feed(forking, splits=range(4), batch_size=4, lanes=2, turn=2, shuffle={shuffle})
    """,
        "feed",
        "other",
        workers=1,
    )
    with (
        penstock.connect(daemon.urls["other"]) as other,
        penstock.connect(daemon.urls["feed"]) as connection,
    ):
        calm = iter(other.batches())
        seen: list[int] = []
        for batch in connection.batches():
            assert (batch == batch[:, :1]).all()
            seen += batch[:, 0].tolist()
            x, n = next(calm)
            assert (x == (n % 1000 % 251)[:, None]).all()
        assert sorted(seen) == [100 * split + i for split in range(4) for i in range(40)]
        rest = sum(len(n) for _, n in calm)
    assert rest == 3200 - len(seen)
    (worker,) = control.status(daemon.urls["other"], 60).workers
    assert worker.restarts == 0
    deadline = time.monotonic() + 60
    while any(runs(child.pid) for child in psutil.Process(worker.pid).children()):
        assert time.monotonic() < deadline, "a child still runs"
        time.sleep(0.02)


def test_a_child_holds_nothing_of_the_daemons_and_ends_with_its_worker(serve: Serve) -> None:
    daemon = serve(
        HEAD
        + """
    def forking(split):
        for i in range(40):
            if i == 5 and split == 0 and not os.path.exists("child"):
                child = os.fork()
                if not child:
                    time.sleep(3600)
                with open("child.new", "w") as file:
                    file.write(f"{child} {os.getpid()}")
                os.rename("child.new", "child")
            yield np.full(1 << 16, 100 * split + i)
    feed = Feed(forking, splits=range(4), batch_size=4, lanes=2, turn=2)
    """
    )
    with penstock.connect(daemon.url) as connection:
        before = [batch[:, 0].tolist() for batch in connection.batches()]
        child, worker = map(int, (daemon.folder / "child").read_text().split())
        names = [os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")]
        assert not [name for name in names if name.startswith(("socket:", "/memfd:penstock"))]
        psutil.Process(worker).kill()
        assert [batch[:, 0].tolist() for batch in connection.batches()] == before
        assert not psutil.pid_exists(child)
    assert "was killed by SIGKILL" in daemon.stderr()


def test_pools_of_processes_inside_a_generator_work(serve: Serve) -> None:
    daemon = serve(
        HEAD
        + """
    def square(i):
        return i * i
    def pooled(split):
        fork = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=fork) as pool:
            yield from (np.int64(n) for n in pool.map(square, range(20)))
        with fork.Pool(2) as pool:
            yield from (np.int64(n) for n in pool.map(square, range(20)))
        process = fork.Process(target=square, args=(3,))
        process.start()
        process.join()
        yield np.int64(process.exitcode)
    feed = Feed(pooled, splits=range(2), batch_size=1, lanes=2, turn=4)
    """,
        "feed",
        "other",
    )
    with penstock.connect(daemon.urls["other"]) as other, penstock.connect(daemon.urls["feed"]) as connection:
        expected = sorted(2 * [*(2 * [i * i for i in range(20)]), 0])
        assert sorted(int(n[0]) for n in connection.batches()) == expected
        assert len(numbers(other)) == 3200
    assert "started again" not in daemon.stderr()


def test_processes_of_user_code_end_by_sigterm_and_its_own_handlers_stay(serve: Serve) -> None:
    daemon = serve(
        HEAD
        + """
    import signal, subprocess
    def terminated(split):
        fork = multiprocessing.get_context("fork")
        for _ in range(20):
            process = fork.Process(target=time.sleep, args=(60,))
            process.start()
            process.terminate()  # in the first microseconds of its life
            process.join()
            yield np.int64(process.exitcode)
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        yield np.int64(program.wait())
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: os.write(write, b"x"))
        read, write = os.pipe()
        os.kill(os.getpid(), signal.SIGTERM)
        if not os.fork():
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.wait()
        yield np.int64(len(os.read(read, 100)))
    feed = Feed(terminated, splits=range(2), batch_size=1, lanes=2, turn=4)
    """
    )
    with penstock.connect(daemon.url) as connection:
        assert sorted(int(n[0]) for n in connection.batches()) == sorted(2 * [*(21 * [-15]), 2])
    assert "killed by" not in daemon.stderr()
