"""Fixtures that the tests share: daemons, joined hosts and trainers, and the check that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import psutil
import pytest
from click.testing import CliRunner
from hypothesis.internal.conjecture import engine

from penstock_server.cli import main
from tests.order_of_files import pytest_collection_modifyitems, pytest_xdist_make_scheduler
from tests.processes.forked import Forked, Launcher
from tests.processes.namespaces import Network

__all__ = ["pytest_collection_modifyitems", "pytest_xdist_make_scheduler"]

# No test depends on the machine being fast.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # starting NumPy's threads takes a fifth of a process's start
# With this variable, five processes would rewrite the assertions of all tests, and a thousand compile all of Penstock.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it for programs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and our child processes would inherit that setting


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis show a failing example before the test times out. Its default is to shrink for 5 minutes."""
    assert hasattr(engine, "MAX_SHRINKING_SECONDS")
    if config.getoption("timeout") is None:
        engine.MAX_SHRINKING_SECONDS = 60


def _spare_the_collector() -> None:
    """Let the garbage collector skip all objects that exist now. With TensorFlow loaded, each full pass takes 0.2 s."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make fuzz`."""
    parser.addoption("--fuzz-seconds", type=float, default=60.0, help="how long live daemons are attacked (60)")
    parser.addoption("--fuzz-seed", type=int, default=0, help="from which the attacks on live daemons are drawn (0)")


def pytest_collection_finish() -> None:
    """Let the garbage collector skip the modules of all tests."""
    _spare_the_collector()


def _fds() -> dict[int, str]:
    """Return the target of each open file descriptor of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def _descendants() -> set[int]:
    """Return the ids of all processes below this one. psutil reads the status of each process of the machine for that,
    which takes 3 ms, and each test asks twice."""
    if not os.path.exists("/proc/thread-self/children"):  # this kernel does not list them
        return {child.pid for child in psutil.Process().children(recursive=True)}
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            tasks = f"/proc/{parents.pop()}/task"
            for task in os.listdir(tasks):
                pids = [*map(int, Path(tasks, task, "children").read_text().split())]
                parents += pids
                found.update(pids)
    return found


def _left_behind(children: set[int], threads: set[int], fds: set[int]) -> str:
    """Return, in words, the processes, threads and file descriptors that exist now but not in the given sets."""
    left = [
        f"process {child.pid} {child.name()} ({child.status()})"
        for child in map(psutil.Process, sorted(_descendants() - children))
    ]
    left += [f"thread {thread.name}" for thread in threading.enumerate() if thread.ident not in threads]
    left += [f"fd {fd} -> {target}" for fd, target in _fds().items() if fd not in fds and not _is_ours(target)]
    return "; ".join(left)


def _is_ours(target: str) -> bool:
    """Return whether the fd belongs to pytest, or to a file that Python keeps open."""
    return target.startswith(("/dev/", "/tmp/pytest-", "/proc/")) or ("(deleted)" in target and "memfd" not in target)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a socket, a memfd or any other file descriptor."""
    for keeps in {"tf", "launcher", "keras_launcher", "consumer_launcher", "daemon_launchers", "clients"} & {
        *request.fixturenames
    }:  # these fixtures open things that stay open
        request.getfixturevalue(keeps)
    children = _descendants()
    threads = {thread.ident for thread in threading.enumerate() if thread.ident is not None}
    fds = set(_fds())
    yield
    deadline = time.monotonic() + 30
    while True:
        gc.collect()
        try:
            left = _left_behind(children, threads, fds)
        except psutil.NoSuchProcess:
            left = "a process that is just ending"
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not left, f"left behind: {left}"


@pytest.fixture(autouse=True)
def forgotten_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the modules that a test wrote and imported here: the next one may call its own file the same."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    folder = f"{tmp_path_factory.getbasetemp()}/"
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="session")
def tf():
    """TensorFlow, imported once, its thread pools started."""
    import tensorflow

    list(tensorflow.data.Dataset.from_generator(lambda: iter([1]), output_signature=tensorflow.TensorSpec([], "int64")))
    _spare_the_collector()
    return tensorflow


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """The process that forks trainers."""
    launcher = Launcher("tensorflow", "keras")
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def keras_launchers(launcher: Launcher) -> Iterator[dict[str, Launcher]]:
    """The processes that fork trainers with Keras, by its backend: for `keras_launcher`."""
    launchers = {"tensorflow": launcher}
    yield launchers
    for backend in launchers.keys() - {"tensorflow"}:
        launchers[backend].close()


