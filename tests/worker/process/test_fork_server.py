"""The fork server imports some libraries for all workers, and leaves others to each worker. Its death ends no
stream."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock
from penstock_server.to_daemon import control
from penstock_server.worker.process.definitions import only_defines
from penstock_server.worker.process.preload import ImportFailed, preload
from penstock_server.worker_state.start_arguments import StartArguments
from penstock_server.workers.fork_server import ForkServer
from tests.conftest import Daemon, Serve

FEED = """
from penstock_server import Feed
def numbers(split):
    yield {value}
feed = Feed(numbers, splits=range(200), batch_size=1)
"""


def installed(folder: Path, **packages: str) -> str:
    """Write packages that count as installed, and return the PYTHONPATH for them. Each package notes the processes that
    import it."""
    site = folder / "site-packages"
    site.mkdir(exist_ok=True)
    for name, body in packages.items():
        note = f"import os\nwith open({str(folder / name)!r}, 'a') as notes: print(os.getpid(), file=notes)\n"
        (site / f"{name}.py").write_text(note + textwrap.dedent(body))
    return os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])


def importers(folder: Path, name: str) -> list[int]:
    """Return the processes that imported a package."""
    return [int(line) for line in (folder / name).read_text().split()]


def fork_server(daemon: Daemon) -> psutil.Process:
    """Return the daemon's fork server."""
    children = psutil.Process(daemon.process.pid).children()
    (found,) = [child for child in children if child.name() == "penstock-forks"]
    return found


def forked(daemon: Daemon) -> bool:
    """Return whether the fork server started all workers."""
    server = fork_server(daemon).pid
    return all(worker.ppid() == server for worker in daemon.workers())


def read(daemon: Daemon) -> list[float]:
    with penstock.connect(daemon.url) as connection:
        return [float(batch[0]) for batch in connection.batches()]


@pytest.fixture
def start(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Daemon]:
    """`start(top, value=..., workers=..., lib=..., ...)` serves a module that begins with `top`. Other keywords are
    installed packages."""

    def serving(top: str, value: str = "split", workers: int = 2, **packages: str) -> Daemon:
        monkeypatch.setenv("PYTHONPATH", installed(tmp_path, **packages))
        daemon = serve(textwrap.dedent(top) + FEED.format(value=value), workers=workers)
        until(lambda: all(worker.ready for worker in control.status(daemon.url, 60).workers))
        return daemon

    return serving


