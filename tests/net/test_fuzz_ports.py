"""Send arbitrary bytes into every port of live daemons at once, while trainers read. Every epoch is whole, and
afterwards the daemons hold no more than before.

`make fuzz ARGS='--fuzz-seconds 600'` runs this test for ten minutes, and prints its figures.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock
from penstock_proto.status import status_parsing
from penstock_proto.status.status_shape import Status
from penstock_server.cli import keygen
from tests.conftest import Daemon, Serve
from tests.http.test_http import address, get
from tests.processes.open_files import OpenFiles

FEEDS = """
    import numpy as np
    from penstock_server import Feed

    def rows(split, rng):
        for i in range(100):
            yield rng.integers(0, 256, 1 << 14, "uint8"), np.int64(100 * split + i)

    trainers = Feed(rows, splits=range(8), batch_size=4, shuffle=40, turn=2, seed=5)
    attacked = Feed(rows, splits=range(8), batch_size=4, turn=2, seed=6)
"""

TRAINER = """
import hashlib, json, sys, threading, time
import penstock

over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
url, transport = sys.argv[1:]
with penstock.connect(url, transport=transport, reconnect=0) as connection:
    while not over.is_set():
        digest = hashlib.sha256()
        for x, number in connection.batches():
            digest.update(x.tobytes() + number.tobytes())
            time.sleep(0.005)
        print(digest.hexdigest(), flush=True)
"""

MIB = 1 << 20


class Trainer:
    """A process that reads epoch after epoch of the feed, and writes the SHA-256 of each."""

    def __init__(self, daemon: Daemon, transport: str, keys: Path | None) -> None:
        self.name = f"{transport}{' with keys' if keys else ''}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, daemon.urls["trainers"], transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **({"PENSTOCK_KEYS": str(keys)} if keys else {})},
        )
        assert self._process.stdout is not None
        self.first = self._process.stdout.readline().strip()

    def epochs(self) -> list[str]:
        """End the trainer, and return the SHA-256 of each of its epochs."""
        said, _ = self._process.communicate("")
        assert self._process.returncode == 0, f"the trainer over {self.name} failed"
        return [self.first, *said.split()]

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Watched:
    """A daemon, and the resources that it holds."""

    def __init__(self, daemon: Daemon, keys: Path | None) -> None:
        self.daemon, self.keys = daemon, keys
        self.process = psutil.Process(daemon.process.pid)

    def state(self) -> Status:
        return status_parsing.parse(get(self.daemon, "/api/status")[2])

    def holds(self) -> dict[str, float]:
        """Return how much the daemon has of everything that attacks could make grow."""
        now = self.state()
        return {
            "streams": len(now.streams) + now.more_streams,
            "greeted": now.greeted,
            "positions": now.memory.positions,
            "reserved MiB": now.memory.reserved / MIB,
            "slots MiB": now.memory.arena / MIB,
            "memory MiB": self.process.memory_full_info().uss / MIB,
            "fds but slots": self.fds(),
            "threads": self.process.num_threads(),
        }

    def fds(self) -> int:
        """Return the number of the daemon's open descriptors, without those of slots."""
        return OpenFiles.of(self.process.pid).others

    def cpu(self) -> float:
        """Return the CPU seconds that the daemon has used."""
        return float(sum(self.process.cpu_times()[:2]))

    def idle_cpu(self, seconds: float) -> float:
        """Return the CPU seconds that the daemon uses per second while nobody reads."""
        before = self.cpu()
        time.sleep(seconds)
        return (self.cpu() - before) / seconds

    def sent(self) -> int:
        """Return the number of batches that the daemon has sent to its trainers."""
        (feed,) = (one for one in self.state().feeds if one.name == "trainers")
        return feed.sent.batches


def batch_ms(both: Sequence[Watched], seconds: float) -> list[float]:
    """Return the milliseconds of CPU that each daemon uses for a batch of its trainers."""
    before = [(watched.cpu(), watched.sent()) for watched in both]
    time.sleep(seconds)
    return [
        1000 * (watched.cpu() - cpu) / max(1, watched.sent() - sent)
        for watched, (cpu, sent) in zip(both, before, strict=True)
    ]


MARGIN = {"memory MiB": 64, "slots MiB": 8, "fds but slots": 4, "threads": 4}
"""How much more a daemon may hold than before: trainers have batches under way, and malloc keeps the buffers of the
most connections that there were at once. (After malloc_trim(0) the memory is the same as before.)"""


