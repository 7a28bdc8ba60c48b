"""Hosts on a Ray cluster: real raylets on this machine, and the stream of one host. Skipped where Ray is not installed.

pip install 'penstock-loader[ray]'
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import penstock
from tests.conftest import Daemon, Serve

pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock-loader[ray]'")

pytestmark = pytest.mark.timeout(900)  # a raylet takes 20 s to start where the CPUs are busy

FEED = """
    import time
    import numpy as np
    import beside
    from penstock_server import Feed
    def numbers(split, rng):
        for i in range(60):
            time.sleep(0.01)
            yield np.int64(1000 * split + i), rng.random(beside.WIDTH)
    feed = Feed(numbers, splits=range(12), batch_size=8, epochs=1)
"""

CLUSTER = """
import json, sys
import ray
from ray.cluster_utils import Cluster
node = dict(object_store_memory=80_000_000, include_dashboard=False)
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0, **node))
for _ in range(3):
    cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
ray.init(address=cluster.address, log_to_driver=False)
print("answer", cluster.address, flush=True)
for line in sys.stdin:
    if line == "take\\n":
        taken = ray.util.placement_group([{"CPU": 2}])
        taken.wait()
    if line == "free\\n":
        ray.util.remove_placement_group(taken)
    if line == "kill\\n":
        group = [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"][0]
        used = group["bundles_to_node_id"][0]
        (node,) = [node for node in cluster.worker_nodes if node.node_id == used]
        cluster.remove_node(node, allow_graceful=False)
    groups = [group["state"] for group in ray.util.placement_group_table().values()]
    cpus = ray.available_resources().get("CPU", 0), ray.cluster_resources()["CPU"]
    print("answer", json.dumps([sum(state != "REMOVED" for state in groups), *cpus]), flush=True)
ray.shutdown()
cluster.shutdown()
"""


class Cluster:
    """A Ray cluster on this machine: a head without CPUs, and three nodes with two CPUs each."""

    def __init__(self) -> None:
        slow = {"RAY_agent_register_timeout_ms": "200000", "RAY_raylet_start_wait_time_s": "200"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **slow, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.address = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, answer = line.strip().partition(" ")
            if word == "answer":  # Ray prints there, too
                return answer
        raise AssertionError("the cluster has ended")

    def ask(self, what: str) -> list[float]:
        """Return the number of placement groups, the free CPUs and all CPUs."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._answer())
        return found

    def is_empty(self) -> bool:
        groups, free, cpus = self.ask("look")
        return groups == 0 and free == cpus

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def until(condition: Callable[[], object]) -> None:
    """Wait as long as it takes; pytest's timeout ends a test that waits in vain."""
    while not condition():
        time.sleep(0.1)


def joined(url: str) -> list[psutil.Process]:
    """Return the processes of `penstock join` for the daemon at this URL."""
    port = url.rpartition("/")[0].rpartition(":")[2]
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "join" in words and any(word.startswith("tcp://") and word.endswith(f":{port}") for word in words):
                found.append(process)
    return found


def works(daemon: Daemon, times: int) -> bool:
    """Return whether hosts have begun to work `times` times."""
    assert daemon.process.poll() is None, daemon.stderr()
    return daemon.stderr().count("works: its files, code and first samples match the head's") >= times


def digest(batches: Iterator[tuple[np.ndarray, np.ndarray]]) -> str:
    result = hashlib.sha256()
    for batch in batches:
        for leaf in batch:
            result.update(np.ascontiguousarray(leaf).tobytes())
    return result.hexdigest()


def of_one_host(folder: Path) -> str:
    with penstock.connect(f"{folder / 'feeds.py'}:feed", workers=1) as connection:
        return digest(connection.batches())


def code(tmp_path: Path) -> None:
    """Write the module that the feed imports, next to the module that `serve` writes."""
    (tmp_path / "daemon0").mkdir()
    (tmp_path / "daemon0" / "beside.py").write_text("WIDTH = 100\n")


def test_the_stream_is_that_of_one_host_though_an_actor_and_then_the_driver_is_killed(
    cluster: Cluster, serve: Serve, tmp_path: Path
) -> None:
    code(tmp_path)
    options = {"on": "ray", "hosts": 2, "workers_per_host": 2, "workers": 0}
    daemon = serve(FEED, env={"RAY_ADDRESS": cluster.address}, **options)
    until(lambda: works(daemon, 2))

    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        first = [next(batches) for _ in range(5)]
        actor = joined(daemon.url)[0].parent()
        assert actor is not None
        assert "RayHost" in " ".join(actor.cmdline())
        actor.kill()
        assert digest(iter([*first, *batches])) == of_one_host(tmp_path / "daemon0")
    until(lambda: works(daemon, 3))
    assert "on Ray is lost, and Ray starts it again" in daemon.stderr()

    (driver,) = [child for child in psutil.Process(daemon.process.pid).children() if "on_ray" in str(child.cmdline())]
    driver.kill()
    until(lambda: works(daemon, 5))
    with penstock.connect(daemon.url) as connection:
        assert digest(connection.batches()) == of_one_host(tmp_path / "daemon0")

    assert daemon.stop() == 0
    assert not joined(daemon.url)
    until(cluster.is_empty)


DRIVER = """
import sys, time
import ray
from penstock_server.on_ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
with serve("feeds.py:feed", hosts=2, workers_per_host=1, keys="keys") as service:
    print(service.url, flush=True)
    sys.stdin.read()
"""


LONG = FEED.replace("range(12)", "range(96)").replace("0.01", "0.002")


def test_hosts_come_and_go_under_an_epoch_and_each_has_a_node_of_its_own(
    cluster: Cluster, serve: Serve, tmp_path: Path
) -> None:
    code(tmp_path)
    options = {"on": "ray", "hosts": 1, "workers_per_host": 1, "workers": 0}  # two hosts would fit on a node
    daemon = serve(LONG, env={"RAY_ADDRESS": cluster.address}, **options)
    until(lambda: works(daemon, 1))
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        seen = [next(batches) for _ in range(5)]
        assert daemon.scale("--hosts", "4") == "hosts: 1 -> 4\n"
        until(lambda: works(daemon, 3))
        until(lambda: "waiting for Ray: 1 of 4 hosts needs a node of its own with 1 free CPU" in daemon.stderr())
        seen += [next(batches) for _ in range(20)]
        assert daemon.scale("--hosts", "2") == "hosts: 4 -> 2\n"
        seen += batches
    assert digest(iter(seen)) == of_one_host(tmp_path / "daemon0")
    assert "is lost" not in daemon.stderr()
    until(lambda: "host ray-3 has left" in daemon.stderr())
    until(lambda: len(joined(daemon.url)) == 2)
    until(lambda: cluster.ask("look") == [2, 4, 6])
    assert "penstock: no host 'b' has joined this daemon; there are: ray-1, ray-2" in daemon.scale("3", "--host", "b")
    assert daemon.stop() == 0
    until(cluster.is_empty)


def test_hosts_are_added_while_a_trainer_waits(cluster: Cluster, serve: Serve, tmp_path: Path) -> None:
    code(tmp_path)
    options = {"on": "ray", "hosts": "1:2", "workers_per_host": 1, "workers": 0}
    daemon = serve(LONG.replace("0.002", "0.02"), env={"RAY_ADDRESS": cluster.address}, **options)
    with penstock.connect(daemon.url) as connection:
        for _ in connection.batches():
            if works(daemon, 2):
                break
    assert "hosts: 1, now 2: the trainer waits" in daemon.stderr()
    assert daemon.stop() == 0
    until(cluster.is_empty)


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_a_driver_serves_with_keys_and_nothing_is_left_when_it_ends(cluster: Cluster, tmp_path: Path, end: str) -> None:
    (tmp_path / "feeds.py").write_text("\n".join(line[4:] for line in FEED.splitlines()))
    (tmp_path / "beside.py").write_text("WIDTH = 100\n")
    keygen = [sys.executable, "-m", "penstock_server", "keygen", "keys", "--client", "me", "--host", "ray"]
    subprocess.run(keygen, cwd=tmp_path, check=True, capture_output=True)
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, cluster.address],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert driver.stdin is not None
    assert driver.stdout is not None
    try:
        url = driver.stdout.readline().strip()
        assert url, (tmp_path / "log").read_text()
        keys = str(tmp_path / "keys" / "clients" / "me")
        with penstock.connect(url, keys=keys) as connection:
            assert digest(connection.batches()) == of_one_host(tmp_path)
        assert len(joined(url)) == 2
        if end == "leaves":
            driver.stdin.close()
            assert driver.wait(120) == 0, (tmp_path / "log").read_text()
        else:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        until(lambda: not joined(url))
        until(cluster.is_empty)
    finally:
        driver.kill()
        driver.wait()
        with contextlib.suppress(OSError):
            driver.stdin.close()
        driver.stdout.close()


