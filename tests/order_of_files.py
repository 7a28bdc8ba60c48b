"""The order in which `make test` runs the test files, and their pytest-xdist processes. Both affect only the time.

The longest files come first, so that all processes end at about the same time. By default pytest-xdist starts with the
files that have the most tests, and these tests are quick. (So `make test` gives --no-loadscope-reorder.) One process
runs all the tests that need TensorFlow, and begins with them. To import it, for itself and for the process that forks
trainers, a process needs 15 s of CPU. The other tests of a file stay together, in any process. A process that finds
none of them left ends early.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LONGEST = """
    test_keras_backends test_keras_datasets test_neighbours test_golden test_keras_fit test_recovery test_check
    test_keras_resume test_coordinator test_own_format test_in_process test_stream_hashes test_own_connection
    test_import_randomness test_deploying test_factory test_helpers test_world test_segments test_join test_commands
    test_blocks test_indexables test_supervisor test_shutdown test_mixed_lanes test_lanes test_tensorflow test_reload
    test_network test_keys test_client_hostile test_variable_batches test_mix test_simulated_hosts test_tutorial
    test_client_keras test_coordinator_rare test_spot_checks test_lending test_waiting test_zip test_collate
    test_groups test_profile test_cache test_ranks test_page test_notebook test_hosts_network test_descriptors
    test_auto_workers test_attacks test_feeding test_chaos_scenarios test_deploying_hosts test_documentation
    test_fork_server test_worker_process test_transform test_object_stores
""".split()
"""The files that take more than 20 s, longest first."""

LAST = "test_recipes test_other_datasets test_from_arrow test_tables".split()
"""They import large libraries, which change what others do in the same process: dill extends pickle, for one."""

TENSORFLOW = " with TensorFlow"
"""What ends the names of the groups of tests that need it."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONGEST)}
        places |= {name: len(places) + 1 for name in LAST}
        items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file, *_, test = nodeid.split("::")
            return file + TENSORFLOW * (test.partition("[")[0] in needing_tensorflow(config.rootpath / file))

        def _reschedule(self, node: Any) -> None:
            if self.workqueue and node is not self.nodes[0] and all(map(needs_tensorflow, self.workqueue)):
                if not node.shutting_down:
                    node.shutdown()
            else:
                super()._reschedule(node)

        def _assign_work_unit(self, node: Any) -> None:
            first = node is self.nodes[0]
            for scope in self.workqueue:
                if needs_tensorflow(scope) is first:
                    self.workqueue.move_to_end(scope, last=False)
                    break
            super()._assign_work_unit(node)

    def needs_tensorflow(scope: str) -> bool:
        return scope.endswith(TENSORFLOW)

    for name in ("_split_scope", "_reschedule", "_assign_work_unit"):
        assert hasattr(LoadFileScheduling, name), "this version of pytest-xdist assigns work in another way"
    return Scheduling(config, log)


@cache
def needing_tensorflow(file: Path) -> set[str]:
    """Return the names of the functions in this file that need TensorFlow: through the fixture `tf`, `start_trainer` or
    `keras_launcher`, or through a fixture of the file that needs one of these."""
    functions: list[tuple[str, set[str]]] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):  # its usefixtures are those of its tests
            tests = [test for test in node.body if isinstance(test, ast.FunctionDef)]
            functions += [(test.name, _fixtures_used(node)) for test in tests]
        elif isinstance(node, ast.FunctionDef):
            functions.append((node.name, {argument.arg for argument in node.args.args} | _fixtures_used(node)))
    found = {"tf", "start_trainer", "keras_launcher"}
    while more := {name for name, uses in functions if uses & found} - found:
        found |= more
    return found


def _fixtures_used(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """Return the names in the `usefixtures` of a test or class."""
    marks = [mark for mark in node.decorator_list if isinstance(mark, ast.Call) and "usefixtures" in ast.unparse(mark)]
    return {str(name.value) for mark in marks for name in mark.args if isinstance(name, ast.Constant)}
