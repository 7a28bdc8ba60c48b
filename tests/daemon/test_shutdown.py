"""A trainer or the daemon may end in any way: nothing hangs, nothing is left behind, and the daemon serves the next
trainer.

See test_recovery.py for processes that die and come back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock
from penstock._stream import receiver
from penstock_server.cli.status_lines import status_lines
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve, StartTrainer
from tests.processes.forked import Forked

FEED = """
    import os
    import time
    import numpy as np
    from penstock_server import Feed

    def numbers(split, delay=0.0):
        for i in range(1000):
            if delay:
                time.sleep(delay)
            yield np.full((64, 64), i, "float32"), np.int64(1000 * split + i)

    def stuck(split):
        yield np.zeros((64, 64), "float32"), np.int64(0)
        if split == 0:
            yield np.zeros((64, 64), "float32"), np.int64(1)
        time.sleep(3600)

    def dying(split):
        for i in range(40):
            if split == 1 and i == 20:
                os.kill(os.getpid(), 9)
            yield np.zeros((64, 64), "float32"), np.int64(100 * split + i)

    feed = Feed(numbers, splits=range(4), batch_size=8, turn=1)
    stalled = Feed(stuck, splits=range(2), batch_size=1, turn=1, lanes=2)
    def clinging(split):
        try:
            yield from numbers(split)
        finally:
            time.sleep(3)

    cling = Feed(clinging, splits=range(1), batch_size=8, turn=1)
    killed = Feed(dying, splits=range(4), batch_size=4, turn=1, lanes=4)
"""

TRANSPORTS = pytest.mark.parametrize("transport", ["local", "tcp"])


def comes(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Wait up to `seconds` for the condition, and return whether it became true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def streams(daemon: Daemon) -> int:
    return daemon.stderr().count("reads it") - daemon.stderr().count("is gone")


def sockets() -> set[str]:
    """Return the sockets that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("socket:")}


def script(url: str, body: str, transport: str = "auto") -> str:
    """Return the script of a trainer that reads the feed at `url`."""
    begins = f"import os, sys, time\nimport penstock\ndataset = penstock.dataset({url!r}, transport={transport!r})\n"
    return begins + textwrap.dedent(body)


def wait_for(trainer: Forked, line: str) -> None:
    for said in trainer.stdout:
        if said.strip() == line:
            return
    raise AssertionError(f"the trainer ended:\n{trainer.communicate(60)[1]}")


LOOP = """
for i, batch in enumerate(dataset):
    if i == 3:
        print("training", flush=True)
    time.sleep(0.01)
"""
ENDLESS = LOOP.replace("dataset", "dataset.repeat()")


@pytest.mark.timeout(240)
def test_ctrl_c_ends_a_trainer_at_once_even_while_it_waits_for_data(serve: Serve, start_trainer: StartTrainer) -> None:
    # The interrupt comes in a step or in a wait. Between the two, TensorFlow takes some interrupts for an answer of
    # `TensorShape.__len__`, and then writes past the end of a buffer, with any dataset (docs/decisions/ctrl-c-*.md).
    daemons = [serve(FEED, "feed"), serve(FEED, "stalled"), serve(FEED, "stalled")]  # "stalled" takes all workers
    step = ENDLESS.replace("time.sleep(0.01)", "time.sleep(1000 if i == 3 else 0.01)")
    waiting = LOOP.replace("i == 3", "i == 0")
    trainers = [
        start_trainer(script(daemons[0].url, step, "local")),
        start_trainer(script(daemons[0].url, step, "tcp")),
        start_trainer(script(daemons[1].url, waiting, "local")),
        start_trainer(script(daemons[2].url, waiting, "tcp")),
    ]
    for trainer in trainers:
        wait_for(trainer, "training")
    time.sleep(0.5)
    for trainer in trainers:
        trainer.send_signal(signal.SIGINT)
        _, stderr = trainer.communicate(60)
        assert trainer.returncode != 0
        assert "KeyboardInterrupt" in stderr
    assert comes(lambda: not any(streams(daemon) for daemon in daemons))


