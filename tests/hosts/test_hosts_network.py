"""Hosts that join over a network, each in its own namespace: whatever happens to them, the stream is that of one host.

Here hosts lose their power (SIGKILL of all their processes), stand still (SIGSTOP), and lose their cable. The head is
killed and started again. By default a host is lost after 15 s of silence; only the long runs wait as long.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock
from tests.conftest import PATCHED, Daemon, DaemonLauncher, Host, LayNetwork, stop_all, wait_until
from tests.processes.forked import Launcher
from tests.processes.namespaces import Network
from tests.reference.stream_reader import Reader, chain, digest

FEEDS = """
    import os
    import time

    import numpy as np
    from penstock_server import Feed

    NAP = float(os.environ["NAP"])

    def scenes(split, rng):
        for i in range(30 + 3 * split):
            time.sleep(NAP)
            yield {"x": rng.normal(size=(32, 32)).astype(np.float32), "id": np.int64(1000 * split + i)}

    class Table:
        def __len__(self):
            return 1000

        def __getitem__(self, i):
            time.sleep(NAP)
            return np.full((50, 3), i, np.int32), np.float64(i**0.5)

    def slow_scenes(split, rng):
        for sample in scenes(split, rng):
            time.sleep(NAP)
            yield sample

    def long_scenes(split):
        for i in range(4000):
            time.sleep(NAP)
            yield np.full((50, 3), i, np.int32), np.int64(split)

    def words(split, rng):
        for i in range(40 + split):
            time.sleep(NAP)
            n = int(rng.integers(0, 20))
            yield {"tokens": np.arange(n, dtype=np.int32), "text": "x" * n, "y": np.float32(i)}

    mixed = Feed(scenes, splits=range(16), batch_size=8, lanes=8, turn=2, shuffle=32, seed=3)
    table = Feed(Table(), batch_size=8, shuffle=100)
    by_index = Feed(Table(), batch_size=8, turn=1)
    by_lane = Feed(long_scenes, splits=range(8), batch_size=8, turn=1)
    words = Feed(words, splits=range(12), batch_size=8, batching="ragged")
    ranked = Feed(slow_scenes, splits=range(15), batch_size=8, lanes=8, turn=1, epochs=1)
    grouped = Feed(slow_scenes, splits=range(16), batch_size=8, lanes=8, turn=1, epochs=1, seed=5)
"""
PORT = 5555
SILENT = 3.0
"""Seconds of silence after which a host is lost, instead of 15."""


def signal_all(host: Host, number: signal.Signals) -> None:
    """Send a signal to all processes of a host."""
    process = psutil.Process(host.process.pid)
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


class Cluster:
    """A head, hosts and trainers. At the end, all that still run are stopped, and the head must end without an
    error."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        stack: contextlib.ExitStack,
        *,
        silent: float,
        launchers: list[DaemonLauncher],
        consumer_launcher: Launcher,
    ) -> None:
        self.network = network
        self.folder = folder
        (folder / "feeds.py").write_text(textwrap.dedent(FEEDS))
        self._stack = stack
        self._silent = silent
        self._launchers = itertools.cycle(launchers)
        self._consumer_launcher = consumer_launcher
        self._environment = {**os.environ, "NAP": "0.004"}
        self._logs = itertools.count()
        self._heads: list[Daemon] = []
        stack.callback(lambda: stop_all(self._heads))

    def serve(self, *feeds: str, workers: int) -> Daemon:
        """Start the head, or start it again."""
        self._feeds = [f"feeds.py:{feed}" for feed in feeds]
        head = self.network["head"]
        self.address = f"tcp://{head.address}:{PORT}"
        words = [PATCHED.format(patched={"hosts.hosts.SILENT": self._silent}), "serve", *self._feeds]
        words += ["--bind", self.address, "--insecure", "--workers", str(workers), "--memory", "256M"]
        self.head = Daemon(
            words,
            self.folder,
            self.folder / f"head{next(self._logs)}",
            self._environment,
            launcher=next(self._launchers),
            network=head.namespace,
        )
        self._heads.append(self.head)
        self.head.wait_ready(len(feeds))
        return self.head

    def join(self, name: str) -> Host:
        """Start a host with two workers."""
        program = "os.dup2(2, 1)" + PATCHED.format(patched={"join.agent.SILENT": self._silent})
        words = [program, "join", self.address, *self._feeds]
        words += ["--workers", "2", "--memory", "64M", "--host-name", name, "--grace", "60"]
        machine = self.network[name].namespace
        host = Host(words, self.folder, name, self.head, self._environment, next(self._launchers), machine)
        self._stack.callback(host.close)
        return host

    def read(self, feed: str, machine: str, **options: object) -> Reader:
        """Start a trainer."""
        url, network = f"{self.address}/{feed}", self.network[machine].namespace
        reader = Reader(self._consumer_launcher, url, network=network, **options)
        self._stack.callback(reader.close)
        return reader

    def wait_for(self, said: str, times: int = 1, timeout: float = 120) -> None:
        """Wait until the head's log contains this text `times` times."""
        wait_until(lambda: self.head.stderr().count(said) >= times, timeout, self.head.stderr)

    def status(self) -> dict[str, Any]:
        words = (PATCHED.format(patched={}), "status", self.address, "--json")
        network = self.network["head"].namespace
        launcher = next(self._launchers)
        asking = launcher.start(*words, environment=self._environment, folder=self.folder, stderr=2, network=network)
        said, _ = asking.communicate(60)
        assert asking.returncode == 0
        asking.close()
        found: dict[str, Any] = json.loads(said)
        return found

    def status_of_hosts(self) -> dict[str, dict[str, Any]]:
        return {host["name"]: host for host in self.status()["hosts"]}


