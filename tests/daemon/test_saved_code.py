"""Workers import the code as it was when their daemon started, whatever happens to the files."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import penstock
from penstock_server.targets import pickled, saved_sources
from penstock_server.targets.sources import Sources, loaded_files
from penstock_server.to_daemon import control
from tests.conftest import Join, Serve, wait_until

FEED = """
    from penstock_server import Feed
    from package import helper

    def numbers(split):
        for _ in range(10):
            yield helper.VALUE

    feed = Feed(numbers, splits=range(10), batch_size=1, turn=1, samples=100)
"""

SCRIPT = """
    import os
    import sys
    from pathlib import Path

    import helper
    import penstock
    from penstock_server import Feed

    def main():
        def numbers(split):
            for i in range(10):
                if i == 5 and not os.path.exists("died"):
                    Path("died").touch()
                    Path(helper.__file__).write_text("VALUE = 2")
                    os._exit(1)
                yield helper.VALUE

        with penstock.connect(Feed(numbers, splits=range(3), batch_size=1, samples=30), workers=1) as connection:
            print(*{batch.item() for batch in connection.batches()}, Path("died").exists())

    if __name__ == "__main__":
        main()
"""


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test keeps in this process ends with it."""
    monkeypatch.setattr(saved_sources, "_saved", {})
    monkeypatch.setattr(saved_sources, "_fd", None)
    monkeypatch.setenv(saved_sources.VARIABLE, "")
    monkeypatch.delenv(saved_sources.VARIABLE)
    yield
    if saved_sources._fd is not None:
        os.close(saved_sources._fd)


def write(folder: Path, value: str) -> None:
    (folder / "package").mkdir(parents=True, exist_ok=True)
    (folder / "package" / "helper.py").write_text(f"VALUE = {value}\n")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def test_workers_that_start_after_an_edit_make_the_samples_of_the_others(serve: Serve, tmp_path: Path) -> None:
    write(tmp_path / "daemon0", "1")
    daemon = serve(FEED, workers=1)
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        values = [next(batches).item()]
        write(daemon.folder, "2")
        (daemon.folder / "feeds.py").write_text("broken(")
        control.scale(daemon.url, 3, now=False, timeout=60)
        wait_until(lambda: len(daemon.workers()) == 3)
        for worker in daemon.workers():
            worker.kill()
        wait_until(lambda: daemon.stderr().count("is ready") >= 4)
        values += [batch.item() for batch in batches]
        assert values == [1] * 100
        assert {batch.item() for batch in connection.batches()} == {1}
    assert "differ" not in daemon.stderr()


def test_a_pickled_feed_has_the_modules_of_its_trainer(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "helper.py").write_text("VALUE = 1")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    run = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.stdout == "1 True\n", run.stderr


def test_a_host_has_the_code_with_which_its_head_starts(serve: Serve, join: Join) -> None:
    old = textwrap.dedent(FEED).replace("from package import helper", "class helper: VALUE = 1")
    new = old.replace("VALUE = 1", "VALUE = 2")
    head = serve(old, workers=0, bind=f"tcp://127.0.0.1:{free_port()}")
    host = join(head, workers=1, working=False)
    with penstock.connect(head.url) as connection:
        batches = connection.batches()
        values = [next(batches).item()]
        (head.folder / "feeds.py").write_text(new)
        for worker in host.workers():
            worker.kill()
        values += [batch.item() for batch in batches]
    assert values == [1] * 100

    (head.folder / "feeds.py").write_text(old)
    ready = host.log().count("is ready")
    head.stop(signal.SIGKILL)
    wait_until(lambda: host.log().count("is ready") > ready, said=host.log)
    (head.folder / "feeds.py").write_text(new)  # after its workers have imported the old code
    head = serve(new, workers=0, bind=head.url.rpartition("/")[0])
    with penstock.connect(head.url) as connection:
        assert {batch.item() for batch in connection.batches()} == {2}
    assert "the code has changed: workers start again" in host.log()


def test_imports_are_followed_through_packages_and_the_python_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "own/pkg/__init__.py": "",
        "own/pkg/values.py": "from . import large",
        "own/pkg/sub/__init__.py": "",
        "own/pkg/sub/feeds.py": "from ..values import *\ndef late():\n    import elsewhere.deep, penstock, numpy",
        "own/unused.py": "",
        "own/pkg/large.py": "import unused\nTABLE = 0" + " " * (1 << 20),
        "other/elsewhere/deep.py": "from . import sibling",
        "other/elsewhere/sibling.py": "",
        "other/pkg/values.py": "",  # own/pkg comes first
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "other")
    monkeypatch.syspath_prepend("/proc/1/cwd" if os.getuid() else tmp_path / ("x" * 300))  # nobody can look there
    saved = Sources([f"{tmp_path}/own/pkg/sub/feeds.py:feed"]).texts()
    assert {str(path.relative_to(tmp_path)) for path in saved} == {*texts} - {"own/unused.py", "other/pkg/values.py"}


