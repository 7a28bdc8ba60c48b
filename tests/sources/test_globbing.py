"""The files and folders that match a pattern."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import pytest

from penstock_server.sources import files as fs
from penstock_server.sources.globbing import matching


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("data/run1/a.npy", "data/run2/a.npy", "data/run2/deep/b.npy", "data/.hidden/a.npy", "data/c[1].npy"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    [
        "data/*/a.npy",
        "data//*/*.npy",
        "./data/**/*.npy",
        "**",
        "**/",
        "data/**",
        "*/run[12]/?.npy",
        "data/.*/*",
        "no/*",
        "data/run[!1]/**/*.npy",
        "**/deep/*",
        "data/*/",
        "data/c[[]1].npy",
        "data/c[[]*/x",
        "{}/data/*/*.npy",
        "**/**/b*",
    ],
)
def test_names_are_those_of_glob(pattern: str, folder: Path) -> None:
    pattern = pattern.format(folder)
    assert matching(pattern) == sorted(set(glob.glob(pattern, recursive=True)))


def test_a_linked_folder_comes_once_and_not_in_circles(tmp_path: Path) -> None:
    os.symlink("run2", "data/latest")
    os.symlink(".", "data/self")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "d.npy").write_bytes(b"")
    os.symlink("../elsewhere", "data/linked")
    names = ["c[1].npy", "linked/d.npy", "run1/a.npy", "run2/a.npy", "run2/deep/b.npy"]
    assert fs.expand(["data/**/*.npy"]) == [f"data/{name}" for name in names]
    assert fs.expand(["data/latest/*.npy"]) == ["data/latest/a.npy"]


@pytest.mark.parametrize("pattern", ["data/*/a.npy", "data/*/*.npy", "data/**/*.npy"])
def test_a_folder_that_cannot_be_listed_is_an_error(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, real in (("scandir", os.scandir), ("lstat", os.lstat)):

        def refusing(path: Any, *args: Any, real: Any = real, **options: Any) -> Any:
            if "run2" in str(path):
                raise PermissionError(13, "Permission denied", path)
            return real(path, *args, **options)

        monkeypatch.setattr(os, name, refusing)
    with pytest.raises(
        PermissionError, match=r"data/run2 cannot be listed \(Permission denied\), so files may be miss"
    ):
        fs.expand([pattern])
