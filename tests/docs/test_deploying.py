"""The files for deployment are valid, and their commands work as they are, as plain processes in namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
STAGES = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
UNIT = ROOT / "deploy" / "systemd" / "penstock@.service"


def succeeds(*command: str) -> str:
    """Run a program of this environment, which must exit with 0. Return its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        command,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


# --- images and compose ---


def test_no_wait_of_the_compose_file_is_shorter_than_an_import() -> None:
    assert SERVICES["loader"]["healthcheck"]["start_period"] == "24h"
    for name in ("trainer", "prometheus"):
        assert SERVICES[name]["depends_on"]["loader"]["condition"] == "service_started", f"{name} waits on its own"


def test_the_compose_file_fits_the_published_schema() -> None:
    succeeds("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")


def test_the_dockerfile_passes_its_linter() -> None:
    succeeds("hadolint", "Dockerfile")


def test_images_run_as_another_user_than_root_and_the_loader_has_no_tensorflow() -> None:
    final = {stage.split()[2]: stage for stage in STAGES if stage.split()[2] != "base"}
    assert set(final) == {"loader", "trainer"}
    users = {re.findall(r"^USER (\d+)$", stage, re.MULTILINE)[-1] for stage in final.values()}
    assert len(users) == 1, "both must have the same user, or they share no memory"
    assert users != {"0"}
    assert "tensorflow" not in final["loader"]
    assert "tensorflow" not in SERVICES["loader"]["build"]["args"]["EXTRAS"]


def test_loader_and_trainer_can_share_memory_and_the_loader_may_finish_its_epochs() -> None:
    loader, trainer = SERVICES["loader"], SERVICES["trainer"]
    assert trainer["network_mode"] == "service:loader"
    assert not any("--bind" in word for word in loader["command"]), "only 127.0.0.1, which nobody else reaches"
    assert loader["ports"] == ["127.0.0.1:8090:8090"], "the web page, for this host"
    assert loader["stop_grace_period"]
    for service in (SERVICES["digits"], loader, trainer):
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"]
        assert service["init"]


# --- the commands, in namespaces ---


def namespaces() -> bool:
    """Return whether this process may make network namespaces."""
    needed = ("unshare", "nsenter", "ip", "setpriv")
    if os.geteuid() != 0 or not all(shutil.which(program) for program in needed):
        return False
    return subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True).returncode == 0


def words(service: str, part: str = "command", **places: Path) -> list[str]:
    """Return the command of a service in the compose file, with `places` instead of the container's folders."""
    (found,) = [SERVICES[service][part]]
    found = [word for word in (found["test"] if part == "healthcheck" else found) if word != "CMD"]
    found = [str(places.get(word.strip("/"), word)) for word in found]
    found = [word.replace("/examples/", f"{ROOT}/examples/digits/") for word in found]
    programs = {"python": [sys.executable], "penstock": [sys.executable, "-m", "penstock_command"]}
    return [*programs[found[0]], *found[1:]]


def variables(service: str, folder: Path) -> dict[str, str]:
    """Return the environment of a service, with the defaults of compose's variables."""
    given = SERVICES[service].get("environment", {})
    plain = {name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(value)) for name, value in given.items()}
    return os.environ | {name: str(folder) if value == "/data" else value for name, value in plain.items()}


