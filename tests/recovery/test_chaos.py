"""Workers, the daemon and two trainers are killed at random. The trainers consume the same bytes as in a quiet run.

With each step, a trainer saves the connection's state and a stand-in for its model in one atomic write. The stand-in is
the count of batches, and a chain of SHA-256 over them. A killed trainer is started again from that file. If a batch is
lost, comes twice or changes, the chain differs.

The environment variables `CHAOS_SECONDS` and `CHAOS_SEED` set the duration and the faults.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Daemon, Serve, kill
from tests.processes.free_ports import free_address

FEEDS = """
    import os
    import random
    import time

    import numpy as np
    from penstock_server import Feed, OnError, Shuffle

    SIZES = [40, 0, 61, 1, 46, 64, 35, 52, 23, 70, 12, 59, 80, 33, 7, 41]
    SLOW = float(os.environ.get("SLOW", 0))

    def drawn(split, rng):
        for i in range(SIZES[split]):
            if SLOW:
                time.sleep(SLOW)
            yield rng.normal(size=(16, 4)).astype("float32"), np.int64(1000 * split + i)

    def drawn_globally(split):
        for i in range(SIZES[split]):
            if SLOW:
                time.sleep(SLOW)
            yield np.random.normal(size=(16, 4)), np.int64(random.randrange(10**9) + 1000 * split + i)

    def splits():
        return list(range(len(SIZES)))

    # On a slow machine the kills may hit one split more than three times, which is not the split's fault.
    often = dict(on_error=OnError("raise", crashes=1000))
    shuffle = Shuffle(64, interleave=4)
    mixed = Feed(drawn, splits=splits, batch_size=8, shuffle=shuffle, lanes=4, turn=3, seed=11, **often)
    plain = Feed(drawn_globally, splits=list(range(len(SIZES))), batch_size=7, lanes=6, turn=2, seed=12, **often)
"""

TRAINER = '''
"""url transport file step [tf]: read from the position in the file, without end. Each step takes this many seconds."""
import hashlib, json, os, sys, time
import penstock

url, transport, file, step = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
chain, batches, saved, epochs = bytes(32), 0, None, {}
if os.path.exists(file):
    with open(file) as f:
        found = json.load(f)
    chain, batches, saved, epochs = bytes.fromhex(found["chain"]), found["batches"], found["state"], found["epochs"]
connection = penstock.connect(url, transport=transport, state=saved, timeout=100)
while True:
    for batch in connection.dataset() if sys.argv[5:] else connection.batches():
        leaves = [leaf.numpy() if sys.argv[5:] else leaf for leaf in batch]
        time.sleep(step)
        chain = hashlib.sha256(chain + b"".join(leaf.tobytes() for leaf in leaves)).digest()
        batches += 1
        state = connection.state_dict(consumed=batches)
        assert state["consumed"] == batches
        with open(file + ".new", "w") as f:
            json.dump({"chain": chain.hex(), "batches": batches, "state": state, "epochs": epochs}, f)
        os.replace(file + ".new", file)
    epochs[str(batches)] = chain.hex()
'''

QUIET = """
import hashlib, json, sys
import penstock

chain, batches, epochs = bytes(32), 0, {}
with penstock.connect(sys.argv[1]) as connection:
    while batches < int(sys.argv[2]):
        for batch in connection.batches():
            chain = hashlib.sha256(chain + b"".join(leaf.tobytes() for leaf in batch)).digest()
            batches += 1
            if batches == int(sys.argv[2]):
                break
        else:
            epochs[str(batches)] = chain.hex()