@pytest.mark.timeout(240)
def test_after_killed_trainers_the_daemon_serves_the_next_and_no_living_child_holds_their_slots(
    serve: Serve, start_trainer: StartTrainer
) -> None:
    daemon = serve(FEED, "feed")
    body = """
child = os.fork()
if child == 0:
    time.sleep(1000)
    os._exit(0)
for i, batch in enumerate(dataset):
    if i == 3:
        print("training", flush=True)
        print(child, flush=True)
        time.sleep(1000)
"""
    trainers = [
        start_trainer(script(daemon.url, ENDLESS, "local")),
        start_trainer(script(daemon.url, ENDLESS, "tcp")),
        start_trainer(script(daemon.url, body, "local")),
    ]
    for trainer in trainers:
        wait_for(trainer, "training")
    child = psutil.Process(int(trainers[2].stdout.readline()))
    try:
        for trainer in (trainers[0], trainers[2]):
            trainer.kill()
        assert comes(lambda: streams(daemon) == 1)
        assert child.is_running()
    finally:
        child.kill()
    trainers[1].kill()
    assert comes(lambda: streams(daemon) == 0)
    for transport in ("local", "tcp"):
        with penstock.connect(daemon.url, transport=transport) as connection:
            assert sum(len(n) for _, n in connection.batches()) == 4000


ENDINGS = [
    "pass",
    "iterator = iter(dataset); next(iterator)",
    "sys.exit(0)",
    "raise SystemExit",
    "other = penstock.dataset",
]


@pytest.mark.timeout(240)
def test_an_interpreter_ends_with_an_open_dataset_and_with_the_exception_of_a_training_step(
    serve: Serve, start_trainer: StartTrainer
) -> None:
    daemon = serve(FEED, "feed")
    body = """
for batch in dataset.take(3):
    pass
iterator = iter(dataset.prefetch(4))
next(iterator)
print("ending", flush=True)
"""
    raising = """
for i, batch in enumerate(dataset.prefetch(2)):
    if i == 5:
        print("ending", flush=True)
        1 / 0
"""
    trainers = {ending: start_trainer(script(daemon.url, body + ending)) for ending in ENDINGS}
    raises = start_trainer(script(daemon.url, raising))
    for trainer in (*trainers.values(), raises):
        wait_for(trainer, "ending")
    for ending, trainer in trainers.items():
        _, stderr = trainer.communicate(60)
        assert trainer.returncode == 0, (ending, stderr)
        assert "Traceback" not in stderr, ending
    _, stderr = raises.communicate(60)
    assert raises.returncode == 1
    assert "ZeroDivisionError" in stderr
    assert comes(lambda: streams(daemon) == 0)


@TRANSPORTS
@pytest.mark.parametrize("name", ["feed", "stalled"])
def test_break_and_del_return_at_once(
    serve: Serve, tf: Any, monkeypatch: pytest.MonkeyPatch, name: str, transport: str
) -> None:
    monkeypatch.setattr(receiver, "_CLOSE", 1000.0)  # closing must not return because of its own timeout
    daemon = serve(FEED, name)
    with penstock.connect(daemon.url, transport=transport) as connection:
        for dataset in (connection.dataset(), connection.dataset().prefetch(4), connection.dataset().shuffle(1)):
            for _ in dataset:
                break
            if name == "stalled":
                break  # its workers sleep for an hour: another epoch would have no first batch
        iterator = iter(connection.dataset())
        if name == "feed":
            next(iterator)
        del iterator, dataset


@TRANSPORTS
def test_sigterm_lets_the_epoch_end_and_the_next_one_is_an_error_never_an_end(
    serve: Serve, tf: Any, transport: str
) -> None:
    daemon = serve(FEED, "feed")
    with penstock.connect(daemon.url, transport=transport, reconnect=0) as connection:
        rows = 0
        for i, (_, n) in enumerate(connection.dataset()):
            rows += len(n)
            if i == 2:
                daemon.process.send_signal(signal.SIGTERM)
        assert rows == 4000
        with pytest.raises(tf.errors.OpError, match="the daemon was stopped"):
            for _ in connection.dataset():
                pass
        assert isinstance(connection.error, penstock.DaemonStopped)
        assert daemon.process.wait(50) == 0


