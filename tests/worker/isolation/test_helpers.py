"""Processes that user code starts: a generator's helpers end with it, and nothing outlives its worker."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import psutil
import pytest

import penstock
from penstock_server.to_daemon import control
from tests.conftest import UNCHECKED, Serve, runs

SECONDS = 2.0
"""Nothing that a worker has started is alive this long after it. (A busy machine gets more.)"""

HEAD = """
    import concurrent.futures, multiprocessing, os, subprocess, sys, threading, time
    import numpy as np
    from penstock_server import Feed

    fork, spawn = map(multiprocessing.get_context, ("fork", "spawn"))
    SLEEP = [sys.executable, "-c", "import time\\nwhile True: time.sleep(1)"]

    def note(name, pid):
        with open(name, "a") as file:
            print(pid, file=file)

    def put(q):
        n = 0
        while True:
            q.put(n)
            n += 1
"""

ENDING = {
    "a process with a queue": """
        q = fork.Queue(2)
        process = fork.Process(target=put, args=(q,), daemon=True)
        process.start()
        note("helpers", process.pid)
        get = q.get
    """,
    "a process that is not daemonic": """
        q = fork.Queue(2)
        process = fork.Process(target=put, args=(q,))
        process.start()
        note("helpers", process.pid)
        get = q.get
    """,
    "a process in a reference cycle": """
        class Augmenter:
            def __init__(self):
                self.q = fork.Queue(2)
                self.process = fork.Process(target=put, args=(self.q,), daemon=True)
                self.process.start()
                note("helpers", self.process.pid)
                self.me = self
            def get(self):
                return self.q.get()
        get = Augmenter().get
    """,
    "a spawned process": """
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=time.sleep, args=(1000,), daemon=True)
        process.start()
        note("helpers", process.pid)
        get = iter(range(100)).__next__
    """,
    "a pool": """
        pool = fork.Pool(2)
        for process in multiprocessing.active_children():
            note("helpers", process.pid)
        get = pool.imap(int, range(100)).next
    """,
    "an executor": """
        pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=fork)
        get = pool.map(int, range(100)).__next__
        note("helpers", pool.submit(os.getpid).result())
    """,
    "a program": """
        lines = subprocess.Popen([*SLEEP[:2], "i = 0\\nwhile True: print(i, flush=True); i += 1; import time; "
            "time.sleep(0 if i < 100 else 1000)"], stdout=subprocess.PIPE)
        note("helpers", lines.pid)
        get = iter(lines.stdout).__next__
    """,
    "a program whose output is read": """
        lines = subprocess.Popen(["sh", "-c", "echo $$; trap '' TERM; seq 0 99; while true; do sleep 1; done"],
            stdout=subprocess.PIPE).stdout
        note("helpers", int(next(lines)))
        get = lines.__next__
    """,
    "a program without pipes": """
        note("helpers", subprocess.Popen(SLEEP).pid)
        get = iter(range(100)).__next__
    """,
    "a forked process": """
        read, write = os.pipe()
        child = os.fork()
        if not child:
            for n in range(100):
                os.write(write, b"%d\\n" % n)
            time.sleep(1000)
        note("helpers", child)
        os.close(write)
        get = os.fdopen(read).__next__
    """,
    "a process with a process": """
        def parent(q):
            child = fork.Process(target=put, args=(q,))
            child.start()
            os.setsid()
            q.put(child.pid)
            time.sleep(1000)
        q = fork.Queue(2)
        process = fork.Process(target=parent, args=(q,))
        process.start()
        pids = fork.Queue()
        note("helpers", process.pid)
        seen = []
        while not any(n > 100 for n in seen):
            seen.append(q.get())
        note("helpers", max(seen))
        get = iter(range(100)).__next__
    """,
}
"""What a generator does to get `get`, which returns 0, 1, 2, ... It notes its helpers."""

KEPT = {
    "a pool of the module": """
    pool = None
    def get_of(split):
        global pool
        if pool is None:
            pool = fork.Pool(1)
            note("kept", multiprocessing.active_children()[0].pid)
        return pool.imap(int, range(100)).next
    """,
    "a queue of the module": """
    q = fork.Queue(2)
    started = []
    def get_of(split):
        if not started:
            process = fork.Process(target=put, args=(q,), daemon=True)
            process.start()
            note("kept", process.pid)
            started.append(True)
        return lambda: q.get() * 0 + 1
    """,
    "the output of a program": """
    lines = None
    def get_of(split):
        global lines
        if lines is None:
            lines = subprocess.Popen(["sh", "-c", "echo $$; exec yes 1"], stdout=subprocess.PIPE).stdout
            note("kept", int(next(lines)))
        return lines.__next__
    """,
    "a program": """
    program = None
    def get_of(split):
        global program
        if program is None:
            program = subprocess.Popen(SLEEP)
            note("kept", program.pid)
        return iter(range(100)).__next__
    """,
    "a daemon": """
    if not os.path.exists("kept"):
        subprocess.run(["sh", "-c", "setsid sleep 1000 & echo $! > kept"], stdout=subprocess.DEVNULL)
    def get_of(split):
        return iter(range(100)).__next__
    """,
}
"""Modules that keep a helper for all generators. Each returns a function that returns samples."""


def pids(folder: Path, name: str) -> list[int]:
    file = folder / name
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def alive(found: Iterable[int]) -> list[int]:
    """Return those of these processes that run."""
    return [pid for pid in found if runs(pid)]


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("starts", ENDING.values(), ids=ENDING)
def test_the_helpers_of_a_generator_end_with_it(serve: Serve, starts: str) -> None:
    daemon = serve(
        HEAD
        + f"""
    def samples(split):
        {starts}
        for n in range(10):
            assert int(get()) == n
            yield np.int64(100 * split + n)

    feed = Feed(samples, splits=range(6), batch_size=1, lanes=3, turn=1)
    """.replace("\n        \n", "\n"),
        workers=1,
    )
    with penstock.connect(daemon.url) as connection:
        epoch = connection.batches()
        seen = [int(batch[0]) for batch in epoch]
        assert sorted(seen) == [100 * split + n for split in range(6) for n in range(10)]
        until(lambda: len(pids(daemon.folder, "helpers")) >= 6)
        worker = daemon.workers()[0].pid
        del epoch
    until(lambda: not alive(pids(daemon.folder, "helpers")))
    assert daemon.workers()[0].pid == worker, "the worker goes on"
    assert "Traceback" not in daemon.stderr()


@pytest.mark.parametrize("batches", [50, 1])
def test_the_helpers_of_a_generator_that_lanes_share_end_with_it(serve: Serve, batches: int) -> None:
    starts = ENDING["a process in a reference cycle"]
    daemon = serve(
        HEAD
        + f"""
    def samples():
        {starts}
        for n in range(100):
            time.sleep(0.001)
            assert int(get()) == n
            yield np.int64(n)

    feed = Feed(samples, transform=lambda sample: sample, batch_size=2, lanes=4)
    """.replace("\n        \n", "\n"),
        workers=1,
        patched=UNCHECKED,
    )
    with penstock.connect(daemon.url) as connection:
        epoch = connection.batches()
        assert [int(n) for batch in islice(epoch, batches) for n in batch] == [*range(2 * batches)]
        worker = daemon.workers()[0].pid
        del epoch
    until(lambda: not alive(pids(daemon.folder, "helpers")))
    assert len(pids(daemon.folder, "helpers")) <= 4, "for the first sample, the epoch, and the next epochs"
    assert daemon.workers()[0].pid == worker, "the worker goes on"


@pytest.mark.parametrize("module", KEPT.values(), ids=KEPT)
def test_a_helper_that_the_module_keeps_serves_all_generators_and_ends_with_the_worker(
    serve: Serve, module: str
) -> None:
    daemon = serve(
        HEAD
        + module
        + """
    def samples(split):
        get = get_of(split)
        for n in range(10):
            get()
            yield np.int64(100 * split + n)

    feed = Feed(samples, splits=range(12), batch_size=1, lanes=3, turn=1)
    """,
        workers=1,
    )
    with penstock.connect(daemon.url) as connection:
        for _ in range(2):
            seen = [int(batch[0]) for batch in connection.batches()]
            assert sorted(seen) == [100 * split + n for split in range(12) for n in range(10)]
        kept = pids(daemon.folder, "kept")
        assert len(alive(kept)) == 1
        (worker,) = control.status(daemon.url, 60).workers
        assert worker.processes == 1
    daemon.workers()[0].kill()
    until(lambda: not alive(kept))


WILD = (
    HEAD
    + """
    def start(kind):
        if kind == 0:
            return subprocess.Popen(SLEEP).pid
        if kind == 1:
            return subprocess.Popen(SLEEP, start_new_session=True).pid
        if kind == 2:
            shell = "setsid sh -c 'sleep 1000 & echo $!; wait' & sleep 1000"
            return int(subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE).stdout.readline())
        if kind == 3:
            read, write = os.pipe()
            if not os.fork():
                os.setsid()
                child = os.fork()
                if child:
                    os._exit(0)
                os.write(write, b"%d" % os.getpid())
                os.execv(sys.executable, SLEEP)
            return int(os.read(read, 20))
        process = (fork if kind == 4 else spawn).Process(target=time.sleep, args=(1000,))
        process.start()
        return process.pid

    def samples(split):
        note("helpers", start(split))
        for i in range(100_000):
            yield np.int64(split)

    feed = Feed(samples, splits=range(6), batch_size=1, lanes=6, turn=1)
    """
)
"""A feed whose splits each start a helper in another way."""


def all_started(folder: Path) -> list[int]:
    """Wait until all helpers run; return them."""
    until(lambda: len(alive(pids(folder, "helpers"))) >= 6)
    return alive(pids(folder, "helpers"))


@pytest.mark.parametrize("what", ["worker", "fork server", "daemon", "stop"])
def test_nothing_that_a_worker_started_outlives_it(serve: Serve, what: str) -> None:
    daemon = serve(WILD, workers=1, own_group=True)
    process = daemon.process.pid
    with penstock.connect(daemon.url, reconnect=0) as connection:
        batches = connection.batches()
        next(batches)
        found = all_started(daemon.folder)
        began = time.monotonic()
        if what == "worker":
            daemon.workers()[0].kill()
        elif what == "fork server":
            psutil.Process(process).children()[0].kill()
        elif what == "daemon":
            assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        elif what == "stop":
            del batches
            connection.close()
            assert daemon.stop() == 0
        until(lambda: not alive(found))
        assert time.monotonic() - began < 10 * SECONDS


def test_nothing_that_a_worker_started_outlives_a_killed_trainer(tmp_path: Path) -> None:
    (tmp_path / "feeds.py").write_text(textwrap.dedent(WILD))
    code = "import penstock, time\nfor b in penstock.connect('feeds.py:feed', workers=2).batches(): time.sleep(1)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL) as trainer:
        try:
            found = all_started(tmp_path)
        finally:
            trainer.kill()
    until(lambda: not alive(found))