@pytest.fixture
def cluster(
    tmp_path: Path, lay_network: LayNetwork, daemon_launchers: list[DaemonLauncher], consumer_launcher: Launcher
) -> Iterator[Callable[..., Cluster]]:
    """`cluster(silent=3.0)` sets up the machines `head`, `a`, `b`, `c` and `trainer` on a network."""
    network = lay_network("head", "a", "b", "c", "trainer")
    with contextlib.ExitStack() as stack:
        yield lambda silent=SILENT: Cluster(
            network, tmp_path, stack, silent=silent, launchers=daemon_launchers, consumer_launcher=consumer_launcher
        )


@pytest.fixture
def alone(tmp_path: Path, daemon_launchers: list[DaemonLauncher]) -> Iterator[Callable[..., list[str]]]:
    """`alone("table", 100)` returns the first batches of a feed, from a daemon that no host joins."""
    daemons: list[Daemon] = []

    def read(feed: str, count: int | None = None) -> list[str]:
        if not daemons:
            feeds = [
                f"feeds.py:{name}" for name in ("mixed", "table", "by_index", "by_lane", "words", "ranked", "grouped")
            ]
            words = [PATCHED.format(patched={}), "serve", *feeds, "--bind", "tcp://127.0.0.1:0", "--workers", "2"]
            environment = {**os.environ, "NAP": "0"}
            daemons.append(Daemon(words, tmp_path, tmp_path / "alone", environment, launcher=daemon_launchers[0]))
            daemons[0].wait_ready(len(feeds))
        with penstock.connect(daemons[0].urls[feed]) as connection:
            epochs = itertools.repeat(connection) if count is not None else [connection]
            batches = (batch for one in epochs for batch in one.batches())
            return [digest(batch) for batch in itertools.islice(batches, count)]

    yield read
    stop_all(daemons)


@pytest.mark.parametrize(
    ("silent", "brief", "long"),
    [
        pytest.param(SILENT, 1.0, [(0.0, 0.0)], id="short"),
        pytest.param(15.0, 5.0, [(20.0, 25.0), (0.0, 60.0)], id="long", marks=[pytest.mark.soak]),
    ],
)
def test_hosts_are_killed_stopped_and_cut_off_and_the_head_restarts_under_one_stream(
    cluster: Callable[..., Cluster],
    alone: Callable[..., list[str]],
    silent: float,
    brief: float,
    long: list[tuple[float, float]],
) -> None:
    """A cable is cut for `brief` seconds, and nobody notices. For each pair in `long`, one host stands still for at
    least the first number of seconds, and another is cut off for at least the second. Both are lost."""
    cluster = cluster(silent)
    feeds = ("mixed", "table", "words")
    cluster.serve(*feeds, workers=1)
    hosts = {name: cluster.join(name) for name in "abc"}
    cluster.wait_for(" works: ", times=3)
    readers = {feed: cluster.read(feed, at) for feed, at in zip(feeds, ("head", "trainer", "trainer"), strict=True)}

    def all_read_on() -> None:
        for reader in readers.values():
            reader.wait_for(10)

    all_read_on()
    signal_all(hosts["a"], signal.SIGKILL)
    cluster.wait_for("host a has ended, or its connection has")
    hosts["a"] = cluster.join("a")
    cluster.wait_for("host a works: ", times=2)

    cluster.network["b"].unplug()
    time.sleep(brief)
    cluster.network["b"].plug()
    all_read_on()
    assert "host b was silent" not in cluster.head.stderr()
    assert "host b has ended" not in cluster.head.stderr()

    for times, (stopped, away) in enumerate(long, start=1):
        began = time.monotonic()
        signal_all(hosts["c"], signal.SIGSTOP)
        cluster.network["b"].unplug()
        for name in "bc":
            cluster.wait_for(f"host {name} was silent for", times)
        all_read_on()
        time.sleep(max(0.0, began + stopped - time.monotonic()))
        signal_all(hosts["c"], signal.SIGCONT)
        time.sleep(max(0.0, began + away - time.monotonic()))
        cluster.network["b"].plug()
        for name in "bc":
            cluster.wait_for(f"host {name} works: ", times + 1)
        all_read_on()

    statuses = cluster.status_of_hosts()
    assert {name: status["state"] for name, status in statuses.items()} == dict.fromkeys("abc", "working")
    wait_until(  # a host that has joined again gets lanes when they reach a border
        lambda: all(host["received_bytes"] and host["fetched_bytes"] for host in cluster.status_of_hosts().values())
    )
    cluster.head.stop(signal.SIGKILL)
    cluster.serve(*feeds, workers=1)
    cluster.wait_for(" works: ", times=3)
    all_read_on()

    for feed, reader in readers.items():
        found = reader.stop()
        assert chain(found) == chain(alone(feed, len(found))), feed
        assert reader.stats == {"transport": "local" if feed == "mixed" else "tcp", "reconnects": 1}, feed
    assert cluster.head.stop() == 0
    for host in hosts.values():
        assert host.wait_ended() == 0, host.log()
        assert "the head was stopped" in host.log()