@pytest.fixture
def keras_launcher(backend: str, keras_launchers: dict[str, Launcher]) -> Launcher:
    """The process that forks trainers with Keras on the test's parameter `backend`. Skips the test if that is missing.

    Keras imports TensorFlow too, when it compiles a model, and the imports take 5 s of CPU. JAX compiles each operation
    of a small model; optimizing them would take a fifth of a test or more.
    """
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    if backend not in keras_launchers:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("KERAS_BACKEND", backend)
            environment.setenv("JAX_PLATFORMS", "cpu")
            environment.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
            keras_launchers[backend] = Launcher(backend, "keras", "tensorflow")
    return keras_launchers[backend]


@pytest.fixture(scope="session")
def consumer_launcher() -> Iterator[Launcher]:
    """The process that forks consumers without TensorFlow."""
    launcher = Launcher("penstock")
    yield launcher
    launcher.close()


class DaemonLauncher:
    """A process that forks daemons and workers.

    Args:
        hash_seed: PYTHONHASHSEED of the daemons. If it is "0", as for workers, their fork servers are forked too.
            Otherwise fork servers start as those of users do.
    """

    def __init__(self, hash_seed: str) -> None:
        self._prepare = "from tests.processes import fork_template; fork_template.prepare()" if hash_seed == "0" else ""
        self._variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        names = ("cli.main", "cli.progress", "cli.service_manager", "daemon.serving")
        modules = [f"penstock_server.{name}" for name in names]
        modules += ["uvloop", "encodings.idna", "tests.processes.fork_template"]
        self._launcher = Launcher(*modules, hash_seed=hash_seed, finalizes=False)

    def _changed(self, environment: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in environment.items() if self._variables.get(name) != value}

    def fits(self, environment: dict[str, str]) -> bool:
        """Return whether a daemon with these environment variables can be forked."""
        early = ("PENSTOCK_", "PYTHON")  # read when the interpreter starts, or by an import
        none_less = self._variables.keys() <= environment.keys()
        return none_less and not any(name.startswith(early) for name in self._changed(environment))

    def start(
        self, code: str, *words: str, environment: dict[str, str], folder: Path, stderr: int, network: str = ""
    ) -> Forked:
        """Start a daemon as `python -c code words` would, in this network namespace, if any."""
        code = f"import os, sys\nsys.path[0] = os.getcwd()\n{self._prepare}\n{code}"
        env = self._changed(environment)
        return self._launcher.start(code, *words, env=env, folder=folder, stderr=stderr, network=network)

    def check(self, *words: str, folder: Path) -> Forked:
        """Start `penstock check` with these arguments."""
        code = "import os, sys\nfrom tests.processes.fork_template import prepare_check\n"
        code += "sys.path[0] = os.getcwd()\nprepare_check()\n"
        return self._launcher.start(code + PATCHED.format(patched={}), "check", *words, folder=folder)

    def worker(self, *words: str, env: dict[str, str], folder: Path, stderr: int, fds: Sequence[int]) -> Forked:
        """Start `python -m penstock_server.worker` with these arguments, further variables and open files."""
        code = "from penstock_server.worker.__main__ import main\nraise SystemExit(main())"
        return self._launcher.start(code, *words, env=env, folder=folder, stderr=stderr, fds=fds)

    def close(self) -> None:
        self._launcher.close()


@pytest.fixture(scope="session")
def daemon_launchers() -> Iterator[list[DaemonLauncher]]:
    """The two processes that fork daemons for `serve`. Their hash seeds differ."""
    launchers = [DaemonLauncher("0"), DaemonLauncher("1")]
    yield launchers
    for launcher in launchers:
        launcher.close()


StartTrainer = Callable[..., Forked]


@pytest.fixture
def start_trainer(launcher: Launcher) -> Iterator[StartTrainer]:
    """`start_trainer(code, argument, ..., env={...})`: a trainer with TensorFlow. It is killed if it outlives the test.

    Trainers are forked from a process that has imported TensorFlow, because the import takes 5 s of CPU.
    """
    trainers: list[Forked] = []

    def start(code: str, *arguments: str, env: dict[str, str] | None = None) -> Forked:
        trainers.append(launcher.start(code, *arguments, env=env))
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.close()


