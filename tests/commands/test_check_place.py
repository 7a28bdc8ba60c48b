"""`penstock check` without a target checks the machine, `penstock check URL` the connection. Each finding has a fix."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock_proto import distribution
from penstock_proto.status.feed_status import Feed
from penstock_proto.status.status_shape import Status
from penstock_proto.status.worker_status import Worker
from penstock_server.checking.findings import connection, connection_findings, machine, machine_findings
from penstock_server.checking.findings.connection import OTHER_HOST, OTHER_USER, WORKS, Connection, Read, attempt
from penstock_server.checking.findings.findings import ERROR, NOTE, WARNING, Finding
from penstock_server.checking.findings.machine import Machine, TensorFlow
from penstock_server.machine import cpus, memory_limits
from penstock_server.machine.cgroups import Limits, limits
from tests.conftest import Serve
from tests.fakes import statuses

FEED = """
    import numpy as np
    from penstock_server import Feed

    def numbers(split):
        while True:
            yield np.zeros(1000)

    feed = Feed(numbers, splits=range(4), batch_size=10)
"""

GOOD = Machine(
    system="Linux 6.1",
    cpus=8,
    usable_cpus=8,
    load=0.5,
    memory=16 << 30,
    available=12 << 30,
    default_memory=3 << 30,
    limits=Limits(),
    files=(1024, 1 << 20),
    shm=8 << 30,
    clock="tsc",
    clock_ns=40.0,
    now=1_790_000_000,
    python="3.11.7",
    versions=dict.fromkeys(("penstock", "numpy", "pyzmq", "uvloop", "h5py", "rich"), "9.0"),
    tensorflow=TensorFlow(3.0, ("/physical_device:GPU:0",)),
    nvidia=("/dev/nvidia0",),
)


def command(*arguments: str, path: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "penstock_command", "check", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
    return subprocess.run(words, capture_output=True, text=True, timeout=100, env=environment, **options)


# --- the machine ---


def fake_tensorflow(folder: Path, body: str) -> str:
    (folder / "tensorflow.py").write_text(body)
    return str(folder)


def test_a_machine_is_described_in_a_screen(tmp_path: Path) -> None:
    if not machine.version_of("tensorflow"):
        pytest.skip("needs an installed TensorFlow, which the test replaces with another module")
    path = fake_tensorflow(tmp_path, "class config:\n    list_physical_devices = staticmethod(lambda kind: [])\n")
    said = command(path=path)
    assert said.returncode == 0, said.stdout + said.stderr
    facts = dict(line.split(maxsplit=1) for line in said.stdout.split("\n\n")[0].splitlines() if line[0] != " ")
    assert set(facts) >= {"system", "CPUs", "memory", "files", "shared", "clock", "python", "packages", "trainer"}
    assert facts["shared"].startswith("memfd works")
    assert facts["trainer"].endswith("and sees no GPU")
    assert "numpy " in facts["packages"]
    broken = command("--json", path=fake_tensorflow(tmp_path, "raise ImportError('libcudart is missing')"))
    assert broken.returncode == 1
    found = json.loads(broken.stdout)
    assert found["usable_cpus"] == len(os.sched_getaffinity(0))
    (finding,) = (one for one in found["findings"] if one["severity"] == ERROR)
    assert (finding["about"], finding["what"].endswith("ImportError: libcudart is missing")) == ("tensorflow", True)


def test_a_good_machine_has_no_findings() -> None:
    assert machine_findings.judged(GOOD) == []


@pytest.mark.parametrize(
    ("change", "severity", "what", "fix"),
    [
        ({"broken": {"memfd_create": "Operation not permitted"}}, ERROR, "memfd_create does not work", "seccomp"),
        ({"limits": Limits(cpus=2.5)}, NOTE, "of 8 CPUs, so `penstock serve` starts 3 workers", "raise the limit"),
        ({"usable_cpus": 4}, NOTE, "may run on 4 of 8 CPUs", ""),
        ({"load": 20.0}, NOTE, "other work slows workers down", ""),
        ({"available": 100 << 20}, WARNING, "100.0 MiB are left", "give the machine more memory"),
        ({"available": 1, "limits": Limits(memory=1 << 28)}, WARNING, "are left", "give the cgroup more memory"),
        ({"files": (256, 256)}, ERROR, "256 open files, which is enough for 0 workers", "ulimit -n"),
        ({"files": (1024, 800)}, WARNING, "open files, which is enough for", "ulimit -n"),
        ({"limits": Limits(processes=100)}, WARNING, "allows 100 processes and threads", "TasksMax"),
        ({"shm": 64 << 20}, NOTE, "/dev/shm has 64.0 MiB", "--shm-size"),
        ({"versions": {"penstock": "1", "rich": "1", "h5py": "3"}}, ERROR, "needs pyzmq, uvloop", "[server]'"),
        ({"too_old": {"numpy 1.26": "numpy>=2.0"}}, WARNING, "numpy 1.26 is too old", "pip install 'numpy>=2.0'"),
        ({"other_project": "run pip uninstall penstock"}, ERROR, "run pip uninstall penstock", ""),
        ({"tensorflow": TensorFlow(failed="no such symbol")}, ERROR, "import fails: no such symbol", "reinstall"),
        ({"tensorflow": TensorFlow(3.0)}, WARNING, "/dev/nvidia0, but TensorFlow sees no GPU", "tensorflow[and-cuda]"),
        ({"tensorflow": TensorFlow(3.0), "cuda_visible": "-1"}, WARNING, "sees no GPU", "unset CUDA_VISIBLE_DEVICES"),
        ({"clock": "hpet", "clock_ns": 1500.0}, WARNING, "takes 1500 ns (hpet)", "tsc"),
        ({"now": 1000.0}, WARNING, "the date is wrong", "NTP"),
    ],
)
def test_what_is_wrong_with_a_machine_is_told_with_its_fix(
    change: dict[str, Any], severity: str, what: str, fix: str
) -> None:
    (found,) = machine_findings.judged(dataclasses.replace(GOOD, **change))
    assert found.severity == severity
    assert what in found.what
    assert fix in found.fix
    assert all(text for _, text in machine_findings.rows(dataclasses.replace(GOOD, **change)))


def put(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    put(tmp_path / "v2/a", cpu__max="150000 100000\n", memory__max="1000000\n", pids__max="max\n")
    put(tmp_path / "v2/a/b", cpu__max="max 100000\n", memory__max="max\n", pids__max="64\n")
    assert limits(tmp_path / "v2", own) == Limits(1.5, 1_000_000, 64)
    assert limits(tmp_path / "nothing", own) == Limits()
    own.write_text("4:cpu,cpuacct:/c\n3:memory:/c\n2:pids:/c\n1:name=systemd:/c\n")
    v1 = tmp_path / "v1"
    put(v1 / "cpu,cpuacct/c", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    put(v1 / "cpu,cpuacct", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    put(v1 / "memory/c", memory__limit_in_bytes="9223372036854771712")
    put(v1 / "memory", memory__limit_in_bytes="2000000")
    put(v1 / "pids/c", pids__max="max")
    assert limits(v1, own) == Limits(0.5, 2_000_000, None)


def test_what_a_cgroup_has_left_is_read_only_where_there_is_a_limit(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    v2 = tmp_path / "v2"
    put(v2 / "a", memory__max="1000\n", memory__current="700\n", memory__stat="anon 500\ninactive_file 200\n")
    put(v2 / "a/b", memory__max="max\n", memory__current="not read", memory__stat="not read")
    assert memory_limits._cgroups(v2, own) == [500]
    own.write_text("3:memory:/c\n")
    v1 = tmp_path / "v1"
    put(v1 / "memory/c", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="7", memory__stat="")
    used = {"memory__usage_in_bytes": "2500", "memory__stat": "total_inactive_file 100\n"}
    put(v1 / "memory", memory__limit_in_bytes="2000", **used)
    assert memory_limits._cgroups(v1, own) == [0]  # more than the limit is used


STAT = "cpu  0 0 0 99999 0\n" + "".join(f"cpu{number} 0 0 0 {{idle}} 0 0\n" for number in range(256))


def test_by_default_there_is_a_worker_for_each_cpu_that_a_quota_pays_for() -> None:
    code = """
        from penstock_server.machine import cpus
        cpus.usable = lambda: 3
        from penstock_server.cli import main as cli
        from penstock_server.daemon import serving
        from penstock_server.join import agent
        serving.serve = agent.join = lambda config, **_: print(config.workers)
        cli.main(["serve", "feeds.py:feed"], standalone_mode=False)
        cli.main(["join", "tcp://head:5555", "feeds.py:feed"], standalone_mode=False)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert ran.stdout.split() == ["3", "3"], ran.stderr