def test_libraries_are_imported_once_and_the_users_module_by_each_worker(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    daemon = start(
        f"""
        "A feed."
        from __future__ import annotations
        import os, lib
        with open({str(ran)!r}, "a") as notes: print(os.getpid(), file=notes)
        """,
        workers=3,
        lib="",
    )
    assert sorted(read(daemon)) == list(range(200))
    assert forked(daemon)
    workers = {worker.pid for worker in daemon.workers()}
    assert len(workers) == 3
    assert importers(tmp_path, "lib") == [fork_server(daemon).pid]
    assert {int(pid) for pid in ran.read_text().split()} == workers
    assert re.search(r"imported once for all workers, in \d\.\d\d s: lib$", daemon.stderr(), re.MULTILINE)


def test_what_a_library_prints_is_printed_once(start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    talks = """
    import ctypes, signal
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("from Python")
    ctypes.CDLL(None).printf(b"from C\\n")
    """
    daemon = start("import lib\n", workers=3, lib=talks)
    daemon.workers()[0].kill()
    until(lambda: "was killed by SIGKILL" in daemon.stderr())
    assert daemon.stop() == 0
    assert daemon.stderr().count("from Python") == 1
    assert daemon.stderr().count("from C") == 1


def test_what_comes_behind_another_statement_is_imported_by_each_worker(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start(
        'import first, os\nos.environ["LIB"] = str(7)\nimport lib\n',
        value="lib.SETTING",
        first="",
        lib='SETTING = float(os.environ["LIB"])',
    )
    assert set(read(daemon)) == {7.0}
    assert importers(tmp_path, "first") == [fork_server(daemon).pid]
    assert sorted(importers(tmp_path, "lib")) == sorted(worker.pid for worker in daemon.workers())


def test_a_library_after_a_plain_variable_is_imported_once(start: Callable[..., Daemon], tmp_path: Path) -> None:
    top = 'import os, bad\nos.environ["LIB"] = "7"\nimport lib\n'
    bad = 'import os, threading, time\nassert "LIB" not in os.environ\n'
    bad += "threading.Thread(target=time.sleep, args=[3600], daemon=True).start()"
    daemon = start(top, value="lib.SETTING", bad=bad, lib='import os\nSETTING = float(os.environ["LIB"])')
    assert set(read(daemon)) == {7.0}
    assert importers(tmp_path, "lib")[-1:] == [fork_server(daemon).pid]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=[3600], daemon=True).start()",
            "starts threads",
        ),
        ("data = open(__file__)", "opens /"),
        ("import mmap\ndata = mmap.mmap(-1, 4096)", "opens shared memory"),
        ("import random, time\ndata = random.Random(time.time_ns())", "keeps random numbers"),
        (
            "import os\nif not os.path.exists(once := __file__ + '.once'):\n    open(once, 'x').close()\n    1 / 0",
            "raises",
        ),
    ],
)
def test_a_library_that_forks_would_share_is_left_to_each_worker(
    start: Callable[..., Daemon], tmp_path: Path, body: str, why: str
) -> None:
    daemon = start("import first, bad, last\n", first="", bad=body, last="")
    assert sorted(read(daemon)) == list(range(200))
    assert forked(daemon)
    server, workers = fork_server(daemon).pid, sorted(worker.pid for worker in daemon.workers())
    assert importers(tmp_path, "first") == [server, server], "the fork server began again"
    assert importers(tmp_path, "bad")[0] == server
    assert sorted(importers(tmp_path, "bad")[1:]) == workers
    assert importers(tmp_path, "last") == [server]
    assert f"imported by each worker separately: bad (its import {why}" in daemon.stderr()


def test_pyarrow_is_imported_once_although_jemalloc_starts_a_thread(start: Callable[..., Daemon]) -> None:
    top = "import pyarrow as pa, pyarrow.compute as pc\n"
    daemon = start(top, value="pc.sum(pc.sort_indices(pa.array(range(100_000)))).as_py()")
    assert set(read(daemon)) == {sum(range(100_000))}
    assert forked(daemon)
    assert re.search(r"imported once for all workers, in .*: .*pyarrow", daemon.stderr())
    assert "separately" not in daemon.stderr()


KEEPS_RANDOMNESS = {
    "numpy_generator": ("import numpy as np\nRNG = np.random.default_rng()", "RNG.random()"),
    "of_a_class": ("import numpy as np\nclass Flip:\n    states = [np.random.RandomState()]", "Flip.states[0].rand()"),
    "of_an_object": (
        "import numpy as np\nclass Augmenter:\n    def __init__(self): self.inner = {'rng': np.random.default_rng()}\n"
        "augment = Augmenter()",
        "augment.inner['rng'].random()",
    ),
    "by_clock": ("import random, time\nRNG = random.Random(time.time_ns())", "RNG.random()"),
    "seeds": (
        "import numpy as np\nSEEDS = np.random.SeedSequence()",
        "__import__('numpy').random.default_rng(SEEDS.spawn(1)[0]).random()",
    ),
    "a_salt": (
        "import secrets, random\nSALT = secrets.token_hex(8)\ncalls = []",
        "random.Random(f'{SALT} {calls.append(0) or len(calls)}').random()",
    ),
    "an_id": ("import uuid\nID = uuid.uuid4()\ncalls = []", "hash((ID.int, calls.append(0) or len(calls))) / 2**61"),
    "plain": ("import random\nRNGS = [random.Random()]\nRNGS[0].random()", "RNGS[0].random()"),
}
"""Libraries with random numbers of their own since their import, and an expression that draws from them."""


