"""User modules see the trainer's world in every worker: `sys.argv`, `sys.path`, the working directory, the environment,
the options of Python, and the place of their own file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock_proto import StartError
from penstock_server import Feed
from penstock_server.machine.environment import DEFAULTS
from tests.conftest import Serve
from tests.processes.forked import children

LOOKS = """
    import json, os, sys, warnings
    from penstock_server import Feed

    SEEN = {
        "argv": sys.argv, "path": sys.path[:], "folder": os.getcwd(), "environment": dict(os.environ),
        "debug": __debug__, "warnings": sys.warnoptions, "utf8": sys.flags.utf8_mode, "B": sys.dont_write_bytecode,
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "file": __file__, "name": __name__, "spec": __spec__.name,
    }

    def rows(split):
        yield json.dumps(SEEN)

    feed = Feed(rows, splits=range(3), batch_size=1)
"""
TRAINER = """
    import json, os, sys
    import penstock

    if __name__ == "__main__":
        sys.path.append("/of/the/trainer")
        os.environ["OF_THE_TRAINER"] = "1"
        os.chdir("elsewhere")
        sys.argv.append("appended")
        for workers in (0, 2):
            with penstock.connect(os.path.join(FOLDER, "looks.py") + ":feed", workers=workers) as connection:
                print(*{str(batch[0], "utf-8") for batch in connection.batches()}, sep="\\n")
"""
OF_WORKERS = {*DEFAULTS, "PENSTOCK_ENVIRONMENT", "PENSTOCK_WORKER", "PYTHONHASHSEED", "PYTHONUNBUFFERED"}
"""Variables that workers have for themselves."""


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def train(folder: Path, *words: str | bytes, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run Python with these words; return what the feed has seen: one dict for each world."""
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **(env or {})}, capture_output=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("forks", [True, False])
def test_a_module_sees_the_same_in_workers_as_in_the_trainer(tmp_path: Path, forks: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path, looks=LOOKS, train=f"    FOLDER = {str(tmp_path)!r}\n{TRAINER}")
    env = {}
    if not forks:
        thread = "import threading, time\nthreading.Thread(target=time.sleep, args=[99], daemon=True).start()"
        write(tmp_path, started__in__sitecustomize=thread)
        env["PYTHONPATH"] = str(tmp_path / "started")
    words = ["-O", "-B", "-Wignore::ResourceWarning", "-Xutf8", "train.py", "--root", b"caf\xe9", "--fd", "x" * 100_000]
    seen = train(tmp_path, *words, env=env)
    mine, *others = seen
    assert others
    for theirs in others:
        for environment in (mine["environment"], theirs["environment"]):
            for name in OF_WORKERS:
                environment.pop(name, None)
        assert theirs == mine
    assert mine["argv"][1:3] == ["--root", "caf\udce9"]
    assert mine["argv"][-1] == "appended"
    assert "/of/the/trainer" in mine["path"]
    assert not mine["debug"]
    assert mine["folder"] == str(tmp_path / "elsewhere")
    assert mine["environment"]["OF_THE_TRAINER"] == "1"


def test_what_only_the_trainers_script_has_is_an_error_at_the_start_that_names_the_line(tmp_path: Path) -> None:
    uses = """
        from penstock_server import Feed
        from __main__ import VALUE
        feed = Feed([VALUE, VALUE], batch_size=1)
    """
    main = """
        import json
        VALUE = 7
        if __name__ == "__main__":
            import penstock
            try:
                penstock.connect("uses.py:feed", workers=1)
            except penstock.StartError as error:
                print(json.dumps(str(error)))
    """
    write(tmp_path, uses=uses, train=main)
    (error,) = train(tmp_path, "train.py")
    assert "workers do not run the trainer's script" in error
    assert 'uses.py", line 3, in <module>\n    from __main__ import VALUE' in error


PATHS = """
    import sys
    sys.path.insert(0, "library")
    import helpers
    from penstock_server import Feed

    def rows(split):
        import late
        yield helpers.VALUE + late.VALUE

    feed = Feed(rows, splits=range(2), batch_size=None)

    if __name__ == "__main__":
        import penstock
        for given in (feed, "train.py:feed", "helpers:feed"):
            with penstock.connect(given, workers=1) as connection:
                print(json.dumps({"sum": sum(map(int, connection.batches()))})) if (json := __import__("json")) else 0
"""


def test_workers_find_the_modules_that_the_trainer_finds(tmp_path: Path) -> None:
    other = """
        from penstock_server import Feed
        VALUE = 1
        feed = Feed(lambda split: iter([VALUE]), splits=range(2), batch_size=None)
    """
    write(tmp_path, train=PATHS, library__in__helpers=other, library__in__late="VALUE = 10")
    assert train(tmp_path, "train.py") == [{"sum": 22}, {"sum": 22}, {"sum": 2}]