def test_idle_cpus_are_what_a_quota_has_left(tmp_path: Path) -> None:
    own, stat, folder = tmp_path / "own", tmp_path / "stat", tmp_path / "v2/a"
    here, ticks = len(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")

    def read(seconds: float, used: float, periods: int = 0, throttled: int = 0) -> cpus.CpuReading:
        text = f"usage_usec {used * 1e6:.0f}\nuser_usec 1\nnr_periods {periods}\nnr_throttled {throttled}\n"
        put(folder, cpu__max=maximum, cpu__stat=text)
        stat.write_text(STAT.format(idle=round(seconds * ticks)))  # all of them are idle
        return cpus.read(seconds, tmp_path / "v2", own, stat)

    own.write_text("0::/a/b\n")
    put(folder / "b", cpu__max="max 100000\n", cpu__stat="usage_usec 9000000000\n")
    maximum = "50000 100000\n"
    first = read(100, 10)
    assert cpus.usable(tmp_path / "v2", own) == 1, "rounded up"
    assert cpus.idle(first, read(110, 10)) == pytest.approx(0.5)
    assert cpus.idle(first, read(110, 13)) == pytest.approx(0.2)
    assert cpus.idle(first, read(110, 15.1)) == 0, "the kernel lets a quota overrun a little"
    assert cpus.idle(first, read(110, 13, 100, 75)) == pytest.approx(0.05), "the quota was often used up early"
    maximum = "max 100000\n"
    assert cpus.idle(first, read(110, 13)) == pytest.approx(here)
    assert cpus.usable(tmp_path / "v2", own) == here

    own.write_text("4:cpu:/c\n3:cpuacct:/c\n0::/c\n")
    put(tmp_path / "v1/cpu/c", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000", cpu__stat="nr_periods 0\n")
    put(tmp_path / "v1/cpuacct/c", cpuacct__usage="2000000000\n")
    stat.write_text(STAT.format(idle=0))
    first = cpus.read(10, tmp_path / "v1", own, stat)
    put(tmp_path / "v1/cpuacct/c", cpuacct__usage="5000000000\n")
    stat.write_text(STAT.format(idle=1000 * ticks))
    assert cpus.idle(first, cpus.read(40, tmp_path / "v1", own, stat)) == pytest.approx(0.4)
    own.write_text("4:cpu:/c\n3:cpuacct:/\n")
    put(tmp_path / "v1/cpuacct", cpuacct__usage="1\n")
    elsewhere = cpus.read(10, tmp_path / "v1", own, stat)
    (quota,) = elsewhere.quotas.values()
    assert (quota.cpus, quota.used) == (0.5, None), "the time that others used says nothing"


def test_packages_are_compared_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=2.0", "click>=8.1.8; extra == 'server'", "odd"]
    monkeypatch.setattr(distribution, "requirements", lambda: wanted)
    found = machine.outdated({"numpy": "1.26.4", "click": "8.10.0"})
    assert found == {"numpy 1.26.4": "numpy>=2.0"}


# --- the connection ---


def test_a_connection_on_this_host_uses_shared_memory(serve: Serve) -> None:
    daemon = serve(FEED)
    said = command(daemon.url, "--seconds", "0.5")
    assert said.returncode == 0, said.stdout + said.stderr
    assert "transport shared memory: the daemon is on this host" in said.stdout
    assert "there and back (median of 20" in said.stdout
    assert re.search(r"/s for \d.\d s: ", said.stdout)
    assert said.stdout.endswith("nothing is wrong\n")
    if os.geteuid() == 0:
        imports = "import os, penstock, penstock_command, penstock_server.checking.findings.connection_findings"
        code = f"""
            {imports}, penstock.commands.reading, penstock_server.checking.judging.report, penstock_server.coordinator
            penstock.connect("{daemon.url}", transport="tcp").close()
            os.setuid(65534)
            penstock_command.main(["check", "{daemon.url}", "--json", "--seconds", "0.2"], obj=None)
        """
        other = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
        )
        found = json.loads(other.stdout)
        assert (found["transport"], found["same_host"]) == ("tcp", True)
        assert [one["about"] for one in found["findings"]] == ["transport"]
        assert "it belongs to another user than this process" in found["findings"][0]["what"]
    unknown = command(daemon.url + "er", "--strict")
    assert unknown.returncode == 1
    assert "no feed 'feeder' is served" in unknown.stdout


def test_a_daemon_that_cannot_be_reached_is_told_with_the_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.3)
        (found,) = judged(f"tcp://127.0.0.1:{port}")
        assert (found.about, "does not answer as a daemon" in found.what) == ("daemon", True)
    (found,) = judged(f"tcp://127.0.0.1:{port}/train")
    assert (found.about, f"nothing listens at 127.0.0.1, port {port}" in found.what) == ("tcp", True)
    assert "--bind tcp://0.0.0.0" in found.fix
    monkeypatch.setattr(socket, "getaddrinfo", unknown_name)
    (found,) = judged("tcp://loader.lan:5555/train")
    assert (found.about, "'loader.lan' has no address: Name or service not known" in found.what) == ("name", True)
    assert "--seconds" not in command("localhost:5555").stderr
    assert "write tcp://localhost:5555" in command("localhost:5555").stderr
    assert "--workers means nothing with a URL" in command("tcp://127.0.0.1:9", "--workers", "2").stderr


