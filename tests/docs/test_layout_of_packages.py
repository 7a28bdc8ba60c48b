"""What importing a module loads, and what the public names are. (import-linter checks which room may import which.)"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
import penstock_proto
import penstock_server
from tests.conftest import StartTrainer

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["proto/penstock_proto", "server/penstock_server", "client/penstock"]


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("penstock", {"tensorflow", "keras", "zmq", "click", "uvloop", "penstock_server", "h5py"}),
        ("penstock_proto", {"tensorflow", "zmq", "click", "uvloop"}),
        ("penstock_server", {"tensorflow", "zmq", "click", "uvloop", "penstock", "h5py"}),
        (
            "penstock_server.worker.process.loop",
            {"tensorflow", "zmq", "click", "uvloop", "penstock", "asyncio", "h5py"},
        ),
        ("penstock_server.in_process.engine", {"tensorflow", "zmq", "click", "uvloop", "penstock", "asyncio", "h5py"}),
        ("penstock_server.daemon.daemon", {"tensorflow", "zmq", "penstock", "h5py", "sqlite3"}),
        ("penstock_server.cli.main", {"tensorflow", "zmq", "uvloop", "penstock", "h5py", "numpy", "msgspec", "rich"}),
        (
            "penstock_server.peeking.files.data_files",
            {"tensorflow", "zmq", "click", "penstock", "h5py", "pyarrow", "PIL"},
        ),
        ("penstock_command", {"tensorflow", "zmq", "uvloop", "penstock", "h5py", "numpy", "msgspec", "rich"}),
    ],
)
def test_importing_a_module_loads_no_more_than_it_needs(module: str, never: set[str]) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not never & set(loaded)


def test_the_daemon_imports_no_code_of_workers() -> None:
    code = "import sys, penstock_server.daemon.daemon; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    own = {name for name in loaded if name.startswith("penstock_server.worker.")}
    assert own == {"penstock_server.worker.process", "penstock_server.worker.process.fork_messages"}
    assert "penstock_server.feed.feed" not in loaded


NO_THREADS = """
import os
from penstock_server.machine.numpy_threads import no_threads
with no_threads():
    import numpy
print(len(os.listdir("/proc/self/task")), os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.parametrize("threads", [None, "3"])
def test_daemons_import_numpy_without_its_threads_and_leave_the_environment_as_it_was(threads: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    if threads is not None:
        environment["OPENBLAS_NUM_THREADS"] = threads
    command = [sys.executable, "-c", NO_THREADS]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["1", str(threads)]


@pytest.mark.parametrize("module", [penstock, penstock_proto, penstock_server])
def test_public_names_are_those_listed(module: object) -> None:
    listed = module.__all__  # type: ignore[attr-defined]
    assert len(listed) == len(set(listed))
    for name in listed:
        assert hasattr(module, name), name


NAMES = "import importlib, sys; it = importlib.import_module(sys.argv[1]); print(*it.__all__); print(*dir(it))"


@pytest.mark.parametrize("module", ["penstock", "penstock_server"])
def test_the_namespaces_that_users_see_hold_public_names_alone(module: str) -> None:
    run = subprocess.run([sys.executable, "-c", NAMES, module], check=True, capture_output=True, text=True)
    listed, seen = run.stdout.splitlines()
    assert seen.split() == sorted(listed.split())


def test_the_namespace_of_the_keras_callbacks_holds_public_names_alone(start_trainer: StartTrainer) -> None:
    listed, seen = start_trainer(NAMES, "penstock.keras").communicate(60)[0].splitlines()
    assert seen.split() == sorted(listed.split())


def test_every_private_module_of_penstock_has_an_underscore() -> None:
    modules = {path.stem for path in (ROOT / "client/penstock").iterdir()} - {"py"}
    assert {name for name in modules if not name.startswith("_")} == {"commands", "keras"}


def test_dataset_has_the_options_of_connect_with_the_same_defaults() -> None:
    options = inspect.signature(penstock.dataset).parameters
    for name, option in inspect.signature(penstock.connect).parameters.items():
        assert options[name] == option


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs/reference.md").read_text()
    for name in set(penstock.__all__) | set(penstock_server.__all__):
        if not name.startswith("_"):
            assert name in reference, name


def test_every_package_is_typed() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").exists()


def test_the_states_in_the_docs_are_those_of_the_tables() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import states
    finally:
        sys.path.pop(0)
    text = states.PAGE.read_text()
    assert states.page(text) == text, "run `python docs/states.py`"
