"""In which order, and in which process of pytest-xdist, `make test` runs the files of tests. It changes only the time.

The longest files begin, so that all processes end at about the same time. By itself pytest-xdist would begin with the
files that have the most tests, which are quick ones. (`make test` gives --no-loadscope-reorder.) One process prefers
the files that need TensorFlow, and the others avoid them while there are others, as importing it takes each process
10 s of CPU: for itself, and for the process from which trainers are forked.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
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
        def _assign_work_unit(self, node: Any) -> None:
            first = node is self.nodes[0]
            for file in self.workqueue:
                if _needs_tensorflow(config.rootpath / file) is first:
                    self.workqueue.move_to_end(file, last=False)
                    break
            super()._assign_work_unit(node)

    assert hasattr(LoadFileScheduling, "_assign_work_unit"), "this version of pytest-xdist has another way"
    return Scheduling(config, log)


@cache
def _needs_tensorflow(file: Path) -> bool:
    """Whether the tests in this file have the fixture `tf` or `start_trainer`."""
    return re.search(r'\b(tf|start_trainer): |usefixtures\("tf"\)', file.read_text()) is not None