def test_a_private_daemon_starts_again_in_the_world_in_which_the_feed_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, looks=LOOKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "first"])
    monkeypatch.setenv("OF_THE_TRAINER", "first")
    with penstock.connect("looks.py:feed", workers=1) as connection:
        seen = [json.loads(next(connection.batches())[0])]
        monkeypatch.chdir("/")
        monkeypatch.setattr(sys, "argv", ["train.py", "second"])
        monkeypatch.setenv("OF_THE_TRAINER", "second")
        (daemon,) = children()
        daemon.kill()
        seen += [json.loads(batch[0]) for batch in connection.batches()]
    assert {one["folder"] for one in seen} == {str(tmp_path)}
    assert {tuple(one["argv"]) for one in seen} == {("train.py", "first")}
    assert {one["environment"]["OF_THE_TRAINER"] for one in seen} == {"first"}


def test_under_serve_a_module_is_its_own_program_without_arguments(serve: Serve) -> None:
    daemon = serve(LOOKS)
    with penstock.connect(daemon.url) as connection:
        seen = [json.loads(batch[0]) for batch in connection.batches()]
    folder = os.path.dirname(seen[0]["file"])
    assert {tuple(one["argv"]) for one in seen} == {(f"{folder}/feeds.py",)}
    assert all(folder in one["path"] for one in seen)
    assert {one["main"] for one in seen} == {f"{folder}/feeds.py"}


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nROOT = sys.argv[1]",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('root')\np.parse_args()",
    ],
)
def test_a_module_that_needs_arguments_is_an_error_at_the_start_of_serve_that_names_the_line(
    serve: Serve, source: str
) -> None:
    daemon = serve(source, ready=False)
    assert daemon.process.wait(60) == 1
    line = source.count("\n") + 1
    assert f"feeds.py:{line} reads the command line" in daemon.stderr()


def test_a_module_that_cannot_read_the_trainers_command_line_is_an_error_that_names_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, feeds="import argparse\np = argparse.ArgumentParser()\np.parse_args()")
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    with pytest.raises(
        penstock.StartError, match=r"feeds\.py:3 reads the command line, but that is the command line of"
    ):
        penstock.connect(f"{tmp_path}/feeds.py:feed", workers=1)


RELATIVE = """
    from penstock_server import Feed
    from ..values import VALUE

    def rows(split):
        yield f"{VALUE} in {__name__}"

    feed = Feed(rows, splits=range(1), batch_size=None)
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("target", ["pkg/sub/feeds.py:feed", "{folder}/pkg/sub/feeds.py:feed", "pkg.sub.feeds:feed"])
def test_a_file_of_a_package_may_import_relatively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, target: str
) -> None:
    write(tmp_path, pkg__in____init__="", pkg__in__sub__in____init__="", pkg__in__values="VALUE = 7")
    write(tmp_path, pkg__in__sub__in__feeds=RELATIVE)
    monkeypatch.chdir(tmp_path if "{" not in target else "/")
    with penstock.connect(target.format(folder=tmp_path), workers=workers) as connection:
        assert list(connection.batches()) == [b"7 in pkg.sub.feeds"]


def test_relative_imports_outside_a_package_are_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path, bare__in__feeds="from .values import VALUE", bare__in__values="VALUE = 7")
    with pytest.raises(StartError, match=r"bare has no __init__\.py"):
        penstock.connect(f"{tmp_path}/bare/feeds.py:feed", workers=1)


def test_a_file_is_the_same_by_any_way_that_leads_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, real__in__ways=LOOKS, real__in__deep__in____init__="")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "farm").mkdir()
    (tmp_path / "farm" / "ways.py").symlink_to(tmp_path / "real" / "ways.py")
    (tmp_path / "down").symlink_to(tmp_path / "real" / "deep")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [f"{tmp_path}/real/deep/..", *sys.path])
    import ways  # type: ignore[import-not-found]

    try:
        for path in ("real/ways.py", "real/deep/../ways.py", "link/ways.py", "farm/ways.py", "down/../ways.py"):
            for workers in (0, 1):
                penstock.connect(f"{path}:feed", workers=workers).close()
        assert isinstance(ways.feed, Feed)
        penstock.connect(ways.feed, workers=1).close()
    finally:
        del sys.modules["ways"]


def test_a_daemon_serves_feeds_of_one_file_that_are_named_in_two_ways(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "daemon0").mkdir()
    (tmp_path / "daemon0" / "link.d").symlink_to(tmp_path / "daemon0")
    second = LOOKS + "    second = Feed(rows, splits=range(3), batch_size=1)\n"
    daemon = serve(second, words=("link.d/feeds.py:second",), ready=False)
    daemon.wait_ready(2)


def test_the_program_of_a_folder_may_define_a_feed(tmp_path: Path) -> None:
    source = """
        from penstock_server import Feed

        feed = Feed(lambda split: iter([split]), splits=range(2), batch_size=None)
        if __name__ == "__main__":
            import penstock
            with penstock.connect(feed, workers=1) as connection:
                print(sum(map(int, connection.batches())))
    """
    write(tmp_path, program__in____main__=source, program__in____init__="")
    assert train(tmp_path, "program") == [1]
    assert train(tmp_path, "-m", "program") == [1]
