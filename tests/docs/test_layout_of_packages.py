"""What importing a module loads, and what the public names are. (import-linter checks which room may import which.)"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

import penstock
import penstock_proto
import penstock_server
from penstock_proto.declarations import figures
from penstock_proto.status.feed_status import Feed
from penstock_proto.status.host_status import Host
from penstock_proto.status.status_shape import Status
from penstock_proto.status.stream_status import Stream
from penstock_proto.status.worker_status import Worker
from penstock_server.cli.main import serve
from penstock_server.coordinator.model import events
from penstock_server.coordinator.model.consumer import CONSUMER_STATES
from penstock_server.coordinator.model.turn import TURN_STATES
from penstock_server.coordinator.order.lane import LANE_STATES
from penstock_server.http.metrics import METRICS
from penstock_server.sources import bounds
from penstock_server.sources.format import Source
from penstock_server.sources.images import pixels
from penstock_server.sources.json_lines import reader as json_lines
from penstock_server.sources.matlab import reader as matlab
from penstock_server.sources.registry import BUILT_IN
from penstock_server.sources.tables.table import MOST_BYTES
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


def test_the_pages_made_from_code_name_every_event_and_draw_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    made_events, states = importlib.import_module("events"), importlib.import_module("states")
    table = made_events.page()
    for event in get_args(events.Event):
        assert table.count(f"\n| `{event.__name__}` | ") == 1
    drawings = states.page()
    for states_of in (TURN_STATES, LANE_STATES, CONSUMER_STATES):
        for state, ways in states_of.items():
            assert f"\n  {state.name}: {state.value}\n" in drawings
            for after, why in ways.items():
                assert re.search(rf"--> {after.name} +{re.escape(why)}\n", drawings)


def test_the_page_on_monitoring_names_every_figure_and_every_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    table = importlib.import_module("figures").page()
    for one in (one for kind in (Status, Feed, Worker, Host, Stream) for one in figures(kind)):
        assert re.search(rf"`{one.name}` \|.* {re.escape(one.means)} \|\n", table), one
    table = importlib.import_module("metrics").page()
    for name in METRICS:
        assert len(re.findall(rf"^\| `{name}(_info)?` \| ", table, re.MULTILINE)) == 1, name


def test_the_drawing_of_the_rooms_has_the_layers_of_import_linter() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    drawing = re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == "The server's rooms")
    drawn = [re.sub(r"\(.*\)", "", line[15:]).split() for line in drawing.splitlines() if "|" not in line]
    assert [room for row in drawn for room in row] == layers


def test_the_formats_in_the_help_of_serve_and_in_the_docs_are_those_of_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    table = importlib.import_module("format_table").page()
    for one in BUILT_IN:
        assert all(f"`{ending}`" in table for ending in one.endings)
        assert one.facts is not None, one.name
        assert all(one.facts)
        assert f"| {one.name} | {' | '.join(one.facts)} |\n" in table
    endings = [ending for one in BUILT_IN if not one.needs_module for ending in one.endings]
    said = " ".join((inspect.getdoc(serve.callback) or "").split())
    assert f"FILE is a data file ({', '.join(endings)})" in said


def test_the_bounds_that_the_table_of_formats_names_are_those_of_the_code() -> None:
    said = {one.name: one.facts.bounds for one in BUILT_IN if one.facts is not None}
    assert {name: words for name, words in said.items() if f"{bounds.AT_ONCE >> 30} GiB" in words}.keys() == {
        *("HDF5", "NumPy", "Parquet", "tar (WebDataset)", "TFRecord", "Zarr", "MATLAB", "MDS", "LMDB")
    }
    assert f"{MOST_BYTES >> 30} GiB" in said["CSV"]
    assert f"{matlab.HELD >> 30} GiB a file before" in said["MATLAB"]
    assert f"{json_lines.MOST_LINE >> 20} MiB" in said["JSON lines"]
    assert f"{pixels.MOST_PIXELS // 1_000_000} million" in said["folder of images"]


def test_formats_that_say_that_they_read_no_urls_refuse_them() -> None:
    for one in BUILT_IN:
        if one.facts is not None and one.facts.remote == "no":
            with pytest.raises((OSError, ValueError, ImportError), match="memory://x"):
                source: Any = one.source("memory://x", "*") if one.needs_leaves() else one.source("memory://x")
                source.splits() if isinstance(source, Source) else len(source)