def test_the_files_of_a_pickled_feed_are_those_that_the_trainer_has_loaded() -> None:
    files = {os.fsdecode(file) for file in loaded_files()}
    assert __file__ in files
    assert os.__file__ not in files
    assert pytest.__file__ not in files
    assert penstock.__file__ not in files
    assert Path(__file__) in Sources([pickled.target_for("feed")], loaded_files()).texts()


def test_workers_import_what_was_kept_and_not_what_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_all(value: int) -> None:
        for name in ("feeds.py", "one/__init__.py", "one/two.py", "space/three.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"VALUE = {value}\n")
        (tmp_path / "one" / "__init__.py").write_text("")
        text = "import near, one.two, space.three\ndef late():\n    import later\n    return later.VALUE\n"
        (tmp_path / "feeds.py").write_text(f"{text}VALUE = {value}\n")
        (tmp_path / "later.py").write_text(f"VALUE = {value}\n")
        (tmp_path / "lib").mkdir(exist_ok=True)
        (tmp_path / "lib" / "near.py").write_text(f"VALUE = {value}\n")

    write_all(1)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "."], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("./lib")
    saved_sources.keep({})
    saved_sources.keep(Sources([f"{tmp_path}/feeds.py:feed"]).texts())
    write_all(2)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-f", "."], cwd=tmp_path, check=True)
    (tmp_path / "one" / "two.py").unlink()
    code = """
        import os
        import sys
        sys.path.insert(0, "./lib")
        from penstock_server.targets import importing, place, saved_sources
        saved_sources.use()
        module = importing._load(place.place_of("feeds.py:feed"))
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir("../gone")
        print(module.VALUE, module.one.two.VALUE, module.space.three.VALUE, module.late(), module.near.VALUE)
        print(module.near.__file__)
        print(saved_sources.VARIABLE in os.environ)
        try:
            exec("import absent")
        except ModuleNotFoundError:
            print("absent")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == f"1 1 1 1 1\n{tmp_path}/./lib/near.py\nFalse\nabsent\n", run.stderr


def test_compiled_modules_and_archives_are_found_where_python_would_find_them(tmp_path: Path) -> None:
    lib, archive = tmp_path / "lib", tmp_path / "early.zip"
    (lib / "fast").mkdir(parents=True)
    for name in ("fast/__init__.py", "both.py", "zipped.py", "plain.py"):
        (lib / name).write_text("")
    for name in ("fast/fast", "both"):
        (lib / f"{name}{EXTENSION_SUFFIXES[-1]}").write_text("")
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("zipped.py", "")
    saved_sources.keep({file: file.read_bytes() for file in lib.rglob("*.py")})
    code = f"""
        import importlib.util, sys
        sys.path[:0] = [{str(archive)!r}, {str(lib)!r}]
        from penstock_server.targets import saved_sources
        saved_sources.use()
        for name in ("plain", "fast", "both", "zipped"):
            print(importlib.util.find_spec(name).origin)
        sys.path.insert(0, {str(lib / "fast")!r})  # as OpenCV does
        print(importlib.util.find_spec("fast").origin)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    suffix = EXTENSION_SUFFIXES[-1]
    found = [lib / "plain.py", lib / "fast/__init__.py", lib / f"both{suffix}", archive / "zipped.py"]
    assert run.stdout.split() == [str(file) for file in (*found, lib / f"fast/fast{suffix}")], run.stderr


def test_files_that_are_made_later_or_gone_do_not_change_what_is_imported(tmp_path: Path) -> None:
    early, lib = tmp_path / "early", tmp_path / "lib"
    early.mkdir()
    for name in ("alone", "both", "far", "space/inner/deep", "other/inner"):
        (lib / name).parent.mkdir(parents=True, exist_ok=True)
        (lib / f"{name}.py").write_text("VALUE = 1\n")
    saved_sources.keep({file: file.read_bytes() for file in lib.rglob("*.py")})
    time.sleep(0.05)  # the clock of files is coarse
    for file in (lib / "alone/__init__.py", lib / "both/__init__.py", early / "far.py", early / "new.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("VALUE = 2\n")
    (lib / "alone.py").unlink()
    (lib / "other.py").write_text("VALUE = 2\n")
    shutil.rmtree(lib / "space")
    code = f"""
        import sys
        sys.path[:0] = [{str(early)!r}, {str(lib)!r}]
        from penstock_server.targets import saved_sources
        saved_sources.use()
        import alone, both, far, new, other.inner, space.inner.deep
        print(alone.VALUE, both.VALUE, far.VALUE, other.inner.VALUE, space.inner.deep.VALUE, new.VALUE)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "1 1 1 1 1 2\n", run.stderr