class Daemon:
    """A running `penstock serve` in its own folder. `urls` has its URLs by feed name; `stderr()` is its log so far.

    With a `launcher` it is forked, in the network namespace `network` if there is one, and `command` is the text of a
    program and its arguments.
    """

    def __init__(
        self,
        command: list[str],
        cwd: Path,
        log: Path,
        environment: dict[str, str],
        *,
        own_group: bool = False,
        launcher: DaemonLauncher | None = None,
        network: str = "",
    ) -> None:
        self.folder = cwd
        self._log = log
        self.process: Forked | subprocess.Popen[str]
        self.urls: dict[str, str] = {}
        with log.open("wb") as stderr:
            if launcher is not None:
                self.process = launcher.start(
                    *command, environment=environment, folder=cwd, stderr=stderr.fileno(), network=network
                )
                return
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                process_group=0 if own_group else None,
                text=True,
                errors="replace",
            )

    def wait_ready(self, count: int, timeout: float = 60) -> None:
        """Read the `ready` lines of `count` feeds."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(timeout, self.process.kill)
        watchdog.start()
        try:
            while len(self.urls) < count:
                line = self.process.stdout.readline()
                if not line:
                    self.process.wait()
                    raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.stderr()}")
                assert line.startswith("ready "), line
                url = line.split()[1]
                self.urls[url.rpartition("/")[2]] = url
        finally:
            watchdog.cancel()
            watchdog.join()

    @property
    def url(self) -> str:
        """The URL of the only feed."""
        (url,) = self.urls.values()
        return url

    def stderr(self) -> str:
        """Return its log so far."""
        return self._log.read_text(errors="replace")

    def workers(self) -> list[psutil.Process]:
        """Return its worker processes."""
        return _workers_of(self.process.pid)

    def scale(self, *words: str) -> str:
        """Run `penstock scale` with these arguments, in this process, and return its output."""
        return CliRunner().invoke(main.main, ["scale", next(iter(self.urls.values())), *words]).output

    def stop(self, how: int = signal.SIGTERM, timeout: float = 50) -> int:
        """Signal the daemon, wait up to `timeout` seconds, and return its exit status.

        The default timeout is less than the 60 s that a daemon waits for a consumer that continues to read.
        """
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()


PATCHED = """
import importlib
from penstock_server.cli import main as cli

for place, value in {patched}.items():
    module, _, name = place.rpartition(".")
    module = importlib.import_module("penstock_server." + module)
    assert hasattr(module, name), place
    setattr(module, name, value)
cli.main(prog_name="penstock")
"""
"""A program: `penstock` with other values for constants, which have names such as "workers.spot_checks.SHARE"."""


UNCHECKED: dict[str, object] = {"workers.spot_checks.MOST_DIFFERENT": 0}
"""No samples are made again to compare them: for tests that count how often user code makes each sample."""


def command(patched: dict[str, object]) -> list[str]:
    """Return the command that starts `penstock` with these values for constants."""
    if not patched:
        return [sys.executable, "-m", "penstock_server"]
    return [sys.executable, "-c", PATCHED.format(patched=patched)]


Serve = Callable[..., Daemon]


def stop_all(daemons: list[Daemon]) -> None:
    """Stop the daemons that still run, and check that they exit with status 0."""
    for daemon in daemons:
        running = daemon.process.poll() is None
        status = daemon.stop()
        assert "please report this as a bug" not in daemon.stderr(), daemon.stderr()
        if running:
            assert status == 0, f"the daemon ended with {status}:\n{daemon.stderr()}"


@pytest.fixture
def serve(tmp_path: Path, daemon_launchers: list[DaemonLauncher]) -> Iterator[Serve]:
    """`serve(source, "train", "val", workers=2)`: a daemon on a free port, for feeds in a module with this source text.

    Keywords: `ready=False` does not wait for the feeds. `patched` is as for `command`. `nofile` is the most files that
    the daemon may have open. `own_group` makes it the leader of a process group. `words` are further arguments. All
    other keywords become options (`memory=...` is `--memory`).

    Daemons are forked, and so is the fork server of a test's first daemon. The second daemon is forked from another
    process. So if a test compares the two, the result does not depend on anything that forked processes share, such as
    the hash seed. With `nofile`, `own_group` or variables that Python reads when it starts, a daemon is started as
    users start it. At SIGTERM the daemon must exit with status 0, unless the test has stopped it already.
    """
    daemons: list[Daemon] = []

    def start(
        source: str,
        *feeds: str,
        ready: bool = True,
        env: dict[str, str] | None = None,
        patched: dict[str, object] | None = None,
        nofile: int | None = None,
        own_group: bool = False,
        words: tuple[str, ...] = (),
        **options: object,
    ) -> Daemon:
        number = len(daemons)
        folder = tmp_path / f"daemon{number}"
        folder.mkdir(exist_ok=True)
        (folder / "feeds.py").write_text(textwrap.dedent(source))
        feeds = feeds or ("feed",)
        words = ("serve", *(f"feeds.py:{feed}" for feed in feeds), *words)
        for name, value in {"bind": "tcp://127.0.0.1:0", "workers": 2, **options}.items():
            words += (f"--{name.replace('_', '-')}", str(value))
        environment = {**os.environ, **(env or {})}
        launcher = None
        forks = daemon_launchers[number == 1]
        if nofile is None and not own_group and forks.fits(environment):
            launcher = forks
            words = (PATCHED.format(patched=patched or {}), *words)
        else:
            words = (*command(patched or {}), *words)
        if nofile is not None:
            words = ("sh", "-c", f'ulimit -n {nofile} && exec "$0" "$@"', *words)
        daemon = Daemon([*words], folder, folder / "log", environment, own_group=own_group, launcher=launcher)
        daemons.append(daemon)
        if ready:
            daemon.wait_ready(len(feeds))
        return daemon

    yield start
    stop_all(daemons)


LayNetwork = Callable[..., Network]


@pytest.fixture
def lay_network() -> Iterator[LayNetwork]:
    """`lay_network("loader", "trainer")`: a network of these machines. Skips the test if it cannot be made."""
    with contextlib.ExitStack() as stack:

        def lay(*names: str) -> Network:
            try:
                return stack.enter_context(Network(*names))
            except OSError as error:
                pytest.skip(f"no network namespaces can be made here: {error}")

        yield lay


class Host:
    """A running `penstock join` in its folder; `log()` is its log so far.

    With a `launcher` it is forked, in the network namespace `network` if there is one, and `words` are the text of a
    program and its arguments.
    """

    def __init__(
        self,
        words: list[str],
        folder: Path,
        name: str,
        daemon: Daemon,
        environment: dict[str, str],
        launcher: DaemonLauncher | None = None,
        network: str = "",
    ) -> None:
        self.name = name
        self.folder = folder
        self.daemon = daemon
        self._log = folder / f"log of {name}"
        self.process: Forked | subprocess.Popen[bytes]
        with self._log.open("wb") as log:
            if launcher is not None:
                self.process = launcher.start(
                    *words, environment=environment, folder=folder, stderr=log.fileno(), network=network
                )
                return
            self.process = subprocess.Popen(
                words, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def log(self) -> str:
        """Return its log so far."""
        return self._log.read_text(errors="replace")

    def wait_working(self, times: int = 1, timeout: float = 60) -> None:
        """Wait until the head gives it work, for the `times`-th time."""
        wait_until(lambda: self.daemon.stderr().count(f"host {self.name} works") >= times, timeout, self.log)

    def wait_ended(self, timeout: float = 60) -> int:
        """Wait until the process ends, and return its exit status."""
        return self.process.wait(timeout)

    def workers(self) -> list[psutil.Process]:
        """Return its worker processes: none if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return _workers_of(self.process.pid)
        return []

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        if isinstance(self.process, Forked):
            self.process.close()