def test_forked_workers_never_repeat_the_random_numbers_that_a_library_keeps_from_its_import(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    libraries = {name: f"{body}\ndef draw():\n    return {draw}\n" for name, (body, draw) in KEEPS_RANDOMNESS.items()}
    value = f"np.array([m.draw() for m in ({', '.join(libraries)})])"
    daemon = start(f"import numpy as np\nimport {', '.join(libraries)}\n", value=value, workers=3, **libraries)
    assert forked(daemon)
    with penstock.connect(daemon.url) as connection:
        drawn = [batch[0].tolist() for batch in connection.batches()]
    repeated = {name: 200 - len(set(column)) for name, column in zip(libraries, zip(*drawn, strict=True), strict=True)}
    assert repeated == dict.fromkeys(libraries, 0)
    server = fork_server(daemon).pid
    assert {name for name in libraries if set(importers(tmp_path, name)) == {server}} == {"plain"}


def test_a_library_that_cannot_be_imported_is_the_workers_error(tmp_path: Path) -> None:
    path = installed(tmp_path, broken="raise RuntimeError('no such device')")
    (tmp_path / "feeds.py").write_text("import broken\n" + FEED.format(value=1))
    command = [sys.executable, "-m", "penstock_server", "serve", "feeds:feed", "--bind", "tcp://127.0.0.1:0"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0
    assert "importing feeds raised RuntimeError: no such device" in ended.stderr
    assert "line 1, in <module>\n    import broken" in ended.stderr


def test_where_threads_are_there_from_the_beginning_workers_start_afresh(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=[3600], daemon=True).start()\n"
    daemon = start("import lib\n", lib="", sitecustomize=thread)
    assert sorted(read(daemon)) == list(range(200))
    workers = daemon.workers()
    assert [worker.ppid() for worker in workers] == [daemon.process.pid] * 2
    assert sorted(importers(tmp_path, "lib")) == sorted(worker.pid for worker in workers)
    assert "each worker imports all libraries itself: Python starts with several threads" in daemon.stderr()
    workers[0].kill()
    until(lambda: len(daemon.workers()) == 2 and workers[0] not in daemon.workers())
    assert sorted(read(daemon)) == list(range(200))


def test_workers_draw_the_same_at_import_from_the_global_generators_and_from_no_others(
    start: Callable[..., Daemon],
) -> None:
    top = """
    import numpy as np, random, numpy.random
    DRAWN = np.float64(np.random.random()), np.float64(random.random()), np.random.default_rng().random()
    """
    daemon = start(top, value="np.array(DRAWN)")
    with penstock.connect(daemon.url) as connection:
        drawn = {tuple(batch[0]) for batch in connection.batches()}
    assert len(drawn) == 2
    assert [a == b for a, b in zip(*drawn, strict=True)] == [True, True, False]


def test_when_the_fork_server_is_killed_the_stream_goes_on(start: Callable[..., Daemon]) -> None:
    daemon = start("import time\n", value="(time.sleep(0.01), split)[1]")
    first = fork_server(daemon)
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        seen = [next(batches) for _ in range(20)]
        first.kill()
        seen += list(batches)
    assert sorted(float(batch[0]) for batch in seen) == list(range(200))
    assert "the fork server was killed by SIGKILL (the kernel's" in daemon.stderr()
    assert "died with the fork server" in daemon.stderr()
    assert fork_server(daemon).pid != first.pid
    assert forked(daemon)


def test_a_fork_server_that_dies_before_it_is_ready_is_done_without(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    once = tmp_path / "once"
    crash = f"""
        from pathlib import Path
        if not Path({str(once)!r}).exists():
            Path({str(once)!r}).touch()
            os.kill(os.getpid(), 11)
    """
    daemon = start("import lib\n", lib=crash)
    assert sorted(read(daemon)) == list(range(200))
    assert [worker.ppid() for worker in daemon.workers()] == [daemon.process.pid] * 2
    assert "the fork server was killed by SIGSEGV, and its workers with it" in daemon.stderr()


def test_workers_end_with_a_killed_daemon_and_its_fork_server(start: Callable[..., Daemon]) -> None:
    daemon = start("")
    processes = [fork_server(daemon), *daemon.workers()]
    daemon.process.kill()
    _gone, alive = psutil.wait_procs(processes, timeout=50)
    assert not alive


def test_a_daemon_that_is_stopped_while_libraries_are_imported_leaves_nothing(tmp_path: Path) -> None:
    path = installed(tmp_path, slow="import time; time.sleep(3600)")
    (tmp_path / "feeds.py").write_text("import slow\n" + FEED.format(value=1))
    command = [sys.executable, "-m", "penstock_server", "serve", "feeds:feed", "--bind", "tcp://127.0.0.1:0"]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as daemon:
        until((tmp_path / "slow").exists)
        processes = psutil.Process(daemon.pid).children(recursive=True)
        assert [process.name() for process in processes] == ["penstock-forks"]
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(50)
    assert not any(process.is_running() for process in processes)


def test_forked_workers_run_tensorflow(serve: Serve) -> None:
    daemon = serve(
        "import numpy as np\nimport tensorflow as tf\n"
        + FEED.format(value="tf.reduce_sum(tf.fill([4], np.float32(split))).numpy()"),
    )
    assert sorted(read(daemon)) == [4.0 * number for number in range(200)]
    assert forked(daemon)
    assert "each worker does so on its own" not in daemon.stderr()


# --- which imports it finds ---


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`ahead({file: text}, target, without=...)` returns the libraries that are imported for the target, among these
    files."""
    for name in ("one", "two", "three"):
        package = tmp_path / "site-packages" / f"lib_{name}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "part.py").write_text("")
    (tmp_path / "site-packages" / "lib_broken.py").write_text("import lib_missing")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def found(files: dict[str, str], target: str, without: tuple[str, ...] = ()) -> list[str]:
        for name, text in files.items():
            file = here / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        before = set(sys.modules)
        list(preload([target], without))
        added = {name for name in set(sys.modules) - before if name.startswith("lib_")}
        ours = {Path(name).stem for name in files} & (set(sys.modules) - before)
        assert not ours, "it imported one of the user's modules"
        return sorted(added)

    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import lib_one, lib_two", ["lib_one", "lib_two"]),
        ("import lib_one.part as it", ["lib_one", "lib_one.part"]),
        ("from lib_one import part", ["lib_one", "lib_one.part"]),
        ("from lib_one import *", ["lib_one"]),
        ('"""Words."""\nfrom __future__ import annotations\nimport lib_one', ["lib_one"]),
        ("import lib_one\nX = 1\nimport lib_two", ["lib_one", "lib_two"]),
        ("import lib_one\nX = print()\nimport lib_two", ["lib_one"]),
        ("import lib_one\nlib_one.x = 1\nimport lib_two", ["lib_one"]),
        ("import os\nos.environ['LIB_X'] = '1'\nimport lib_two", ["lib_two"]),
        ("import os\nos.environ['PYTHONHASHSEED'] = '1'\nimport lib_two", []),
        ("import os\nos.environ['LIB_X'] = os.sep\nimport lib_two", []),
        ("try:\n    import lib_one\nexcept ImportError: pass\nimport lib_two", ["lib_one", "lib_two"]),
        ("try:\n    import lib_missing\nexcept ImportError:\n    x = None\nimport lib_two", ["lib_two"]),
        ("try:\n    import lib_missing, lib_one\nexcept (OSError, ImportError):\n    import lib_two", ["lib_two"]),
        ("try:\n    import lib_missing\nexcept: pass\nimport lib_two", ["lib_two"]),
        ("try:\n    import lib_missing\nexcept OSError: pass\nimport lib_two", []),
        ("try:\n    import lib_missing\nexcept ImportError: print()\nimport lib_two", []),
        ("try:\n    import lib_one\nexcept ImportError: print()\nimport lib_two", ["lib_one", "lib_two"]),
        ("try:\n    import lib_one\nexcept ImportError: pass\nelse: import lib_two", ["lib_one", "lib_two"]),
        ("try:\n    import lib_missing\nexcept ImportError: pass\nelse: import lib_two", []),
        ("try:\n    import lib_missing\nexcept ImportError: pass\nfinally: import lib_two", ["lib_two"]),
        ("try:\n    from lib_one import nothing\nexcept ImportError: import lib_two", ["lib_one", "lib_two"]),
        ("try:\n    import lib_one.missing\nexcept ImportError: import lib_two", ["lib_one", "lib_two"]),
        ("try:\n    from .helper import x\nexcept ImportError: import lib_two", ["lib_two"]),
        ("try:\n    lib_one = print()\nexcept ImportError: pass\nimport lib_two", []),
        ("import lib_one, lib_one.missing, lib_two", ["lib_one"]),
        ("import lib_one\nif True: import lib_two", ["lib_one"]),
        ("import lib_one\ndef f():\n    import lib_two", ["lib_one"]),
        ("import lib_one\ndef f(): print()\nimport lib_two", ["lib_one", "lib_two"]),
        ("import lib_one, lib_missing\nimport lib_two", ["lib_one"]),
        ("import lib_one\nimport )", []),
        ("from . import x\nimport lib_one", []),
    ],
)
def test_only_the_imports_at_the_beginning_count(
    ahead: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, text: str, found: list[str]
) -> None:
    monkeypatch.setenv("LIB_X", "")
    assert ahead({"scenes.py": text}, "scenes.py:feed") == found
    assert os.environ["LIB_X"] == ""


def test_imports_of_the_users_other_modules_are_followed(ahead: Callable[..., list[str]]) -> None:
    files = {
        "data/__init__.py": "",
        "data/scenes.py": "from .tools import crop\nfrom .. import nothing",
        "data/tools/__init__.py": "from . import crop\nimport lib_two",
        "data/tools/crop.py": "import lib_one",
    }
    assert ahead(files, "data.scenes:feed") == ["lib_one", "lib_two"]


def test_definitions_of_the_users_other_modules_are_passed_over(ahead: Callable[..., list[str]]) -> None:
    helper = """
        import lib_one
        SIZE = 2 * 14

        class Scaler(lib_one.Base):
            def __call__(self, rows):
                return rows / SIZE
    """
    files = {"scenes.py": "from helper import Scaler\nimport lib_two\nfeed = print(Scaler)", "helper.py": helper}
    assert ahead(files, "scenes:feed") == ["lib_one", "lib_two"]


@pytest.mark.parametrize(
    ("text", "defines"),
    [
        ("'Words.'", True),
        ("pass", True),
        ("LOG = logging.getLogger(__name__)", True),
        ("ROOT = Path(__file__).resolve().parent / 'data'", True),
        ("HERE = os.path.dirname(os.path.abspath(__file__))", True),
        ("WIDTH, HEIGHT = 28, 2 * 14", True),
        ("SIZES: dict[str, int] = {'small': 28}", True),
        ("square = lambda x: compute(x)", True),
        ("def load(path: str, mode='r', *, size: int | None = SIZE) -> np.ndarray: return read(path)", True),
        ("async def load(): await read()", True),
        ("class A(Base, metaclass=ABCMeta):\n 'Words.'\n n = 1\n @property\n def x(self): return f()", True),
        ("class A:\n @property\n def x(self): pass\n @x.setter\n def x(self, value): pass", True),
        ("@dataclass(frozen=True)\nclass A:\n x: list[int] = field(default_factory=list)", True),
        ("if __name__ == '__main__':\n run()", True),
        ("if TYPE_CHECKING:\n import x", True),
        ("plt.rcParams['figure.dpi'] = 72", False),
        ("keras.backend.floatx = 'float16'", False),
        ("LOADED = load()", False),
        ("SEED = np.random.randint(5)", False),
        ("random.seed(1)", False),
        ("@register\ndef load(): pass", False),
        ("@register('x')\nclass A: pass", False),
        ("@dataclass(frozen=read())\nclass A: pass", False),
        ("def load(table=read()): pass", False),
        ("square = lambda x=read(): x", False),
        ("class A(make_base()): pass", False),
        ("class A:\n TABLE = read()", False),
        ("class A(B, table=read()): pass", False),
        ("if __name__ == '__main__':\n run()\nelse:\n run()", False),
        ("if __name__ != '__main__':\n run()", False),
        ("if not TYPE_CHECKING:\n run()", False),
        ("if DEBUG:\n import x", False),
        ("try:\n import x\nexcept ImportError:\n x = None", False),
        ("for x in range(3): print(x)", False),
        ("del x", False),
    ],
)
def test_which_statements_only_define_something(text: str, defines: bool) -> None:
    (statement,) = ast.parse(text).body
    assert only_defines(statement) is defines


def test_the_statement_that_ends_the_search_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "scenes.py").write_text("import helping_scenes\nfeed = print()\n")
    (tmp_path / "helping_scenes.py").write_text("X = 1\n\nprint(X)\nprint(X)\n")
    ends: list[str] = []
    list(preload(["scenes.py:feed"], (), ends.append))
    assert ends == [f"{tmp_path}/helping_scenes.py:3"]


def test_code_of_the_users_other_modules_ends_the_search(ahead: Callable[..., list[str]]) -> None:
    files = {"scenes.py": "import lib_one, helper, lib_three", "helper.py": "import lib_two\nprint('helps')"}
    assert ahead(files, "scenes:feed") == ["lib_one", "lib_two"]


def test_modules_that_import_each_other_are_read_once(ahead: Callable[..., list[str]]) -> None:
    files = {"scenes.py": "import helper, lib_one", "helper.py": "import scenes, lib_two"}
    assert ahead(files, "scenes:feed") == ["lib_one", "lib_two"]


def test_a_package_can_be_passed_over(ahead: Callable[..., list[str]]) -> None:
    assert ahead({"scenes.py": "import lib_one.part, lib_two"}, "scenes:feed", ("lib_one",)) == ["lib_two"]


def test_a_missing_module_of_another_module_is_handled_where_that_is_imported(ahead: Callable[..., list[str]]) -> None:
    scenes = "try:\n    from helper import x\nexcept ImportError:\n    x = None\nimport lib_two"
    assert ahead({"scenes.py": scenes, "helper.py": "import lib_one, lib_missing"}, "scenes:feed") == [
        "lib_one",
        "lib_two",
    ]


def test_a_failed_import_names_its_package(ahead: Callable[..., list[str]]) -> None:
    with pytest.raises(ImportFailed, match=r"^lib_broken$"):
        ahead({"scenes.py": "import lib_broken"}, "scenes:feed")


def test_a_module_that_is_not_there_is_the_workers_error(ahead: Callable[..., list[str]]) -> None:
    assert ahead({}, "absent.py:feed") == []
    assert ahead({}, "absent:feed") == []


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_fork_server_said_before_it_was_replaced_means_nothing(tmp_path: Path) -> None:
    """It has told of a worker's end when it is killed. The daemon reads that after it has given up the worker."""
    (tmp_path / "feeds.py").write_text(FEED.format(value=1))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    ended: list[int | None] = []
    wrong: list[Any] = []

    async def replaced() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        server = ForkServer(StartArguments(feeds=(f"{tmp_path}/feeds.py:feed",)), environment)
        forked = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, (tmp_path / "page").open("w+b") as page:
            page.truncate(4096)
            server.fork(0, [theirs.fileno(), page.fileno(), page.fileno()], forked.set_result)
            worker = await forked
        worker.watch(ended.append)
        os.kill(worker.pid, signal.SIGKILL)
        told = select.poll()
        told.register(server._peer._connection, select.POLLIN)
        assert told.poll(60_000), "the fork server tells of the end; the loop does not read that yet"
        server.replace()
        for _ in range(100):
            await asyncio.sleep(0.01)
        worker.forget()
        server.stop()

    asyncio.run(replaced())
    assert not wrong
    assert len(ended) == 1
