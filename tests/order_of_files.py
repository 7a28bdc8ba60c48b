"""The order in which `make test` runs the test files, and their pytest-xdist processes. Both affect only the time.

The longest files come first, so that all processes end at about the same time. By default pytest-xdist starts with the
files that have the most tests, and these tests are quick. (So `make test` gives --no-loadscope-reorder.) One process
runs all the files that need TensorFlow, and begins with them. To import it, for itself and for the process that forks
trainers, a process needs 15 s of CPU. A process that finds no other file ends early.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

LONGEST = """
    test_recovery test_check test_coordinator test_attacks test_client_keras test_variable_batches test_ranks
    test_chaos_scenarios test_keras_datasets test_cache test_shutdown test_mix test_descriptors test_fork_server
    test_profile test_ranks_rounds test_in_process test_zip test_feeding test_stream_hashes
""".split()
"""The files that take more than 10 s of CPU, longest first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _reschedule(self, node: Any) -> None:
            if self.workqueue and node is not self.nodes[0] and all(map(needs_tensorflow, self.workqueue)):
                if not node.shutting_down:
                    node.shutdown()
            else:
                super()._reschedule(node)

        def _assign_work_unit(self, node: Any) -> None:
            first = node is self.nodes[0]
            for file in self.workqueue:
                if needs_tensorflow(file) is first:
                    self.workqueue.move_to_end(file, last=False)
                    break
            super()._assign_work_unit(node)

    @cache
    def needs_tensorflow(file: str) -> bool:
        """Return whether tests in this file use the fixture `tf` or `start_trainer`."""
        found = re.search(r'\b(tf|start_trainer): |usefixtures\("tf"\)', (config.rootpath / file).read_text())
        return found is not None

    for name in ("_reschedule", "_assign_work_unit"):
        assert hasattr(LoadFileScheduling, name), "this version of pytest-xdist assigns work in another way"
    return Scheduling(config, log)
