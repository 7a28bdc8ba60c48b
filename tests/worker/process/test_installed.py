"""Installed packages are told from the user's own modules, wherever pip has put them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock_server.targets.installed import is_installed


def put(folder: Path, *files: str) -> None:
    """Write files as `pip install --target` does, with the record of them, and beside them one of the user's."""
    record = [*files, "../../bin/tool", "__pycache__/single.cpython-311.pyc", "lib_one-1.0.dist-info/RECORD"]
    for name in (*files, "lib_one-1.0.dist-info/RECORD", "own.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "lib_one-1.0.dist-info" / "RECORD").write_text("".join(f"{name},sha256=x,1\n" for name in record))


def test_packages_in_a_folder_of_pip_are_installed_and_modules_beside_them_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "lib_one/__init__.py", "lib_one/part.py", "single.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("lib_one/__init__.py", "lib_one/part.py", "lib_one/made_later.py", "single.py"):
        assert is_installed(str(tmp_path / name)), name
    for name in ("", "own.py", "lib_one_of_mine/part.py", "__pycache__/own.cpython-311.pyc", "bin/tool.py"):
        assert not is_installed(str(tmp_path / name)), name


def test_a_folder_that_is_not_searched_has_no_installed_packages(tmp_path: Path) -> None:
    put(tmp_path, "lib_one/__init__.py")
    assert not is_installed(str(tmp_path / "lib_one" / "__init__.py"))


def test_a_place_that_cannot_be_read_has_no_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (str(tmp_path / ("x" * 300)), str(tmp_path / "absent"), __file__, ""):
        monkeypatch.setattr(sys, "path", [place, b"bytes", tmp_path])
        assert not is_installed(os.path.join(place, "lib_one", "__init__.py"))


def test_packages_in_the_environment_and_in_python_are_installed() -> None:
    assert is_installed(np.__file__)
    assert is_installed(os.__file__)
    assert not is_installed(__file__)


def test_packages_in_a_folder_of_pip_are_imported_once_for_all_workers(tmp_path: Path) -> None:
    put(tmp_path, "lib_one/__init__.py")
    (tmp_path / "scenes.py").write_text("import lib_one\n")
    code = "from penstock_server.worker.process.preload import preload; print(*preload(['scenes.py:feed']))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.split() == ["lib_one"], ran.stderr