def test_sigterm_to_the_process_group_lets_the_epoch_end_and_then_everything_is_gone(serve: Serve) -> None:
    daemon = serve(FEED.replace("delay=0.0", "delay=0.002"), "feed", own_group=True)
    processes = psutil.Process(daemon.process.pid).children(recursive=True)
    assert len(processes) == 3  # the fork server and two workers
    with penstock.connect(daemon.url, reconnect=0) as connection:
        rows = 0
        for i, (_, n) in enumerate(connection.batches()):
            rows += len(n)
            if i == 2:
                os.killpg(daemon.process.pid, signal.SIGTERM)
        assert rows == 4000
        assert daemon.process.wait(10) == 0
    assert "killed by" not in daemon.stderr()
    assert not psutil.wait_procs(processes, timeout=5)[1]


@TRANSPORTS
def test_a_second_sigterm_is_an_error_at_the_trainer_at_once(serve: Serve, tf: Any, transport: str) -> None:
    daemon = serve(FEED, "feed")
    with penstock.connect(daemon.url, transport=transport, reconnect=0) as connection:
        with pytest.raises(tf.errors.OpError, match="the daemon was stopped"):
            for i, _ in enumerate(connection.dataset()):
                if i == 2:
                    daemon.process.send_signal(signal.SIGTERM)
                    assert comes(lambda: "a second signal stops now" in daemon.stderr())
                    assert daemon.stop() == 0
        assert isinstance(connection.error, penstock.DaemonStopped)


@TRANSPORTS
@pytest.mark.parametrize("state", [False, True])
def test_a_daemon_that_is_ending_refuses_new_trainers(
    serve: Serve, tmp_path: Path, transport: str, state: bool
) -> None:
    options = {"state": tmp_path / "state.sqlite"} if state else {}
    daemon = serve(FEED, "cling", **options)
    with penstock.connect(daemon.url, transport=transport, reconnect=0) as connection:
        with pytest.raises(penstock.DaemonStopped):
            for i, _ in enumerate(connection.batches()):
                if i == 2:
                    daemon.process.send_signal(signal.SIGTERM)
                    assert comes(lambda: "a second signal stops now" in daemon.stderr())
                    daemon.process.send_signal(signal.SIGTERM)
        with pytest.raises(penstock.DaemonStopped):  # its workers hold it up
            penstock.connect(daemon.url, transport=transport)
    assert daemon.stop() == 0


@TRANSPORTS
@pytest.mark.parametrize("reconnect", [0, 1])
def test_a_killed_daemon_is_an_error_at_the_trainer_when_it_does_not_come_back(
    serve: Serve, tf: Any, transport: str, reconnect: int
) -> None:
    daemon = serve(FEED, "feed")
    with penstock.connect(daemon.url, transport=transport, reconnect=reconnect) as connection:
        start = time.monotonic()
        with pytest.raises(tf.errors.OpError, match=r"connection|daemon"):
            for i, _ in enumerate(connection.dataset()):
                if i == 2:
                    daemon.process.kill()
                    daemon.process.wait()
                    start = time.monotonic()
        assert reconnect / 2 <= time.monotonic() - start < 25  # less than the 30 s that silence may last
        assert isinstance(connection.error, penstock.ConnectionLost)
    daemon.stop()


@TRANSPORTS
def test_a_split_that_ends_every_worker_is_an_error_at_the_trainer_and_the_daemon_goes_on(
    serve: Serve, transport: str
) -> None:
    daemon = serve(FEED, "killed", "feed")
    with penstock.connect(daemon.urls["killed"], transport=transport) as connection:
        with pytest.raises(penstock.WorkerDied, match=r"3 times.* was killed by SIGKILL") as caught:
            list(connection.batches())
        assert caught.value.split == "1"
    with penstock.connect(daemon.urls["feed"], transport=transport) as connection:
        assert sum(len(n) for _, n in connection.batches()) == 4000
    assert comes(lambda: len(daemon.workers()) == 2)