def judged(url: str) -> list[Finding]:
    return connection_findings.judged(attempt(url, 0.1, None, lambda doing, part: None))


def unknown_name(*arguments: Any, **options: Any) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


STATE = statuses.of(
    Status,
    pid=7,
    version=6,
    seconds=5.0,
    ready=True,
    feeds=[statuses.of(Feed, name="train")],
    workers=[statuses.of(Worker)],
)
GIVEN_UP = statuses.of(Worker, given_up=True)
REMOTE = Connection(
    "tcp://loader:5555/train",
    "loader",
    5555,
    "train",
    addresses=["10.0.0.5"],
    reached="10.0.0.5",
    state=STATE,
    unix=OTHER_HOST,
    trips=[0.001] * 20,
    read=Read("tcp", 1.0, 100, 10**8, 0.5, True),
)


def facts(**changes: Any) -> dict[str, str]:
    return dict(connection_findings.rows(dataclasses.replace(REMOTE, **changes)))


def test_the_transport_and_the_limit_are_told_with_the_reason() -> None:
    assert connection_findings.judged(REMOTE) == []
    assert facts()["transport"] == "TCP: the daemon is on another host"
    assert facts()["batches"].endswith("the network is the limit, as the daemon has more to send")
    waits = Read("tcp", 1.0, 100, 10**8, 0.5, False)
    assert facts(read=waits)["batches"].endswith("the workers are the limit, not the connection")
    quick = Read("tcp", 1.0, 100, 10**8, 0.05, True)
    assert facts(read=quick)["batches"].endswith("this process is the limit, not the connection")
    local = Read("local", 1.0, 100, 10**8, 0.5, False)
    assert facts(unix=WORKS, read=local)["transport"].startswith("shared memory")
    assert "belongs to another user" in facts(unix=OTHER_USER)["transport"]
    assert "another network namespace" in facts(same_host=True)["transport"]