class Container:
    """A process in its own network and process namespaces, like the loader's container."""

    def __init__(self, command: list[str], log: Path, **options: Any) -> None:
        self._log = log
        alone = [
            "unshare",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            'ip link set lo up; exec "$@"',
            "sh",
        ]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*alone, *command],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                **options,
            )

    @property
    def first(self) -> int:
        """Its process 1."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.01)
        return int(found[0])

    def inside(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command like a container with `network_mode: service:...` for this one: in this network namespace, and
        in its own process namespace."""
        joined = ["nsenter", f"--net=/proc/{self.first}/ns/net", "unshare", "--pid", "--fork", "--kill-child", *command]
        return subprocess.run(joined, capture_output=True, text=True, timeout=300)

    def log(self) -> str:
        return self._log.read_text()

    def stop(self) -> int:
        """Stop it as `docker stop` does. Return the exit code."""
        os.kill(self.first, signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def container(*arguments: Any, **options: Any) -> Iterator[Container]:
    started = Container(*arguments, **options)
    try:
        yield started
    finally:
        started.kill()


READ = """
import os, sys
import penstock

def read():
    with penstock.connect(sys.argv[1] + "/val") as connection:
        print(connection.stats()["transport"], sum(len(label) for _, label in connection.batches()))

read()
os.setuid(65534)  # now, as it may not read the modules
read()
"""


@pytest.mark.timeout(600)
def test_the_commands_of_the_compose_file_work_in_namespaces_as_containers_have_them(tmp_path: Path) -> None:
    if not namespaces():
        pytest.skip("network namespaces need root")
    data, digits = tmp_path / "data", ROOT / "examples" / "digits"
    subprocess.run(words("digits", data=data), cwd=digits, check=True, capture_output=True, timeout=60)
    with container(words("loader"), tmp_path / "log", cwd=digits, env=variables("loader", data)) as loader:
        while "slots of" not in loader.log():
            assert loader.process.poll() is None, loader.log()
            time.sleep(0.05)
        while loader.inside(words("loader", "healthcheck")).returncode:  # the feeds are ready one after the other
            assert loader.process.poll() is None, loader.log()
        url = words("trainer")[-1]
        read = [sys.executable, "-c", READ, url]
        assert loader.inside(read).stdout == "local 360\ntcp 360\n", "only the same user may share memory"
        assert loader.inside(["unshare", "--user", "--map-root-user", *read]).stdout.startswith("local 360\n")
        command = [sys.executable, "-m", "penstock_command"]
        assert loader.inside([*command, "scale", url, "3"]).stdout == "workers: 2 -> 3\n"
        assert "its process is in another container" in loader.inside([*command, "stop", url]).stderr
        trained = loader.inside([*words("trainer"), "--epochs=1"])
        assert "test accuracy" in trained.stdout, trained.stderr
        assert re.search(r"feed train: \S+ reads it \(local\)", loader.log())
        assert loader.stop() == 0


def test_a_daemon_that_is_nobody_in_a_user_namespace_shares_memory_with_no_one(tmp_path: Path) -> None:
    """In such a namespace, every user without an id looks like nobody."""
    if not namespaces():
        pytest.skip("user namespaces need root")
    (tmp_path / "feeds.py").write_text(
        "from penstock_server import Feed\nval = Feed(lambda: iter([(1, 2)]), batch_size=1)\n"
    )
    serve = [sys.executable, "-m", "penstock_server", "serve", "feeds:val", "--workers", "1"]
    with container(["unshare", "--user", *serve], tmp_path / "log", cwd=tmp_path) as loader:
        while "slots of" not in loader.log():
            assert loader.process.poll() is None, loader.log()
            time.sleep(0.1)
        read = loader.inside([sys.executable, "-c", READ.partition("os.setuid")[0], "tcp://127.0.0.1:5555"])
        assert read.stdout == "tcp 1\n", read.stderr


# --- systemd ---


def test_systemd_accepts_the_unit_and_finds_it_well_confined(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None or int(succeeds("systemd-analyze", "--version").split()[1]) < 251:
        pytest.skip("this needs systemd 251")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/penstock/bin/penstock", "/bin/true"))
    assert succeeds("systemd-analyze", "verify", str(unit)).strip() == ""
    exposed = succeeds("systemd-analyze", "security", "--offline=true", "--no-pager", str(unit))
    (level,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", exposed)
    assert float(level) <= 2.0, exposed


def test_the_unit_leaves_the_daemon_time_to_finish_its_epochs() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    assert settings["Type"] == "notify", "otherwise systemd ignores EXTEND_TIMEOUT_USEC"
    assert settings["KillMode"] == "mixed"
    assert int(settings["TimeoutStopSec"]) > 15, "longer than the daemon waits between two messages"