@TRANSPORTS
def test_a_worker_killed_from_outside_changes_nothing(serve: Serve, transport: str) -> None:
    daemon = serve(FEED, "feed")
    with penstock.connect(daemon.url, transport=transport) as connection:
        quiet = [n.tolist() for _, n in connection.batches()]
        batches = connection.batches()
        seen = [next(batches)[1].tolist()]
        daemon.workers()[0].kill()
        seen += [n.tolist() for _, n in batches]
    assert seen == quiet
    assert comes(lambda: len(daemon.workers()) == 2)
    assert daemon.stderr().count("was killed by SIGKILL") == 1


@TRANSPORTS
def test_a_worker_that_is_stopped_while_it_is_idle_holds_nobody_up(serve: Serve, transport: str) -> None:
    daemon = serve(FEED, "feed", hang_timeout=1)

    def state() -> list[str]:
        return [line for line in status_lines(control.status(daemon.url, 60)) if line.startswith("worker")]

    with penstock.connect(daemon.url, transport=transport) as connection:
        quiet = [n.tolist() for _, n in connection.batches()]
        batches = connection.batches()
        seen = [next(batches)[1].tolist()]
        assert comes(lambda: all(line.endswith("idle") for line in state())), "the stream holds all that it may"
        daemon.workers()[0].suspend()
        assert comes(lambda: sum("stopped by a signal" in line for line in state()) == 1)
        time.sleep(1.5)
        assert "was killed" not in daemon.stderr(), "it has no work"
        seen += [n.tolist() for _, n in batches]
    assert seen == quiet
    assert "made no progress with its work for 1 s, stopped by a signal, and was killed" in daemon.stderr()


def test_a_forked_trainer_keeps_its_stream_and_the_child_has_none_of_it(serve: Serve) -> None:
    daemon = serve(FEED, "feed")
    before = sockets()
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        seen = [int(next(batches)[1][0])]
        inherited = sockets() - before
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, str(len(sockets() & inherited)).encode())
                try:
                    next(batches)
                    os.write(write, b" data")
                except penstock.PenstockError:
                    os.write(write, b" closed")
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        seen += [int(n[0]) for _, n in batches]
    assert said == "0 closed"
    assert len(seen) == 500
    assert comes(lambda: streams(daemon) == 0)


def test_a_second_iterator_takes_over_and_the_first_one_says_so(serve: Serve) -> None:
    daemon = serve(FEED, "feed")
    with penstock.connect(daemon.url) as connection:
        first = connection.batches()
        next(first)
        second = connection.batches()
        next(second)
        with pytest.raises(penstock.StreamClosed, match="newer"):
            next(first)
        assert sum(1 for _ in second) == 499


def test_after_close_iterating_raises(serve: Serve) -> None:
    daemon = serve(FEED, "feed")
    connection = penstock.connect(daemon.url)
    batches = connection.batches()
    kept = next(batches)
    connection.close()
    with pytest.raises(penstock.StreamClosed):
        next(batches)
    assert (kept[0][0] == 0).all(), "what was handed over stays"
    connection.close()
    assert streams(daemon) == 1, "its slots are still in use"
    del kept, batches, connection
    assert comes(lambda: streams(daemon) == 0)


@pytest.mark.soak
def test_a_trainer_over_tcp_that_was_stopped_too_long_goes_on_where_it_was(
    serve: Serve, start_trainer: StartTrainer
) -> None:
    daemon = serve(FEED, "feed")
    body = (
        LOOP
        + "    assert int(batch[1][0]) == 1000 * (i % 4) + i // 4 * 8, (i, batch[1])\nprint('whole', i, flush=True)\n"
    )
    trainer = start_trainer(script(daemon.url, body, "tcp"))
    wait_for(trainer, "training")
    trainer.send_signal(signal.SIGSTOP)
    assert comes(lambda: streams(daemon) == 0)
    trainer.send_signal(signal.SIGCONT)
    wait_for(trainer, "whole 499")
    _, stderr = trainer.communicate(60)
    assert trainer.returncode == 0, stderr
    assert "connected again" in stderr