def test_nodes_that_are_missing_or_in_use_are_waited_for(cluster: Cluster, serve: Serve, tmp_path: Path) -> None:
    code(tmp_path)
    cluster.ask("take")
    options = {"on": "ray", "hosts": 3, "workers_per_host": 2, "workers": 0}
    daemon = serve(FEED, env={"RAY_ADDRESS": cluster.address}, **options)
    until(lambda: "waiting for Ray: 1 of 3 hosts needs a node of its own with 2 free CPUs" in daemon.stderr())
    assert "and the cluster has 3 nodes: " in daemon.stderr()
    assert "; 0 CPUs are free. Add nodes" in daemon.stderr()
    until(lambda: works(daemon, 2))
    cluster.ask("free")
    until(lambda: works(daemon, 3))
    assert daemon.stop() == 0
    until(cluster.is_empty)


def test_without_a_cluster_the_daemon_says_how_to_start_one(serve: Serve, tmp_path: Path) -> None:
    code(tmp_path)
    options = {"on": "ray", "hosts": 1, "workers_per_host": 1, "workers": 0, "ready": False}
    daemon = serve(FEED, env={"RAY_ADDRESS": "127.0.0.1:9"}, **options)
    assert daemon.process.wait(120) == 1
    assert daemon.process.stdout is not None
    daemon.process.stdout.close()
    assert "there is no Ray cluster at RAY_ADDRESS=127.0.0.1:9 ([Errno 111] Connection refused)" in daemon.stderr()
    assert "`ray start --head` starts one on this machine" in daemon.stderr()


@pytest.mark.soak
def test_a_host_moves_to_another_node_when_its_own_is_lost(cluster: Cluster, serve: Serve, tmp_path: Path) -> None:
    code(tmp_path)
    options = {"on": "ray", "hosts": 2, "workers_per_host": 2, "workers": 0}
    daemon = serve(FEED, env={"RAY_ADDRESS": cluster.address}, **options)
    until(lambda: works(daemon, 2))
    cluster.ask("kill")
    until(lambda: works(daemon, 3))
    with penstock.connect(daemon.url) as connection:
        assert digest(connection.batches()) == of_one_host(tmp_path / "daemon0")
    assert daemon.stop() == 0
    until(cluster.is_empty)