@pytest.mark.parametrize(
    ("change", "severity", "what", "fix"),
    [
        ({"resolved": 3.0}, WARNING, "took 3.0 s", "name server"),
        ({"refused": {"fe80::1": OSError(101, "Network is unreachable")}}, NOTE, "Network is unreachable", "--bind"),
        ({"unix": OTHER_USER, "same_host": True}, WARNING, "belongs to another user", "--user"),
        ({"same_host": True}, WARNING, "another network namespace", "--network host"),
        ({"unix": "no descriptor came with the greeting"}, WARNING, "no descriptor came", "penstock check"),
        ({"trips": [0.05] * 20}, WARNING, "50 ms there and back", "closer to the trainer"),
        ({"read": None, "unread": "no room"}, ERROR, "no batch could be read: no room", ""),
        ({"read": Read("tcp", 1.0, 0, 0, 1.0, False)}, WARNING, "no batch came in time", "penstock top"),
        ({"state": replace(STATE, draining=True)}, WARNING, "begins no new ones", ""),
        (
            {"state": replace(STATE, ready=False, phase="importing a:b")},
            WARNING,
            "not ready yet: importing a:b",
            "wait",
        ),
        ({"state": replace(STATE, internal_errors=2)}, WARNING, "2 internal errors", "report them"),
        ({"state": replace(STATE, workers=[GIVEN_UP])}, WARNING, "1 of its workers cannot be started", "log"),
    ],
)
def test_what_is_wrong_with_a_connection_is_told_with_its_fix(
    change: dict[str, Any], severity: str, what: str, fix: str
) -> None:
    (found,) = connection_findings.judged(dataclasses.replace(REMOTE, **change))
    assert found.severity == severity
    assert what in found.what
    assert fix in found.fix
