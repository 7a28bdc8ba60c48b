"""The files of deploy/kubernetes and deploy/slurm are valid. Their commands work as they are, as plain processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import penstock
from tests.processes.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
SCRIPT = ROOT / "deploy" / "slurm" / "penstock.sbatch"
KUSTOMIZATION = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
OBJECTS = {
    found["kind"]: found
    for name in KUSTOMIZATION["resources"]
    for found in yaml.safe_load_all((KUBERNETES / name).read_text())
}
HEAD, HOSTS = (OBJECTS[kind]["spec"]["template"]["spec"] for kind in ("StatefulSet", "Deployment"))


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return dict(found)


def penstock_command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock_server", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


# --- Kubernetes ---


@pytest.mark.parametrize("kind", OBJECTS)
def test_the_manifests_fit_the_schemas_of_kubernetes(kind: str) -> None:
    assert OBJECTS.keys() == {"Service", "StatefulSet", "Deployment", "PodDisruptionBudget"}
    kubernetes_validate.validate(OBJECTS[kind], "1.33", strict=True)


def test_selectors_ports_and_volumes_name_what_there_is() -> None:
    for kind in ("StatefulSet", "Deployment"):
        spec = OBJECTS[kind]["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    service, head = OBJECTS["Service"]["spec"], OBJECTS["StatefulSet"]
    assert service["selector"] == head["spec"]["selector"]["matchLabels"]
    assert head["spec"]["serviceName"] == OBJECTS["Service"]["metadata"]["name"]
    assert OBJECTS["PodDisruptionBudget"]["spec"]["selector"] == OBJECTS["Deployment"]["spec"]["selector"]
    ports = {port["name"]: port["containerPort"] for port in container(HEAD)["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports

    made = {one["name"] for key in ("configMapGenerator", "secretGenerator") for one in KUSTOMIZATION[key]}
    for pod in (HEAD, HOSTS):
        for volume in pod["volumes"]:
            text = json.dumps(volume)
            for name in re.findall(r'"(?:secretName|name)": "(penstock-[^"]*)"', text):
                assert name in made
        assert {one["name"] for one in container(pod)["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_trainers_and_hosts_reach_a_head_whose_feeds_are_being_started() -> None:
    assert OBJECTS["Service"]["spec"]["publishNotReadyAddresses"]
    assert "startupProbe" not in container(HEAD), "it would end a head whose imports take longer"


def test_pods_have_time_to_end_and_no_rights_that_they_do_not_need() -> None:
    grace = float(next(word for word in container(HOSTS)["args"] if word.startswith("--grace=")).partition("=")[2])
    assert grace < HOSTS["terminationGracePeriodSeconds"]
    for pod in (HEAD, HOSTS):
        assert pod["securityContext"]["runAsNonRoot"]
        assert container(pod)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container(pod)["securityContext"]["readOnlyRootFilesystem"]
        assert not pod["automountServiceAccountToken"]
    assert f"USER {HEAD['securityContext']['runAsUser']}" in (ROOT / "Dockerfile").read_text()


def secrets(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the files of each Secret that kustomize would make from the keys in `folder`."""
    found = {}
    for generator in KUSTOMIZATION["secretGenerator"]:
        pairs = [file.rpartition("=") for file in generator["files"]]
        found[generator["name"]] = {name or Path(path).name: (folder / path).read_bytes() for name, _, path in pairs}
    return found


def mounted(files: dict[str, bytes], at: Path) -> str:
    """Write files as Kubernetes mounts them for the pod's fsGroup. Return the folder."""
    for path, data in files.items():
        (at / path).parent.mkdir(parents=True, exist_ok=True)
        (at / path).write_bytes(data)
        (at / path).chmod(0o440)
    return str(at)