def test_ranks_and_a_group_wait_while_no_host_is_left_and_a_host_that_leaves_hands_over(
    cluster: Callable[..., Cluster], alone: Callable[..., list[str]]
) -> None:
    cluster = cluster()
    cluster.serve("ranked", "grouped", workers=0)
    hosts = [cluster.join("a"), cluster.join("b")]
    cluster.wait_for(" works: ", times=2)
    machines = ("head", "trainer")
    ranks = [cluster.read("ranked", at, rank=n, world_size=2, paced=True) for n, at in enumerate(machines)]
    members = [cluster.read("grouped", at, group="g", paced=True) for at in machines]

    def read_on() -> None:
        for reader in (*ranks, *members):
            reader.grant(3)
        for reader in (*ranks, members[0]):
            reader.wait_for_all()

    read_on()
    for host in hosts:
        signal_all(host, signal.SIGKILL)
    cluster.wait_for("has ended, or its connection has", times=2)
    leaving = cluster.join("c")
    cluster.wait_for("host c works: ")
    read_on()
    leaving.process.terminate()
    cluster.wait_for("host c leaves")
    read_on()  # no other host can make batches
    last = cluster.join("a")
    for reader in (*ranks, *members):
        reader.grant(1000)  # lanes move to the new host while they are read
    assert leaving.wait_ended(100) == 0, leaving.log()
    cluster.wait_for("host c has left")

    dealt = zip(*(rank.rest() for rank in ranks), strict=True)
    assert chain([*itertools.chain(*dealt)]) == chain(alone("ranked"))
    shared = Counter(itertools.chain(*(member.rest() for member in members)))
    assert shared == Counter(alone("grouped"))
    last.process.terminate()  # it has no work, so it leaves at once
    new = cluster.join("b")
    cluster.wait_for("host b at ", times=2)
    new.process.terminate()  # while it is being checked
    for host in (last, new):
        assert host.wait_ended(30) == 0, host.log()
        cluster.wait_for(f"host {host.name} has left")


@pytest.mark.parametrize(("feed", "transport"), [("by_index", "tcp"), ("by_lane", "auto")])
def test_ranks_read_what_their_own_machines_have_made(
    cluster: Callable[..., Cluster], alone: Callable[..., list[str]], feed: str, transport: str
) -> None:
    cluster = cluster()
    cluster.serve(feed, workers=2)
    cluster.join("a")
    cluster.wait_for(" works: ")
    machines = ("head", "a")
    ranks = [cluster.read(feed, at, rank=n, world_size=2, transport=transport) for n, at in enumerate(machines)]

    def passed() -> tuple[int, int, int]:
        """Return the bytes that the host has sent to the head, the bytes that trainers were told to fetch from it, and
        those of them that were mapped there."""
        for rank in ranks:
            rank.wait_for(12)
        status = cluster.status()
        assert all(stream["made_near"] for stream in status["streams"])
        (host,) = status["hosts"]
        return int(host["received_bytes"]), int(host["fetched_bytes"]), int(host["lent_bytes"])

    before, after = passed(), passed()
    assert after[0] == before[0]
    assert after[1] >= before[1] + 6 * 8 * 600
    wait_until(lambda: passed()[2] > before[2])
    dealt = [batch for one_round in zip(*(rank.digests[:24] for rank in ranks), strict=True) for batch in one_round]
    assert chain(dealt) == chain(alone(feed, 48))


def test_a_host_that_only_one_trainer_cannot_reach_sends_it_everything_through_the_head(
    cluster: Callable[..., Cluster], alone: Callable[..., list[str]]
) -> None:
    cluster = cluster()
    cluster.serve("table", "words", workers=0)
    hosts = [cluster.join("a"), cluster.join("b")]
    cluster.wait_for(" works: ", times=2)
    cluster.network["c"].block(cluster.network["a"])  # from the beginning
    readers = {"table": cluster.read("table", "c"), "words": cluster.read("words", "trainer")}
    for reader in readers.values():
        reader.wait_for(30)
    fetched = {name: status["fetched_bytes"] for name, status in cluster.status_of_hosts().items()}
    assert all(fetched.values())

    cluster.network["trainer"].block(cluster.network["b"])  # in the middle
    for reader in readers.values():
        reader.wait_for(30)
    assert not any(status["lent_bytes"] for status in cluster.status_of_hosts().values())
    for feed, reader in readers.items():
        found = reader.stop()
        assert chain(found) == chain(alone(feed, len(found))), feed
        assert reader.stats == {"transport": "tcp", "reconnects": 0}, feed
    for host in hosts:
        assert "please report" not in host.log()
