"""Workers and daemons die, hang, come and go while a stream is read. The stream keeps the bytes of a quiet run.

Processes and signals are real. All tests share one module of feeds. A test asks for a fault with a file in the folder
FLAGS, which the generator may remove when it comes to it. Without such files the same daemon serves the quiet run, and
both runs are compared batch by batch, by SHA-256.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto.status.status_shape import Status
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve, kill
from tests.processes.forked import Launcher
from tests.processes.free_ports import free_address

SIZES = [40, 0, 61, 1, 46, 64, 35, 52, 23, 70, 12, 59]

FEEDS = f"""
    import ctypes
    import os
    import random
    import resource
    import signal
    import sys
    import time

    import numpy as np
    from penstock_server import DictSpec, Feed, Leaf, OnError, Shuffle

    FLAGS = os.environ["FLAGS"]
    SLOW = float(os.environ.get("SLOW", 0.0005))  # seconds a sample takes
    SEED = int(os.environ.get("SEED", 3))
    BATCH = int(os.environ.get("BATCH", 4))
    OFTEN = OnError("raise", crashes=int(os.environ.get("CRASHES", 3)))
    SIZES = {SIZES}
    SPLITS = list(range(int(os.environ.get("SPLITS", len(SIZES)))))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def flag(name):
        return os.path.join(FLAGS, name)

    def taken(name):
        "Whether the test has asked for this once more."
        try:
            os.unlink(flag(name))
        except FileNotFoundError:
            return False
        return True

    def memory_error():
        raise MemoryError("no memory left")

    def transient():
        raise OSError("the network file system hiccups")

    def hang():
        time.sleep(3600)  # the line where it hangs

    def poison():
        with open(flag("deaths"), "a") as file:
            file.write(".")
        os.kill(os.getpid(), signal.SIGKILL)

    FAULTS = {{
        "exit": lambda: os._exit(3),
        "segv": lambda: ctypes.string_at(0),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "sysexit": lambda: sys.exit(7),
        "memory": memory_error,
        "raise": transient,
        "hang": hang,
    }}

    def meet(place):
        "The fault that waits at this place, if any: a file KIND@PLACE.NUMBER."
        for name in sorted(os.listdir(FLAGS)):
            kind, _, where = name.partition("@")
            if kind in FAULTS and where.split(".")[0] == str(place) and taken(name):
                FAULTS[kind]()
        if os.path.exists(flag(f"poison@{{place}}")):
            poison()

    def length(split):
        "The samples of a split; a file end@SPLIT holds another number."
        try:
            with open(flag(f"end@{{split}}")) as file:
                return int(file.read())
        except FileNotFoundError:
            return SIZES[split]

    def plain(split):
        for i in range(length(split)):
            time.sleep(SLOW)
            if i == SIZES[split] // 2:
                meet(split)
            yield {{"x": np.full((3, 5), 1000 * split + i, "float32"), "id": np.int64(1000 * split + i)}}

    def drawn(split, rng):
        for sample in plain(split):
            yield {{**sample, "noise": rng.normal(size=4)}}

    def drawn_globally(split):
        for sample in plain(split):
            yield {{**sample, "noise": np.random.normal(size=4), "pick": random.randrange(10**9)}}

    class Table:
        def __len__(self):
            return 403
        def __getitem__(self, i):
            time.sleep(SLOW)
            if i % 50 == 25:
                meet(i // 50)
            return {{"id": np.int64(i), "noise": np.random.normal(size=3)}}

    def ready_made(split, rng):
        for i in range(SIZES[split] // 2):
            time.sleep(2 * SLOW)
            if i == SIZES[split] // 4:
                meet(split)
            rows = rng.integers(1, 50)
            yield {{"x": np.full((rows, rng.integers(1, 60)), 1000 * split + i, "float32"), "id": np.arange(rows)}}

    def listed():
        if os.path.exists(flag("poison@list")):
            poison()
        if os.path.exists(flag("hold@list")):
            with open(flag("listing"), "w") as file:
                file.write(str(os.getpid()))
            while os.path.exists(flag("hold@list")):
                time.sleep(0.01)
        return SPLITS

    UNEVEN = [5, 6, 20, 7]

    def uneven(split, rng):
        for i in range(UNEVEN[split]):
            if i == 4:
                meet(split)
            if split == 2 and os.path.exists(flag(f"hold@{{i}}")):
                open(flag("held"), "w").close()
                while os.path.exists(flag(f"hold@{{i}}")):
                    time.sleep(0.01)
            yield {{"id": np.int64(100 * split + i), "noise": rng.normal()}}

    ordered = Feed(drawn, splits=SPLITS, batch_size=BATCH, lanes=5, turn=2, seed=SEED, on_error=OFTEN)
    ordered_global = Feed(drawn_globally, splits=SPLITS, batch_size=4, lanes=4, turn=2, on_error=OFTEN)
    shuffled = Feed(drawn, splits=SPLITS, batch_size=4, shuffle=Shuffle(96, interleave=4), lanes=3, turn=2, seed=5,
                    on_error=OFTEN)
    shuffled_global = Feed(drawn_globally, splits=SPLITS, batch_size=5, shuffle=60, lanes=4, turn=1, seed=9,
                           on_error=OFTEN)
    table = Feed(Table(), batch_size=4, shuffle=1, seed=4, turn=2, on_error=OFTEN)
    ready = Feed(ready_made, splits=SPLITS, batch_size=None, shuffle=8, lanes=4, seed=6, on_error=OFTEN,
                 spec=DictSpec(("id", "x"), (Leaf("int64", (None,)), Leaf("float32", (None, None)))))
    fast = Feed(drawn, splits=SPLITS, batch_size=4, lanes=6, order="fast", turn=1, on_error=OFTEN)
    listing = Feed(drawn, splits=listed, batch_size=4, shuffle=32, lanes=3, turn=2)
    leftovers = Feed(uneven, splits=range(4), batch_size=4, lanes=4, turn=1, epochs=1)
    leftovers_retry = Feed(uneven, splits=range(4), batch_size=4, lanes=4, turn=1, epochs=1, on_error="retry")
    once = Feed(drawn, splits=SPLITS, batch_size=4, lanes=5, turn=3, epochs=1)
    skip = Feed(drawn, splits=SPLITS, batch_size=4, lanes=5, turn=3, epochs=1, on_error="skip")
    skip_shuffled = Feed(drawn, splits=SPLITS, batch_size=4, shuffle=96, lanes=3, turn=3, epochs=1, on_error="skip")
    retry = Feed(drawn, splits=SPLITS, batch_size=4, shuffle=96, lanes=3, turn=3, epochs=1, on_error="retry")
"""

A, B = ("ordered", "shuffled", "ready"), ("ordered_global", "shuffled_global", "table", "fast")
GROUPS = pytest.mark.parametrize(("names", "transport"), [(A, "local"), (B, "tcp")], ids=["A-local", "B-tcp"])
CROSSED = pytest.mark.parametrize(("names", "transport"), [(A, "tcp"), (B, "local")], ids=["A-tcp", "B-local"])
TRANSPORTS = pytest.mark.parametrize("transport", ["local", "tcp"])

Epochs = list[list[str]]
"""The SHA-256 of each batch, by epoch."""


class Flags:
    """The folder in which a test asks for faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def ask(self, *names: str, text: str = "") -> None:
        for name in names:
            (self.folder / name).write_text(text)

    def left(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def take(self, name: str) -> str:
        """Return the text of a file, and remove the file."""
        text = (self.folder / name).read_text()
        (self.folder / name).unlink()
        return text


@pytest.fixture
def serve(serve: Serve) -> Serve:
    """Serve with pauses that do not grow: before a worker's restart, and before another attempt."""
    return functools.partial(
        serve, patched={"workers.supervisor.LAST_PAUSE": 0.1, "coordinator.model.failures.LAST_PAUSE": 0.2}
    )


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flags:
    monkeypatch.setenv("FLAGS", str(tmp_path / "flags"))  # daemons inherit it
    return Flags(tmp_path / "flags")


def leaves(batch: Any) -> list[np.ndarray]:
    return [batch[key] for key in sorted(batch)]


def digest(batch: Any) -> str:
    return hashlib.sha256(
        b"".join(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes() for leaf in leaves(batch))
    ).hexdigest()


def row_digests(batch: Any) -> list[str]:
    rows = zip(*leaves(batch), strict=True)
    return [hashlib.sha256(b"".join(leaf.tobytes() for leaf in row)).hexdigest() for row in rows]


def epochs_of(
    connection: penstock.Connection,
    epochs: int = 2,
    before: Callable[[int], None] = lambda _: None,
    by_row: bool = False,
) -> Epochs:
    """Return the batches of `epochs` epochs. Call `before` ahead of each batch, with the number of earlier batches.

    With `by_row`, return the SHA-256 of each sample instead, in no order.
    """
    found: Epochs = []
    count = 0
    for _ in range(epochs):
        epoch: list[str] = []
        batches = connection.batches()
        while True:
            before(count)
            batch = next(batches, None)
            if batch is None:
                break
            count += 1
            epoch += row_digests(batch) if by_row else [digest(batch)]
        found.append(sorted(epoch) if by_row else epoch)
    return found


def read(
    daemon: Daemon, name: str, transport: str = "local", epochs: int = 2, before: Callable[[int], None] = lambda _: None
) -> Epochs:
    """Return everything that a new connection is handed. In fast order, return the samples, because their batches may
    differ."""
    with penstock.connect(daemon.urls[name], transport=transport, reconnect=30) as connection:
        return epochs_of(connection, epochs, before, by_row=name == "fast")


def until(condition: Callable[[], bool]) -> None:
    """Wait without a limit. Pytest's timeout ends a test in which the event never comes."""
    while not condition():
        time.sleep(0.02)


def status(daemon: Daemon) -> Status:
    return control.status(next(iter(daemon.urls.values())), 60)


def deaths(daemon: Daemon) -> int:
    return daemon.stderr().count("other workers take over its work")


def skipped(daemon: Daemon, name: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of skipped splits and their list, as `penstock status --json` prints them."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock_server", "status", daemon.urls[name], "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (feed,) = [feed for feed in json.loads(done.stdout)["feeds"] if feed["name"] == name]
    return feed["skipped_count"], feed["skipped"]


# --- workers die ---


@GROUPS
def test_workers_that_crash_in_the_users_code_change_nothing(
    serve: Serve, flags: Flags, names: tuple[str, ...], transport: str
) -> None:
    daemon = serve(FEEDS, *names, workers=3)
    for n, name in enumerate(names, 1):
        quiet = read(daemon, name, transport)
        assert len(quiet[0]) > 90
        flags.ask("exit@4.0", "segv@2.0", "kill@5.0")
        assert read(daemon, name, transport) == quiet, name
        assert flags.left() == []
        assert deaths(daemon) == 3 * n
    for how in ("exited with status 3", "was killed by SIGSEGV", "was killed by SIGKILL"):
        assert how in daemon.stderr()


@CROSSED
def test_workers_killed_from_outside_one_by_one_and_all_at_once_change_nothing(
    serve: Serve, flags: Flags, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], transport: str
) -> None:
    monkeypatch.setenv("CRASHES", "100")  # a kill from outside counts against the split that it hits
    daemon = serve(FEEDS, *names, workers=3)

    def before(count: int) -> None:
        if count in (4, 50):
            kill(daemon.workers()[:1])
        elif count == 100:
            kill(daemon.workers())

    for n, name in enumerate(names, 1):
        quiet = read(daemon, name, transport)
        assert read(daemon, name, transport, before=before) == quiet, name
        assert deaths(daemon) > 3 * n


def test_progress_is_made_while_workers_are_killed_again_and_again(
    serve: Serve, flags: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASHES", "100")
    daemon = serve(FEEDS, "shuffled", workers=3)
    quiet = read(daemon, "shuffled")
    killed = 0
    last = time.monotonic()

    def before(count: int) -> None:
        nonlocal killed, last
        time.sleep(0.01)
        if time.monotonic() - last > 0.2:
            last = time.monotonic()
            ready = [worker for worker in status(daemon).workers if worker.ready]
            if ready:
                os.kill(ready[count % len(ready)].pid, signal.SIGKILL)
                killed += 1

    assert read(daemon, "shuffled", before=before) == quiet
    assert killed > 4


def test_a_worker_that_dies_while_it_lists_splits_changes_nothing_unless_it_does_three_times(
    serve: Serve, flags: Flags
) -> None:
    daemon = serve(FEEDS, "listing", workers=2)
    quiet = read(daemon, "listing")
    flags.ask("hold@list")
    with penstock.connect(daemon.url) as connection:
        until(lambda: flags.has("listing") and (flags.folder / "listing").read_text() != "")
        os.kill(int(flags.take("listing")), signal.SIGKILL)
        until(lambda: flags.has("listing"))  # another one lists
        flags.take("hold@list")
        assert epochs_of(connection) == quiet
    assert deaths(daemon) == 1
    flags.ask("poison@list")
    with penstock.connect(daemon.url) as connection:
        with pytest.raises(penstock.WorkerDied, match="lists the splits ended its worker process 3 times"):
            next(connection.batches())
    assert flags.take("deaths") == "..."
    flags.take("poison@list")
    assert read(daemon, "listing") == quiet


def test_workers_that_die_with_what_was_left_over_of_lanes_that_have_ended_change_nothing(
    serve: Serve, flags: Flags
) -> None:
    daemon = serve(FEEDS, "leftovers", workers=2)
    quiet = read(daemon, "leftovers", epochs=1)
    assert len(quiet[0]) == 10
    # Lanes 0, 1 and 3 end after one batch. Lane 2 waits in its second batch, before the three leftovers can be merged;
    # or in its third, when they are being merged, and lane 3 keeps what the merged batch has no room for.
    for sample, whole in ((4, 4), (8, 5)):
        for victims in (slice(0, 1), slice(1, 2), slice(0, 2)):
            until(lambda: len(daemon.workers()) == 2 and all(worker.ready for worker in status(daemon).workers))
            flags.ask(f"hold@{sample}")
            with penstock.connect(daemon.url) as connection:
                batches = connection.batches()
                seen = [digest(next(batches)) for _ in range(whole)]
                until(lambda: flags.has("held"))
                kill(daemon.workers()[victims])
                flags.take("held")
                flags.take(f"hold@{sample}")
                assert [[*seen, *map(digest, batches)]] == quiet, (sample, victims)
    assert deaths(daemon) == 8


def test_leftovers_that_cannot_be_read_again_are_tried_again(serve: Serve, flags: Flags) -> None:
    daemon = serve(FEEDS, "leftovers_retry", workers=2)
    quiet = read(daemon, "leftovers_retry", epochs=1)
    flags.ask("hold@4")  # in lane 2, when lanes 0, 1 and 3 have ended, and before their leftovers can be merged
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        seen = [digest(next(batches)) for _ in range(4)]
        until(lambda: flags.has("held"))
        flags.ask(*(f"raise@{split}.{count}" for split in (0, 1, 3) for count in range(2)))
        kill(daemon.workers())
        flags.take("held")
        flags.take("hold@4")
        assert [[*seen, *map(digest, batches)]] == quiet
    assert flags.left() == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [("sysexit", r"drawn called sys.exit\(7\)"), ("memory", "drawn raised MemoryError: no memory left")],
)
def test_what_user_code_raises_is_an_error_at_the_trainer_and_costs_no_worker(
    serve: Serve, flags: Flags, fault: str, says: str
) -> None:
    daemon = serve(FEEDS, "once", workers=2)
    (quiet,) = read(daemon, "once", epochs=1)
    workers = {worker.pid for worker in daemon.workers()}
    flags.ask(f"{fault}@5")
    with penstock.connect(daemon.url) as connection:
        seen = []
        with pytest.raises(penstock.GeneratorError, match=says) as caught:
            for batch in connection.batches():
                seen.append(digest(batch))
        assert caught.value.split == "5"
    assert 0 < len(seen) < len(quiet)
    assert seen == quiet[: len(seen)]
    assert {worker.pid for worker in daemon.workers()} == workers


# --- splits that end their worker again and again ---


def test_a_split_that_ends_its_worker_three_times_is_an_error_that_names_it(serve: Serve, flags: Flags) -> None:
    daemon = serve(FEEDS, "once", workers=2)
    (quiet,) = read(daemon, "once", epochs=1)
    flags.ask("poison@5")
    with penstock.connect(daemon.url) as connection:
        seen = []
        with pytest.raises(penstock.WorkerDied, match=r"3 times in epoch 0, the last time it was killed") as caught:
            for batch in connection.batches():
                seen.append(digest(batch))
        assert caught.value.split == "5"
        assert caught.value.feed == "once"
    assert flags.take("deaths") == "..."
    assert 0 < len(seen) < len(quiet)
    assert seen == quiet[: len(seen)]
    flags.take("poison@5")
    assert read(daemon, "once", epochs=1) == [quiet]


def test_a_stream_at_which_workers_die_outside_of_user_code_fails_by_itself(serve: Serve, flags: Flags) -> None:
    source = """
        import os
        import numpy as np
        from penstock_server import Feed
        from penstock_server.worker.tasks import batch_maker

        def numbers(split):
            for i in range(200):
                yield np.int64(i)

        honest = Feed(numbers, splits=range(4), batch_size=4, turn=1, lanes=4)
        deadly = Feed(numbers, splits=range(4), batch_size=4, turn=1, lanes=4)
        report = batch_maker.BatchMaker._report

        def dies(self, run, fill, *values, **named):
            if run.feed.plan.name == "deadly":
                os._exit(9)  # what a fault of our own might do
            report(self, run, fill, *values, **named)

        batch_maker.BatchMaker._report = dies
    """
    daemon = serve(source, "honest", "deadly", workers=2)
    with (
        penstock.connect(daemon.urls["honest"]) as connection,
        penstock.connect(daemon.urls["deadly"]) as deadly,
    ):
        batches = connection.batches()
        next(batches)
        with pytest.raises(penstock.WorkerDied, match=r"died 3 times in a row at one place of epoch 0, outside of the"):
            next(deadly.batches())
        assert 1 + sum(1 for _ in batches) == 200
    assert "while it read" not in daemon.stderr()


@pytest.mark.parametrize("name", ["skip", "skip_shuffled"])
def test_such_a_split_can_be_left_out_and_the_stream_is_as_if_it_ended_at_the_last_full_batch(
    serve: Serve, flags: Flags, name: str
) -> None:
    streams, after = [], set()
    flags.ask("poison@5")
    for workers, times in ((1, 1), (4, 2)):
        daemon = serve(FEEDS, name, workers=workers)
        for _ in range(times):
            streams.append(read(daemon, name, epochs=1))
            assert flags.take("deaths") == "..."
        count, splits = skipped(daemon, name)
        assert (count, len(splits), deaths(daemon)) == (times, times, 3 * times)
        for one in splits:
            assert (one["epoch"], one["split"]) == (0, "5")
            assert "it ended its worker again and again" in one["why"]
            after.add(one["samples"])
    assert streams[0] == streams[1] == streams[2]
    (samples,) = after
    assert samples <= SIZES[5] // 2
    flags.take("poison@5")
    assert read(daemon, name, epochs=1) != streams[0]
    flags.ask("end@5", text=str(samples))
    assert read(daemon, name, epochs=1) == streams[0]


def test_an_exception_ends_a_split_that_may_be_left_out_and_the_samples_before_it_stay(
    serve: Serve, flags: Flags
) -> None:
    daemon = serve(FEEDS, "skip", "skip_shuffled", workers=2)
    for name in ("skip", "skip_shuffled"):
        flags.ask("raise@5", "sysexit@9")
        broken = read(daemon, name, epochs=1)
        assert flags.left() == []
        count, splits = skipped(daemon, name)
        assert count == 2
        assert {(one["split"], one["samples"]) for one in splits} == {("5", SIZES[5] // 2), ("9", SIZES[9] // 2)}
        flags.ask("end@5", text=str(SIZES[5] // 2))
        flags.ask("end@9", text=str(SIZES[9] // 2))
        assert read(daemon, name, epochs=1) == broken
        flags.take("end@5")
        flags.take("end@9")
    assert deaths(daemon) == 0


def test_a_failure_that_passes_is_tried_again_and_changes_nothing(serve: Serve, flags: Flags) -> None:
    daemon = serve(FEEDS, "retry", workers=2)
    quiet = read(daemon, "retry", epochs=1)
    flags.ask("raise@5.0", "raise@5.1", "kill@2.0", "kill@2.1", "kill@2.2", "kill@2.3")
    assert read(daemon, "retry", epochs=1) == quiet
    assert flags.left() == []


def test_a_worker_that_hangs_is_replaced_and_the_log_names_the_line(serve: Serve, flags: Flags) -> None:
    daemon = serve(FEEDS, "ordered", "shuffled_global", workers=2, hang_timeout=1)
    line = 1 + next(n for n, text in enumerate(FEEDS.splitlines()) if "the line where it hangs" in text)
    for name in ("ordered", "shuffled_global"):
        quiet = read(daemon, name)
        flags.ask("hang@5")
        assert read(daemon, name) == quiet
        assert flags.left() == []
    said = rf"made no sample for 1 s and was killed; it was at \S*feeds\.py:{line} in hang while it read 5"
    assert len(re.findall(said, daemon.stderr())) == 2, daemon.stderr()
    assert deaths(daemon) == 2


# --- workers come and go ---


@TRANSPORTS
def test_scaling_in_the_middle_of_an_epoch_changes_nothing(serve: Serve, flags: Flags, transport: str) -> None:
    names = ("ordered_global", "shuffled", "table", "ready")
    daemon = serve(FEEDS, *names, workers=2)

    def scale(workers: int) -> None:
        control.scale(daemon.urls[names[0]], workers, now=False, timeout=60)

    def wait_for_workers(count: int) -> None:  # over TCP the client can be far ahead of what the daemon does
        while sum(not worker.leaving for worker in status(daemon).workers) != count:
            time.sleep(0.01)

    def before(count: int) -> None:
        if count == 5:
            scale(4)
        elif count == 30:
            scale(1)
        elif count == 50:
            daemon.process.send_signal(signal.SIGTTIN)
            wait_for_workers(2)
        elif count == 70:
            daemon.process.send_signal(signal.SIGTTOU)
            wait_for_workers(1)
        elif count == 90 and name != names[0]:
            scale(3)
        elif count == 90:
            done = [sys.executable, "-m", "penstock_server", "scale", daemon.urls[names[0]], "3"]
            assert subprocess.run(done, capture_output=True, text=True).stdout == "workers: 1 -> 3\n"
        elif count == 130:
            scale(2)

    for name in names:
        quiet = read(daemon, name, transport)
        assert read(daemon, name, transport, before=before) == quiet, name
        until(lambda: len(daemon.workers()) == 2)
    assert deaths(daemon) == 0


# --- consumers ---

TRAINER = """
import sys, time
import penstock

connection = penstock.connect(sys.argv[1], transport=sys.argv[2])
held = []
for batch in connection.batches():
    held.append(batch)
    if len(held) == 5:
        print("reading", flush=True)
    if len(held) >= 5:
        time.sleep(0.1)
"""


@contextlib.contextmanager
def trainer(url: str, transport: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that reads slowly, and holds what it is handed."""
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, url, transport], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
            yield process
        finally:
            process.kill()


@TRANSPORTS
def test_a_consumer_that_stands_still_does_not_stop_another(serve: Serve, flags: Flags, transport: str) -> None:
    daemon = serve(FEEDS, "ordered", "shuffled", workers=2)
    quiet = read(daemon, "ordered"), read(daemon, "shuffled")
    with trainer(daemon.urls["ordered"], transport) as process:
        process.send_signal(signal.SIGSTOP)
        assert (read(daemon, "ordered", "tcp"), read(daemon, "shuffled", "local")) == quiet
        assert len(status(daemon).streams) == 1


@TRANSPORTS
def test_the_slots_of_a_killed_consumer_come_back(serve: Serve, flags: Flags, transport: str) -> None:
    daemon = serve(FEEDS, "ordered", workers=2)
    with trainer(daemon.url, transport):
        assert status(daemon).memory.arena > 0
    until(lambda: not status(daemon).streams)
    until(lambda: (memory := status(daemon).memory).arena == memory.reserved == 0)


# --- resume ---

STATES = """
import json, sys
import penstock

url, transport, lag = sys.argv[1], sys.argv[2], int(sys.argv[3])
states, seen = [], []
with penstock.connect(url, transport=transport) as connection:
    for _ in range(2):
        for batch in connection.batches():
            seen.append(digest(batch))
            if len(seen) > lag:
                states.append(connection.state_dict(consumed=len(seen) - lag))
print(json.dumps([states, seen]))
"""


def states(launcher: Launcher, url: str, transport: str, lag: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the states after 1, 2, ... batches of two epochs, each taken when `lag` more were handed over; and the
    batches. Another process reads them."""
    functions = "".join(map(inspect.getsource, (leaves, digest)))
    code = f"from __future__ import annotations\nimport hashlib\n{functions}{STATES}"
    consumer = launcher.start(code, url, transport, str(lag))
    try:
        out, errors = consumer.communicate(100)
        assert consumer.returncode == 0, errors
    finally:
        consumer.close()
    found = json.loads(out)
    return found[0], found[1]


@GROUPS
def test_a_stream_goes_on_from_a_state_in_another_process_with_another_daemon_and_other_workers(
    serve: Serve, flags: Flags, consumer_launcher: Launcher, names: tuple[str, ...], transport: str
) -> None:
    names = tuple(name for name in names if name != "fast")
    first = serve(FEEDS, *names, workers=3)  # slow: the generators must not be far ahead of the state
    taken = {name: states(consumer_launcher, first.urls[name], transport, lag) for lag, name in enumerate(names)}
    assert first.stop() == 0
    second = serve(FEEDS, *names, workers=1, env={"SLOW": "0"})
    other = {"local": "tcp", "tcp": "local"}[transport]
    for name, (found, seen) in taken.items():
        epoch = next(n for n, state in enumerate(found, 1) if state["position"]["epoch"] == 1)
        assert len(seen) > epoch > 90
        for consumed in (1, 7, 38, epoch - 1, epoch, epoch + 1):
            state = found[consumed - 1]
            assert state["consumed"] == consumed
            assert len(json.dumps(state)) < 8192
            with penstock.connect(second.urls[name], transport=other) as connection:
                connection.load_state_dict(json.loads(json.dumps(state)))
                rest: list[str] = []
                while len(rest) < len(seen) - consumed:
                    rest += map(digest, connection.batches())
                assert rest == seen[consumed:], (name, consumed)
                assert connection.state_dict()["consumed"] == len(seen)


def test_a_state_survives_workers_that_die_before_and_after_it(serve: Serve, flags: Flags) -> None:
    daemon = serve(FEEDS, "shuffled", workers=2)
    (quiet,) = read(daemon, "shuffled", epochs=1)
    seen: list[str] = []
    state = None
    for kinds in (["kill@5"], ["segv@2"], ["exit@9"]):
        flags.ask(*kinds)
        with penstock.connect(daemon.url, state=state) as connection:
            seen += map(digest, itertools.islice(connection.batches(), 31))
            state = json.loads(json.dumps(connection.state_dict()))
            kill(daemon.workers()[:1])
    assert len(seen) == 93
    with penstock.connect(daemon.url, state=state) as connection:
        seen += map(digest, connection.batches())
    assert seen == quiet


def test_a_split_that_was_left_out_stays_so_behind_a_state(serve: Serve, flags: Flags) -> None:
    first = serve(FEEDS, "skip", "skip_shuffled", workers=2)
    second = serve(FEEDS, "skip", "skip_shuffled", workers=1)
    for name in ("skip", "skip_shuffled"):
        (whole,) = read(first, name, epochs=1)
        flags.ask("raise@2")
        (broken,) = read(first, name, epochs=1)
        differs = next(n for n, pair in enumerate(zip(whole, broken, strict=False)) if len(set(pair)) > 1)
        assert not flags.has("raise@2")
        flags.ask("raise@2")
        with penstock.connect(first.urls[name]) as connection:
            batches = connection.batches()
            seen = list(map(digest, itertools.islice(batches, differs + 1)))
            while (state := connection.state_dict())["position"]["skip"]:  # to the end of the slab, where the record is
                seen.append(digest(next(batches)))
            del batches
        assert len(seen) < len(broken)
        assert not flags.has("raise@2")
        with penstock.connect(second.urls[name], state=state) as connection:
            seen += map(digest, connection.batches())
        assert seen == broken, name


def test_a_pool_that_is_made_again_leaves_out_what_it_left_out_before_and_nothing_else(
    serve: Serve, flags: Flags
) -> None:
    """The state is within a pool. Its lanes are at the pool's start, before the split that fails."""
    first = serve(FEEDS, "skip_shuffled", workers=2)
    second = serve(FEEDS, "skip_shuffled", workers=1)
    url = first.urls["skip_shuffled"]
    (whole,) = read(first, "skip_shuffled", epochs=1)
    flags.ask("raise@2")
    (broken,) = read(first, "skip_shuffled", epochs=1)
    differs = next(n for n, pair in enumerate(zip(whole, broken, strict=False)) if len(set(pair)) > 1)
    states = []
    for stream, faults in ((whole, []), (broken, ["raise@2"])):
        flags.ask(*faults)
        with penstock.connect(url) as connection:
            seen = []
            for batch in connection.batches():
                seen.append(digest(batch))
                state = connection.state_dict()
                if len(seen) > differs and state["position"]["skip"]:
                    break
        assert seen == stream[: len(seen)]
        states.append((len(seen), state))
    (_, of_whole), (passed, of_broken) = states
    with penstock.connect(second.urls["skip_shuffled"], state=of_broken) as connection:
        assert list(map(digest, connection.batches())) == broken[passed:]
    flags.ask("raise@2")
    with penstock.connect(second.urls["skip_shuffled"], state=of_whole) as connection:
        with pytest.raises(penstock.GeneratorError, match="hiccups"):
            list(connection.batches())


def test_a_state_of_another_feed_is_refused_and_both_sides_are_named(serve: Serve, flags: Flags) -> None:
    daemon = serve(FEEDS, "ordered")
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        states = [connection.state_dict() for _ in itertools.islice(batches, 5)][1:]
        del batches
    for variable, value, says in (
        ("SEED", "8", "seed was 3 and is 8 now"),
        ("BATCH", "6", "batch_size was 4 and is 6 now"),
        ("SPLITS", "9", r"list of splits of epoch 0 has changed: its SHA-256 was \w+ and is \w+"),
    ):
        other = serve(FEEDS, "ordered", env={variable: value}, workers=1)
        for state in states:
            with pytest.raises(penstock.StateMismatch, match=says):
                with penstock.connect(other.url, state=state) as connection:
                    list(connection.batches())
        assert other.stop() == 0


def test_other_splits_are_refused_within_the_first_slab_of_an_epoch_too(serve: Serve, flags: Flags) -> None:
    daemon = serve(FEEDS, "ordered")
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        next(batches)
        state = connection.state_dict()
        del batches
    other = serve(FEEDS, "ordered", env={"SPLITS": "9"}, workers=1)
    with pytest.raises(penstock.StateMismatch, match="list of splits"):
        with penstock.connect(other.url, state=state) as connection:
            list(connection.batches())


# --- the daemon ---


@GROUPS
def test_a_daemon_that_is_killed_and_started_again_changes_nothing(
    serve: Serve, flags: Flags, names: tuple[str, ...], transport: str
) -> None:
    names = tuple(name for name in names if name != "fast")
    address = free_address()
    daemon = serve(FEEDS, *names, bind=address, workers=2)
    quiet = {name: read(daemon, name, transport) for name in names}

    def restart(workers: int) -> None:
        nonlocal daemon
        daemon.process.kill()
        daemon.stop()
        daemon = serve(FEEDS, *names, bind=address, workers=workers)

    def before(count: int) -> None:
        if count == 30:
            restart(3)
            flags.ask("kill@4")
        elif count == 130 and name == names[0]:  # in the next epoch
            restart(1)

    for name in names:
        with penstock.connect(daemon.urls[name], transport=transport) as connection:
            assert epochs_of(connection, before=before) == quiet[name], name
            assert connection.stats()["reconnects"] == 1 + (name == names[0])
        assert flags.left() == []


@TRANSPORTS
def test_a_trainer_that_waits_for_its_daemon_goes_on_when_there_is_one_again(
    serve: Serve, flags: Flags, transport: str
) -> None:
    address = free_address()
    first = serve(FEEDS, "shuffled", bind=address)
    quiet = read(first, "shuffled")
    with penstock.connect(first.url, transport=transport) as connection:
        batches = connection.batches()
        held = [next(batches) for _ in range(3)]
        seen = [digest(batch) for batch in held]
        first.process.kill()
        first.stop()
        time.sleep(1.5)
        serve(FEEDS, "shuffled", bind=address)
        seen += map(digest, batches)
        assert [seen, *epochs_of(connection, epochs=1)] == quiet
        assert [digest(batch) for batch in held] == seen[:3], "what was handed over stays"
        del held