@contextmanager
def fuzzer(watched: Watched, seed: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """Attack a daemon. Yield a function that ends the attacks, and returns how many there were."""
    host, port = watched.daemon.urls["attacked"].removeprefix("tcp://").rpartition("/")[0].split(":")
    place = {
        "tcp": [host, int(port)],
        "unix": watched.state().unix,
        "http": address(watched.daemon),
        "keys": watched.keys and str(watched.keys.with_name("eve")),
        "feeds": ["attacked"],
        "seed": seed,
        "pause": 0.002,
    }
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("fuzzer.py"), json.dumps(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> dict[str, Any]:
        said, _ = process.communicate("")
        assert process.returncode == 0, "the fuzzer failed"
        found: dict[str, Any] = json.loads(said)
        return found

    try:
        yield end
    finally:
        process.kill()
        process.communicate()


def settled(watched: Watched, before: dict[str, float]) -> dict[str, float]:
    """Wait until the daemon holds no more than before, within `MARGIN`, and return what it holds. A group waits a
    minute for its members."""
    deadline = time.monotonic() + 180
    while True:
        after = watched.holds()
        more = {name: (was, after[name]) for name, was in before.items() if after[name] > was + MARGIN.get(name, 0)}
        if not more:
            return after
        assert time.monotonic() < deadline, f"not given back (before, after): {more}"
        time.sleep(1)


@pytest.mark.fuzz
def test_fuzz_every_port_while_trainers_read(
    serve: Serve, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds, seed = request.config.getoption("--fuzz-seconds"), request.config.getoption("--fuzz-seed")
    keygen.generate(tmp_path / "keys", ["trainer", "eve"])
    key = tmp_path / "keys" / "clients" / "trainer"

    def pair() -> tuple[Watched, Watched]:
        plain = serve(FEEDS, "trainers", "attacked", http=0, memory="400M")
        return Watched(plain, None), Watched(
            serve(FEEDS, "trainers", "attacked", http=0, memory="400M", keys=tmp_path / "keys"), key
        )

    def train(both: Sequence[Watched]) -> list[Trainer]:
        trainers = [Trainer(watched.daemon, how, watched.keys) for watched in both for how in ("tcp", "local")]
        for trainer in trainers:
            stack.callback(trainer.kill)
        return trainers

    both = pair()
    with ExitStack() as stack:
        idle = [watched.idle_cpu(3) for watched in both]
        trainers = train(both)
        before = [watched.holds() for watched in both]

        ends = [stack.enter_context(fuzzer(watched, seed)) for watched in both]
        samples: list[list[dict[str, float]]] = [[], []]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(5.0, max(0.0, until - time.monotonic())))
            for watched, taken in zip(both, samples, strict=True):
                assert watched.daemon.process.poll() is None, watched.daemon.stderr()
                info = watched.process.memory_full_info()
                taken.append({"MiB": info.uss / MIB, "fds": watched.fds(), "CPU s": watched.cpu()})
        fresh = pair()  # compare with daemons that nobody has attacked: the machine's speed varies
        others = train(fresh)
        attacks = [end() for end in ends]
        at_once = batch_ms([*both, *fresh], 15)

        after = [settled(watched, one) for watched, one in zip(both, before, strict=True)]
        later = batch_ms([*both, *fresh], 15)
        for trainer in others:
            trainer.epochs()
        epochs = [trainer.epochs() for trainer in trainers]
        idle_again = [watched.idle_cpu(3) for watched in both]

    quiet_epochs = digests(both[0].daemon, max(map(len, epochs)))
    with capsys.disabled():
        print(f"\n{seconds:g} s, seed {seed}")
        for trainer, read in zip(trainers, epochs, strict=True):
            print(f"  trainer over {trainer.name}: {len(read)} epochs")
        for number, watched in enumerate(both):
            print(f"  daemon {'with keys' if watched.keys else 'without keys'}")
            print(f"    attacks: {attacks[number]['made']}")
            for name, was in before[number].items():
                print(f"    {name}: {was:.4g} before, {after[number][name]:.4g} after")
            for when, found in (("right after", at_once), ("later", later)):
                figures = f"{found[number]:.3f} ms, and {found[2 + number]:.3f} ms of one that was not attacked"
                print(f"    daemon's CPU for a batch {when}: {figures}")
            print(f"    and while nobody reads: {idle[number]:.3f} of a core before, {idle_again[number]:.3f} after")
            for name in ("MiB", "fds"):
                taken = [sample[name] for sample in samples[number]]
                print(f"    {name} meanwhile: {' '.join(f'{one:.0f}' for one in taken[:: max(1, len(taken) // 12)])}")
            used = samples[number][-1]["CPU s"] - samples[number][0]["CPU s"]
            print(f"    CPU meanwhile: {used / (5 * max(1, len(samples[number]) - 1)):.2f} of a core")
            print(f"    log: {len(watched.daemon.stderr().splitlines())} lines")

    for read in epochs:
        assert len(read) > 1
        assert read == quiet_epochs[: len(read)]
    for number, watched in enumerate(both):
        assert all(attacks[number]["made"].values()), attacks
        assert at_once[number] < 1.5 * at_once[2 + number] + 0.2, "the attacks are over, and their connections gone"
        assert later[number] < 1.5 * later[2 + number] + 0.1
        assert idle_again[number] < idle[number] + 0.05
        memory = [sample["MiB"] for sample in samples[number]]
        quarter = max(1, len(memory) // 4)
        assert statistics.median(memory[-quarter:]) < statistics.median(memory[quarter : 2 * quarter] or memory) + 24
        state = watched.state()
        assert state.internal_errors == 0
        assert state.malformed > 0
        assert [worker.restarts for worker in state.workers] == [0, 0]
        assert len(watched.daemon.stderr()) < 2 * MIB, "each kind of line is limited"


def digests(daemon: Daemon, epochs: int) -> list[str]:
    """Return the SHA-256 of the first epochs, read without a daemon."""
    found = []
    with penstock.connect(f"{daemon.folder}/feeds.py:trainers", workers=0) as connection:
        for _ in range(epochs):
            digest = hashlib.sha256()
            for x, number in connection.batches():
                digest.update(x.tobytes() + number.tobytes())
            found.append(digest.hexdigest())
    return found