@contextlib.contextmanager
def running(words: list[str], log: Path, cwd: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock_server", *words],
            cwd=cwd,
            stdout=output,
            stderr=output,
            env=os.environ | variables,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_the_commands_and_probes_of_the_pods_work_with_keys_as_they_are_mounted(tmp_path: Path) -> None:
    made = penstock_command("keygen", "keys", "--client", "trainer", "--host", "loaders", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    made_secrets = secrets(tmp_path)
    (items,) = [one["secret"]["items"] for one in HEAD["volumes"][1]["projected"]["sources"]]
    head_files = {item["path"]: made_secrets["penstock-head-keys"][item["key"]] for item in items}
    port, web = free_port(), free_port()
    changed = {
        "--keys=/keys": f"--keys={mounted(head_files, tmp_path / 'head')}",
        "--bind=tcp://0.0.0.0:5555": f"--bind=tcp://127.0.0.1:{port}",
        "--http=0.0.0.0:8090": f"--http=127.0.0.1:{web}",
        "--memory=8G": "--memory=256M",
    }
    words = container(HEAD)["args"]
    assert changed.keys() <= set(words)
    serve = [changed.get(word, word) for word in words[1:]]
    host_keys = mounted(made_secrets["penstock-host-keys"], tmp_path / "host")
    changed = {
        "tcp://penstock:5555": f"tcp://127.0.0.1:{port}",
        "--memory=4G": "--memory=256M",
    }
    words = container(HOSTS)["args"]
    assert changed.keys() <= set(words)
    join = [changed.get(word, word) for word in words[1:]]
    trainer_keys = mounted(made_secrets["penstock-trainer-keys"], tmp_path / "trainer")

    probe = " ".join(container(HOSTS)["readinessProbe"]["exec"]["command"][2].split())
    probe = probe.replace("penstock status tcp://penstock:5555", f"penstock status tcp://127.0.0.1:{port}")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "penstock"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock_server "$@"\n')
    program.chmod(0o755)
    pod = {"HOSTNAME": "penstock-hosts-1", "PENSTOCK_KEYS": host_keys, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    (variable,) = [one for one in container(HOSTS)["env"] if one["name"] == "PENSTOCK_JOIN_WORKERS"]
    pod[variable["name"]] = "2"

    def ready() -> bool:
        return subprocess.run(["sh", "-c", probe], env=os.environ | pod, capture_output=True).returncode == 0

    logs = [tmp_path / "head.log", tmp_path / "host.log"]
    with running(serve, logs[0], KUBERNETES) as head:
        while not answers(f"http://127.0.0.1:{web}{container(HEAD)['readinessProbe']['httpGet']['path']}"):
            assert head.poll() is None, logs[0].read_text()
            time.sleep(0.1)
        assert answers(f"http://127.0.0.1:{web}{container(HEAD)['livenessProbe']['httpGet']['path']}")
        assert not ready()
        pod_name = ["--host-name", pod["HOSTNAME"]]  # in a pod this is the machine's name
        with running([*join, *pod_name], logs[1], KUBERNETES, **pod) as host:
            while not ready():
                assert host.poll() is None, logs[1].read_text()
            with penstock.connect(f"tcp://127.0.0.1:{port}/train", keys=trainer_keys) as connection:
                assert next(connection.batches())[0].shape == (32, 64, 64)
            host.send_signal(signal.SIGTERM)
            assert host.wait(HOSTS["terminationGracePeriodSeconds"]) == 0, logs[1].read_text()
        head.send_signal(signal.SIGTERM)
        assert head.wait(60) == 0, logs[0].read_text()


# --- Slurm ---


def test_the_slurm_script_passes_its_linter() -> None:
    program = str(Path(sys.executable).parent / "shellcheck")
    checked = subprocess.run([program, str(SCRIPT)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


STUBS = {
    "scontrol": """
        #!/bin/sh
        [ "$1 $2" = "show hostnames" ] || exit 1
        for node in $3; do echo "$node"; done
        """,
    # Runs the command once for each task, as srun does on each node, and passes SIGTERM on to every process of a task.
    "srun": """
        #!/bin/bash
        echo "$@" >> srun.log
        while [[ $1 == --* ]]; do
          case $1 in --ntasks=*) tasks=${1#*=};; --exclude=127.0.0.1 | --*=* | --no-kill) ;; *) exit 1;; esac
          shift
        done
        set -m  # a process group for each task
        trap 'for task in $(jobs -p); do kill -TERM -- -"$task" 2> /dev/null; done' TERM
        for ((task = 0; task < tasks; task++)); do "$@" & done
        while [[ -n $(jobs -pr) ]]; do wait; done
        """,
    "penstock": """
        #!/bin/sh
        exec {python} -m penstock_server "$@"
        """,
}

FEED = """
    import numpy as np
    from penstock_server import Feed
    def numbers(split):
        yield from (np.int64(10 * split + i) for i in range(10))
    feed = Feed(numbers, splits=range(4), batch_size=5)
"""

TRAINER = """
import os, json, penstock
with penstock.connect(os.environ["PENSTOCK_URL"] + "/feed") as connection:
    print(*(int(one) for batch in connection.batches() for one in batch))
from penstock_server.to_daemon import control
from penstock_proto.security.keys import client_keys
state = control.status(os.environ["PENSTOCK_URL"], 60, client_keys(None))
print(len(state.hosts), "hosts")
"""


def slurm(tmp_path: Path, nodes: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script as Slurm does on the first of these nodes."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, text in STUBS.items():
        program = place / name
        program.write_text(textwrap.dedent(text).lstrip().replace("{python}", sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    given = {
        "PATH": f"{place}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_CPUS_PER_TASK": "1",
        "PENSTOCK_SLURM_KEYS": str(tmp_path / "keys"),
        "PENSTOCK_SLURM_PORT": str(free_port()),
    }
    return subprocess.run(
        ["bash", str(SCRIPT), *words],
        cwd=tmp_path,
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_the_slurm_script_runs_head_hosts_and_trainer_and_ends_with_the_trainer(tmp_path: Path) -> None:
    made = penstock_command("keygen", "keys", "--client", "trainer", "--host", "slurm", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    (tmp_path / "feeds.py").write_text(textwrap.dedent(FEED))
    ran = slurm(tmp_path, "127.0.0.1 b c", "feeds.py:feed", "--", sys.executable, "-c", TRAINER)
    assert ran.returncode == 0, ran.stderr
    *ready, batches, hosts = ran.stdout.splitlines()
    assert len(ready) == 2, "the head and `penstock wait` say it"
    assert all(line.startswith("ready tcp://127.0.0.1:") for line in ready)
    assert sorted(map(int, batches.split())) == list(range(40))
    assert hosts in ("1 hosts", "2 hosts"), "the trainer ends once it has its batches, so a host may come too late"
    assert "--ntasks=2 --ntasks-per-node=1" in (tmp_path / "srun.log").read_text()
    assert "stopped" in ran.stderr


@pytest.mark.parametrize(("nodes", "words"), [("a b", []), ("a", ["feeds.py:feed"])])
def test_the_slurm_script_refuses_what_cannot_work(tmp_path: Path, nodes: str, words: list[str]) -> None:
    ran = slurm(tmp_path, nodes, *words)
    assert ran.returncode == 2
    assert ("usage: sbatch" if not words else "two nodes or more") in ran.stderr