def _workers_of(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended meanwhile
            if process.name().startswith("penstock-w"):
                found.append(process)
    return found


def runs(pid: int) -> bool:
    """Tell whether this process runs. It may end at any moment, also between two questions to the kernel."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those of these processes that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def wait_until(condition: Callable[[], object], timeout: float = 60, said: Callable[[], str] = str) -> None:
    """Wait for a condition. If it takes too long, fail with what `said` returns."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain:\n{said()}"
        time.sleep(0.05)


Join = Callable[..., Host]


@pytest.fixture
def join(daemon_launchers: list[DaemonLauncher]) -> Iterator[Join]:
    """`join(daemon, "train", "val", workers=2, host_name="b")`: a host that joins the daemon, with the same module.

    Keywords: `working=False` does not wait until the host gets work. `folder` is the folder of its module. `url` is
    the head's, if the host has another one. `patched` is as for `command`. `words` are further arguments. All other
    keywords become options. Hosts are forked, as daemons are, the second one from another process than the first.
    """
    hosts: list[Host] = []

    def start(
        daemon: Daemon,
        *feeds: str,
        folder: Path | None = None,
        working: bool = True,
        patched: dict[str, object] | None = None,
        env: dict[str, str] | None = None,
        words: tuple[str, ...] = (),
        url: str = "",
        **options: object,
    ) -> Host:
        name = str(options.setdefault("host_name", f"host{len(hosts)}"))
        url = url or next(iter(daemon.urls.values())).rpartition("/")[0]
        all_words = ["join", url, *(f"feeds.py:{feed}" for feed in feeds or ("feed",)), *words]
        for option, value in {"workers": 2, **options}.items():
            all_words += [f"--{option.replace('_', '-')}", str(value)]
        environment = {**os.environ, **(env or {})}
        launcher = daemon_launchers[len(hosts) == 1]
        if launcher.fits(environment):
            all_words.insert(0, "os.dup2(2, 1)" + PATCHED.format(patched=patched or {}))
            host = Host(all_words, folder or daemon.folder, name, daemon, environment, launcher)
        else:
            host = Host([*command(patched or {}), *all_words], folder or daemon.folder, name, daemon, environment)
        hosts.append(host)
        if working:
            host.wait_working()
        return host

    yield start
    for host in hosts:
        host.close()
        assert "Traceback" not in host.log(), host.log()