print(json.dumps({"chain": chain.hex(), "epochs": epochs}))
"""


class Trainer:
    """A trainer that is killed and restarted many times. Its file outlives it."""

    def __init__(self, feed: str, transport: str, folder: Path, *options: str) -> None:
        self.feed, self.transport = feed, transport
        self.file = folder / f"{feed}.json"
        self._options = options
        self._log = folder / f"{feed}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    def start(self, url: str) -> None:
        self._url = url
        with self._log.open("ab") as log:
            command = [sys.executable, "-c", TRAINER, url, self.transport, str(self.file), "0.004", *self._options]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def saved(self) -> dict[str, Any]:
        found: dict[str, Any] = {"batches": 0}
        if self.file.exists():
            found = json.loads(self.file.read_text())
        return found

    def check(self) -> None:
        """Check that it is still reading: no trainer sees an error, whatever is killed."""
        assert self._process is not None
        if self._process.poll() is not None:
            pytest.fail(f"the trainer of {self.feed} ended:\n{self._log.read_text()[-4000:]}")

    def wait_past(self, batches: int) -> None:
        deadline = time.monotonic() + 60
        while self.saved()["batches"] <= batches:
            self.check()
            if time.monotonic() > deadline:
                pytest.fail(f"the trainer of {self.feed} makes no progress:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.02)


def chaos(serve: Serve, folder: Path, seconds: float, least: int, trainers: list[Trainer], seed: int) -> Counter[str]:
    """Kill for `seconds` seconds and at least `least` times, then let every trainer continue. Return the number of
    faults of each kind."""
    chance = random.Random(seed)
    address = free_address()

    def started(workers: int) -> Daemon:
        return serve(FEEDS, "mixed", "plain", bind=address, workers=workers, env={"SLOW": "0.0005"})

    daemon = started(3)
    done: Counter[str] = Counter()
    for trainer in trainers:
        trainer.start(daemon.urls[trainer.feed])
    for trainer in trainers:
        trainer.wait_past(0)
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline or done.total() < least:
            time.sleep(chance.expovariate(1 / 0.7))
            (what,) = chance.choices(
                ["a worker", "all workers", "the daemon", "a trainer", "a scaling"], [9, 2, 2, 4, 3]
            )
            workers = daemon.workers()
            if what == "a worker" and workers:
                kill([chance.choice(workers)])
            elif what == "all workers":
                kill(workers)
            elif what == "the daemon":
                daemon.process.kill()
                daemon.stop()
                time.sleep(chance.choice([0, 0, 0.5]))
                daemon = started(chance.choice([1, 2, 3]))
            elif what == "a trainer":
                trainer = chance.choice(trainers)
                trainer.kill()
                trainer.start(daemon.urls[trainer.feed])
            elif what == "a scaling":
                daemon.process.send_signal(chance.choice([signal.SIGTTIN, signal.SIGTTOU]))
            done[what] += 1
            for trainer in trainers:
                trainer.check()
        for trainer in trainers:
            trainer.wait_past(trainer.saved()["batches"] + 20)
    finally:
        for trainer in trainers:
            trainer.kill()
        print("\n" + daemon.stderr()[-3000:])
    assert daemon.stop() == 0
    return done


@pytest.mark.parametrize(
    ("seconds", "least"),
    [pytest.param(6, 8, id="short"), pytest.param(120, 80, id="long", marks=pytest.mark.soak)],
)
def test_what_trainers_consume_is_what_a_quiet_run_gives_whatever_is_killed(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: float, least: int
) -> None:
    seconds = float(os.environ.get("CHAOS_SECONDS", seconds))
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))
    with capsys.disabled():
        print(f"\nchaos for {seconds:g} s: CHAOS_SEED={seed}", flush=True)
    long = seconds > 60
    trainers = [Trainer("mixed", "auto", tmp_path, *(["tf"] if long else [])), Trainer("plain", "tcp", tmp_path)]
    done = chaos(serve, tmp_path, seconds, least, trainers, seed)

    quiet = serve(FEEDS, "mixed", "plain", workers=2)
    violations, consumed = [], Counter[str]()
    for trainer in trainers:
        saved = trainer.saved()
        consumed[trainer.feed] = saved["batches"]
        command = [sys.executable, "-c", QUIET, quiet.urls[trainer.feed], str(saved["batches"])]
        reference = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        if reference["chain"] != saved["chain"]:
            wrong = [n for n, chain in saved["epochs"].items() if reference["epochs"].get(n) != chain]
            at = f"before batch {wrong[0]}" if wrong else "in its last epoch"
            violations.append(f"{trainer.feed} differs {at} of {saved['batches']}")
    with capsys.disabled():
        kills = ", ".join(f"{what} {count} times" for what, count in sorted(done.items()))
        print(f"killed or done: {kills}")
        print(f"batches consumed: {dict(consumed)}; violations: {len(violations)} {'; '.join(violations)}", flush=True)
    assert not violations
    assert all(count > 20 for count in consumed.values())
