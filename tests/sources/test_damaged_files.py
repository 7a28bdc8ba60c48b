"""Whatever a file contains, looking into it and serving it end with samples or with an error that names it."""

from __future__ import annotations

import random
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock_server.peeking.files.bounded import Bounds, EndedError, run
from penstock_server.peeking.files.sampling import feed_of, splits_of, spread
from penstock_server.sources import registry
from tests.sources.damaged_files import Seed, damaged, seeds

_MEMORY = 256 << 20
_SECONDS = 10.0
"""The most CPU time that one of these small files may take."""

_NAMED = (OSError, ValueError, LookupError, TypeError, MemoryError)


def problem(path: Path) -> str:
    """Read a file as `peek` and a worker do. Return what was wrong about the error, if there was one."""
    file = str(path)
    began = time.process_time()
    try:
        format = registry.by_ending(file)
        assert format is not None
        description = format.describe(file)
        if description.columns:
            feed = feed_of(format, description, file)
            for _ in spread(feed, splits_of(feed)[:100], 100_000, lambda split: None):
                if time.process_time() - began > _SECONDS:
                    return f"took more than {_SECONDS} s"
    except _NAMED as error:
        if file not in str(error):
            return f"{_where(error)}: the error does not name the file: {error}"
    except BaseException as error:
        return f"{_where(error)}: {error}"
    return "" if time.process_time() - began < _SECONDS else f"took more than {_SECONDS} s"


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno}"


def problems(seed: Seed, folder: Path, numbers: range, seconds: float) -> dict[str, tuple[int, str]]:
    """Return the problems of damaged files, and for each the number from which the first such file was drawn, and all
    that was said."""
    path = folder / f"damaged {seed.name}"
    found: dict[str, tuple[int, str]] = {}
    until = time.monotonic() + seconds

    def work(report: Callable[[Any], None]) -> None:
        for number in numbers:
            path.write_bytes(damaged(seed, random.Random(f"{seed.name} {number}")))
            report(number)
            if why := problem(path):
                report(why)
            if time.monotonic() > until:
                return

    last = -1
    try:
        for report in run(work, Bounds(_MEMORY, None, seconds + 20)):
            if isinstance(report, int):
                last = report
            else:
                found.setdefault(re.sub(r"[0-9]{2,}|'.*", "N", report)[:200], (last, report))
    except EndedError as error:
        if not (seed.name.endswith(".parquet") and "SIGABRT" in str(error)):  # pyarrow ends its process so
            found[f"reading it {error}"] = (last, str(error))
        left = until - time.monotonic()
        if left > 0:
            found |= problems(seed, folder, numbers[numbers.index(last) + 1 :], left)
    return found


def formats(folder: Path) -> dict[str, list[Seed]]:
    """Return the seeds of each format, by its name."""
    found: dict[str, list[Seed]] = {}
    for seed in seeds(folder):
        format = registry.by_ending(seed.name)
        assert format is not None
        found.setdefault(format.name, []).append(seed)
    return found


@pytest.mark.parametrize("name", ["TFRecord", "tar (WebDataset)"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    for seed in formats(tmp_path)[name]:
        assert problems(seed, tmp_path, range(20), 100) == {}, seed.name
        (tmp_path / seed.name).write_bytes(b"")
        assert problem(tmp_path / seed.name) == ""


_CRASH = {
    "HDF5": "libhdf5 never finishes reading some damaged texts",
    "MATLAB": "scipy ends its process at some damaged types (SIGBUS, SIGSEGV)",
}
"""What libraries do that nobody can catch. `peek` reads in a child process, and a daemon in workers."""


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            format.name,
            marks=pytest.mark.xfail(reason=_CRASH[format.name], strict=False) if format.name in _CRASH else (),
        )
        for format in registry.BUILT_IN
        if format.endings and format.name not in ("Zarr", "LMDB")  # a folder of files; memory that is trusted
    ],
)
def test_fuzz_damaged_files(tmp_path: Path, request: pytest.FixtureRequest, name: str) -> None:
    seconds, first = request.config.getoption("--fuzz-seconds"), request.config.getoption("--fuzz-seed")
    files = formats(tmp_path)[name]
    found = []
    for seed in files:
        now = problems(seed, tmp_path, range(first, 1 << 40), seconds / len(files))
        found += [f"{seed.name} {number}: {said}" for number, said in now.values()]
    assert not found, "\n".join(found)
