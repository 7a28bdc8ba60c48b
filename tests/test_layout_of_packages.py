"""Which packages may import which, and what the public names are."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import StartTrainer

import penstock
import penstock_proto
import penstock_server

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "proto/penstock_proto": {"penstock_proto"},
    "server/penstock_server": {"penstock_server", "penstock_proto"},
    "client/penstock": {"penstock", "penstock_proto"},
}


def imports(path: Path) -> set[str]:
    """Return the packages that a file imports, except those that only a type checker sees."""
    found = set()
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and is_for_types(node.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_the_design_allows(package: str) -> None:
    ours = {"penstock", "penstock_proto", "penstock_server", "penstock_command"}
    for path in (ROOT / package).rglob("*.py"):
        assert imports(path) & ours <= PACKAGES[package], path


def test_tensorflow_and_keras_are_imported_by_the_files_of_the_client_that_need_them_alone() -> None:
    theirs = {
        "tensorflow": {"_tfdata", "_tf_checkpoints", "_checkpoint_state"},
        "keras": {"_keras_batches", "_checkpoints", "_feeding", "_resume"},
    }
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for library, names in theirs.items():
                here = path.parent == ROOT / "client/penstock" and path.stem in names
                assert here or library not in imports(path), path


def test_pytorch_is_imported_by_two_files_of_the_client_alone() -> None:
    theirs = [ROOT / "client/penstock" / name for name in ("_torch.py", "_torch_randomness.py")]
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert path in theirs or "torch" not in imports(path), path


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("penstock", {"tensorflow", "keras", "zmq", "click", "uvloop", "penstock_server", "h5py"}),
        ("penstock_proto", {"tensorflow", "zmq", "click", "uvloop"}),
        ("penstock_server", {"tensorflow", "zmq", "click", "uvloop", "penstock", "h5py"}),
        ("penstock_server.worker.loop", {"tensorflow", "zmq", "click", "uvloop", "penstock", "asyncio", "h5py"}),
        ("penstock_server.in_process", {"tensorflow", "zmq", "click", "uvloop", "penstock", "asyncio", "h5py"}),
        ("penstock_server.daemon", {"tensorflow", "zmq", "penstock", "h5py", "sqlite3"}),
        ("penstock_server.cli", {"tensorflow", "zmq", "uvloop", "penstock", "h5py", "numpy", "msgspec", "rich"}),
        ("penstock_server.peeking.data_files", {"tensorflow", "zmq", "click", "penstock", "h5py", "pyarrow", "PIL"}),
        ("penstock_command", {"tensorflow", "zmq", "uvloop", "penstock", "h5py", "numpy", "msgspec", "rich"}),
    ],
)
def test_importing_a_module_loads_no_more_than_it_needs(module: str, never: set[str]) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not never & set(loaded)


def test_the_daemon_imports_no_code_of_workers() -> None:
    code = "import sys, penstock_server.daemon; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    own = {name for name in loaded if name.startswith("penstock_server.worker.")}
    assert own == {"penstock_server.worker.fork_messages"}
    assert "penstock_server.feed" not in loaded


NO_THREADS = """
import os
from penstock_server.numpy_threads import no_threads
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
    modules = {path.stem for path in (ROOT / "client/penstock").glob("*.py")}
    assert {name for name in modules if not name.startswith("_")} == {"keras"}


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


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports that only a type checker sees count, too: what two files need of each other belongs in a third, or in one
    of them."""
    modules = {}
    for package in PACKAGES:
        base = (ROOT / package).parent
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: set(_imported(name, path, modules)) - {name} for name, path in modules.items()}
    while free := [name for name, imported in graph.items() if not imported & graph.keys()]:
        for name in free:
            del graph[name]
    imported_too = set().union(*graph.values()) if graph else set()
    assert not {name for name in graph if name in imported_too}


def _imported(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield our modules that a module imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in modules or base in modules:
                    yield full if full in modules else base


def test_the_states_in_the_docs_are_those_of_the_tables() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import states
    finally:
        sys.path.pop(0)
    text = states.PAGE.read_text()
    assert states.page(text) == text, "run `python docs/states.py`"
