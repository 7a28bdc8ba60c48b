"""What messages say to install is what was installed, and another project named `penstock` is recognized."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock_proto import distribution

TREE = Path(__file__).resolve().parents[2]
OUR_COMMAND = "[console_scripts]\npenstock = penstock_command:main\n"

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make an environment with only the given distributions in it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])

    def install(name: str, command: str = OUR_COMMAND, **files: str) -> Path:
        place = folder / f"{name.replace('-', '_')}-1.5.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\nRequires-Dist: numpy>=2\n")
        (place / "entry_points.txt").write_text(command)
        for file, text in files.items():
            (place / file.replace("__", ".")).write_text(text)
        distribution._distribution.cache_clear()
        return folder

    yield install
    distribution._distribution.cache_clear()


def test_hints_name_the_distribution_under_whatever_name_it_is_installed(install: Install) -> None:
    install("penstock-of-ours")
    assert distribution.pip_install("server") == "pip install 'penstock-of-ours[server]'"
    assert (distribution.version(), distribution.requirements()) == ("1.5", ["numpy>=2"])
    assert distribution.other_project() == ""


@pytest.mark.parametrize("there", [True, False])
def test_hints_name_the_folder_that_it_was_installed_from_if_it_is_still_there(
    install: Install, tmp_path: Path, there: bool
) -> None:
    clone = tmp_path / "a clone"
    if there:
        clone.mkdir()
    install("penstock-of-ours", direct_url__json='{"url": "%s", "dir_info": {}}' % clone.as_uri())  # noqa: UP031
    assert distribution.pip_install("keys") == f"pip install '{clone if there else 'penstock-of-ours'}[keys]'"


def test_a_wheel_is_no_folder(install: Install, tmp_path: Path) -> None:
    install("penstock-of-ours", direct_url__json='{"url": "file:///tmp", "archive_info": {}}')
    assert distribution.pip_install("keys") == "pip install 'penstock-of-ours[keys]'"


def test_a_source_tree_on_the_path_is_named(install: Install) -> None:
    assert distribution.pip_install("keys") == "pip install '.[keys]' in Penstock's source tree"
    assert (distribution.version(), distribution.requirements()) == ("0+unknown", [])


@pytest.mark.parametrize("command", ["", "[console_scripts]\npenstock = penstock.cli:main\n"])
def test_another_project_of_the_name_is_told_apart(install: Install, command: str) -> None:
    install("penstock", command)
    assert "'.'" in distribution.other_project(), "ours is a source tree"
    folder = install("penstock-of-ours")
    said = distribution.other_project()
    assert said.startswith(f"the package 'penstock' 1.5 in {folder} is another project")
    assert said.endswith("pip uninstall penstock, and then pip install --force-reinstall --no-deps 'penstock-of-ours'")


def test_ours_under_the_short_name_is_ours(install: Install) -> None:
    install("penstock")
    assert distribution.other_project() == ""
    assert distribution.pip_install("server") == "pip install 'penstock[server]'"


def test_commands_and_feeds_say_that_the_other_project_lies_in_the_way(install: Install, tmp_path: Path) -> None:
    folder = install("penstock", "")
    (folder / "penstock").mkdir()
    (folder / "penstock/__init__.py").write_text("def trace(): pass\n")
    (tmp_path / "one.py").write_text("from penstock import Feed\n")
    (tmp_path / "two.py").write_text("import penstock\nfeed = penstock.Feed()\n")
    run = "from penstock_command import main; main"
    for code in (
        f"{run}(['top', 'tcp://127.0.0.1:1'])",
        f"{run}(['peek', 'one.py:feed'])",
        f"{run}(['serve', 'two.py:feed', '--bind', 'tcp://127.0.0.1:0'])",
    ):
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
        assert said.returncode == 1
        assert "run pip uninstall penstock" in said.stderr, said.stderr


def test_no_text_of_ours_installs_another_projects_package() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=TREE, capture_output=True, text=True)
    files = [TREE / name for name in listed.stdout.split()] or [*TREE.rglob("*.md"), *TREE.rglob("*.py")]
    named = re.compile(r"""(install\s[^\n]*|["'])penstock(\[|['"]?\s*[><=]=)""")
    found = [
        f"{file.relative_to(TREE)}: {match[0]}"
        for file in files
        if file.suffix in {".md", ".py", ".sh", ".yaml", ".yml", ".toml", ".txt", ".service", ""}
        and file != Path(__file__).resolve()
        and file.is_file()
        for match in named.finditer(file.read_text(errors="replace"))
    ]
    assert found == []


def test_the_version_is_that_of_the_distribution() -> None:
    assert penstock.__version__ == distribution.version() != "0+unknown"
    command = [os.path.join(os.path.dirname(sys.executable), "penstock"), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"penstock, version {penstock.__version__}\n"
