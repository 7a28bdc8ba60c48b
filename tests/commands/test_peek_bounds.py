"""`penstock peek` ends within its bounds of memory and time, whatever a file asks for, and says where it was."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result

from penstock_command import main
from penstock_server.peeking.files import data_files
from penstock_server.peeking.files.bounded import Bounds, EndedError, run
from penstock_server.sources.npy.format import Numpy
from penstock_server.sources.npy.reader import NumpyRows

UNBOUNDED = Bounds(64 << 20, None, None)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def peek(*words: str) -> Result:
    found = CliRunner().invoke(main, ["peek", *words])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.output
    assert "Traceback" not in found.output
    return found


def spin(*_: Any) -> Any:
    while True:
        pass


def test_what_a_child_reports_before_it_is_ended_arrives() -> None:
    def works(report: Callable[[Any], None]) -> None:
        report("first")
        spin()

    reports = run(works, Bounds(64 << 20, cpu=0.2, wall=None))
    assert next(reports) == "first"
    with pytest.raises(EndedError, match=r"took more than 0.2 s of CPU time"):
        next(reports)


def test_a_child_that_waits_for_ever_is_ended() -> None:
    with pytest.raises(EndedError, match=r"took more than 0.3 s"):
        list(run(lambda report: time.sleep(1000), Bounds(64 << 20, cpu=None, wall=0.3)))


def test_a_child_that_a_signal_ends_is_told_by_its_name() -> None:
    with pytest.raises(EndedError, match=r"ended its process by SIGKILL"):
        list(run(lambda report: os.kill(os.getpid(), signal.SIGKILL), UNBOUNDED))


def test_a_child_gets_no_more_memory_than_its_bound() -> None:
    def works(report: Callable[[Any], None]) -> None:
        report(len(bytearray(32 << 20)))
        try:
            bytearray(4 << 30)  # more than this process may have to reuse
        except MemoryError:
            report("no more")

    assert list(run(works, UNBOUNDED)) == [32 << 20, "no more"]


def test_a_child_whose_parent_gives_up_is_ended() -> None:
    reports = run(lambda report: report(os.getpid()) or spin(), UNBOUNDED)  # type: ignore[func-returns-value]
    pid = next(reports)
    reports.close()  # type: ignore[attr-defined]
    assert not os.path.exists(f"/proc/{pid}")


def test_a_row_that_needs_more_memory_is_named_with_the_bound_and_the_option() -> None:
    with h5py.File("rows.h5", "w") as file:
        file.create_dataset("x", (4, 256 << 20), "u1")  # 1 KB: never written. More than this process may have to reuse
    found = peek("rows.h5", "--memory", "40M", "--samples", "4")
    assert found.exit_code == 1
    assert "rows.h5 rows 0 to 0: reading it needs more than 40.0 MiB of memory" in found.output
    assert "allow more, such as --memory 4G" in found.output
    assert peek("rows.h5", "--memory", "1G", "--samples", "1").exit_code == 0


def test_a_file_that_is_never_described_is_named_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("x.npy", np.arange(100))
    monkeypatch.setattr(data_files, "BOUNDS", Bounds(256 << 20, cpu=0.2, wall=None))
    monkeypatch.setattr(Numpy, "describe", spin)
    found = peek("x.npy")
    assert found.exit_code == 1
    assert "x.npy: reading it took more than 0.2 s of CPU time, and was stopped" in found.output
    assert "--samples 256 lets it take as long as it needs" in found.output


def test_the_samples_before_one_that_takes_too_long_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("x.npy", np.arange(100))

    def read(self: NumpyRows, split: Any) -> Iterator[int]:
        yield 123
        spin()

    monkeypatch.setattr(data_files, "BOUNDS", Bounds(256 << 20, cpu=0.5, wall=None))
    monkeypatch.setattr(NumpyRows, "__call__", read)
    found = peek("x.npy")
    assert found.exit_code == 1
    assert "always 123" in found.output
    assert re.search(r"after 1 sample: x.npy rows 0 to \d+: reading it took more than 0.5 s of CPU time", found.output)


def test_any_error_of_a_library_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("x.npy", np.arange(100))

    def read(self: NumpyRows, split: Any) -> Iterator[int]:
        raise RuntimeError("password required")
        yield 0

    monkeypatch.setattr(NumpyRows, "__call__", read)
    found = peek("x.npy")
    assert found.exit_code == 1
    assert re.search(r"x.npy rows 0 to \d+: it cannot be read \(RuntimeError: password required\)", found.output)
