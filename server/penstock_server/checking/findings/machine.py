"""Collects the facts about this machine that matter to a daemon or a trainer. machine_findings.py judges them."""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from penstock_proto import distribution

from ...machine import memory_limits
from ...machine.cgroups import Limits, limits

PACKAGES = ("numpy", "tensorflow", "keras", "pyzmq", "uvloop", "msgspec", "msgpack", "h5py", "click", "rich", "pyarrow")
"""Packages whose versions are shown, if they are installed."""

NEEDED = ("pyzmq", "uvloop", "h5py", "rich")
"""Packages of the extra `server`, except click: without click this command would not run."""

TENSORFLOW = """
import json, time
began = time.monotonic()
import tensorflow
print(json.dumps([time.monotonic() - began, [gpu.name for gpu in tensorflow.config.list_physical_devices("GPU")]]))
"""

TENSORFLOW_SECONDS = 120.0
"""Seconds that the import of TensorFlow may take."""


@dataclass(frozen=True, slots=True)
class TensorFlow:
    """The report of a process that imported TensorFlow.

    Attributes:
        seconds: how long the import took.
        gpus: the names of the GPUs that TensorFlow sees.
        failed: why it cannot be imported, or empty.
    """

    seconds: float = 0.0
    gpus: tuple[str, ...] = ()
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts about a machine.

    Attributes:
        system: kernel and architecture.
        cpus, usable_cpus: CPUs of the machine, and those that this process may run on.
        load: processes that ran or were ready to run, averaged over the last minute.
        memory, available: bytes in all, and bytes that can be allocated before the machine or a cgroup is full.
        default_memory: bytes that `penstock serve` takes without --memory.
        limits: the cgroups' limits.
        files: soft and hard limit of open files.
        broken: the error of each kernel feature that does not work, by name.
        shm: bytes of /dev/shm; None if it does not exist.
        huge_pages: the settings for anonymous and for shared memory; empty if unknown.
        clock: the kernel's clock source; empty if unknown.
        clock_ns: nanoseconds that reading the clock takes.
        now: seconds since 1970.
        python: Python's version.
        versions: versions of installed packages.
        too_old: for each package ("numpy 1.26") that is older than Penstock requires, the requirement ("numpy>=2.0").
        other_project: what to do about another project's package named `penstock`; empty if there is none.
        tensorflow: None if it is not installed.
        nvidia: device files of NVIDIA GPUs.
        cuda_visible: the variable CUDA_VISIBLE_DEVICES, or None.
    """

    system: str
    cpus: int
    usable_cpus: int
    load: float
    memory: int
    available: int
    default_memory: int
    limits: Limits
    files: tuple[int, int]
    broken: dict[str, str] = field(default_factory=dict)
    shm: int | None = None
    huge_pages: tuple[str, str] = ("", "")
    clock: str = ""
    clock_ns: float = 0.0
    now: float = 0.0
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    too_old: dict[str, str] = field(default_factory=dict)
    other_project: str = ""
    tensorflow: TensorFlow | None = None
    nvidia: tuple[str, ...] = ()
    cuda_visible: str | None = None


def look() -> Machine:
    """Collect the facts about this machine. This takes seconds, as it imports TensorFlow in a separate process."""
    versions = {name: version for name in PACKAGES if (version := version_of(name))}
    versions = {"penstock": distribution.version(), **versions}
    return Machine(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cpus=os.cpu_count() or 1,
        usable_cpus=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available=memory_limits.available(),
        default_memory=memory_limits.default_memory(),
        limits=limits(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        broken=_broken(),
        shm=_shm(),
        huge_pages=_huge_pages(),
        clock=_text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        clock_ns=_clock_ns(),
        now=time.time(),
        python=platform.python_version(),
        versions=versions,
        too_old=outdated(versions),
        other_project=distribution.other_project(),
        tensorflow=_tensorflow() if "tensorflow" in versions else None,
        nvidia=tuple(sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))),
        cuda_visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _broken() -> dict[str, str]:
    """Try the kernel features that the daemon needs, and return the error of each that fails."""
    found = {}
    for name, attempt in (("memfd_create", _memfd), ("pidfd_open", _pidfd), ("unix sockets", _unix)):
        try:
            attempt()
        except (OSError, ValueError, AttributeError) as error:
            found[name] = str(error)
    return found


def _memfd() -> None:
    fd = os.memfd_create("penstock-check", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as page:
            page[:8] = b"penstock"
    finally:
        os.close(fd)


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _unix() -> None:
    """Pass a descriptor over an abstract address, as the daemon does to a trainer on this host."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0penstock-check-{os.getpid()}-{time.monotonic_ns()}")
        listener.listen(1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(listener.getsockname())
            connection, _ = listener.accept()
            with connection:
                socket.send_fds(client, [b"fd"], [listener.fileno()])
                _, fds, _, _ = socket.recv_fds(connection, 2, 1)
    for fd in fds:
        os.close(fd)
    if not fds:
        raise OSError("no descriptor came with a message")


def _shm() -> int | None:
    try:
        seen = os.statvfs("/dev/shm")
    except OSError:
        return None
    return seen.f_frsize * seen.f_blocks


def _huge_pages() -> tuple[str, str]:
    place = "/sys/kernel/mm/transparent_hugepage/"
    chosen = [re.search(r"\[(.*)\]", _text(place + name)) for name in ("enabled", "shmem_enabled")]
    first, second = (found[1] if found else "" for found in chosen)
    return first, second


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _clock_ns() -> float:
    looks = 2000
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter_ns()
        for _ in range(looks):
            time.monotonic_ns()
        best = min(best, (time.perf_counter_ns() - began) / looks)
    return best


def version_of(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def outdated(versions: dict[str, str]) -> dict[str, str]:
    """Return the installed packages that are older than Penstock requires; see `Machine.too_old`."""
    found = {}
    for text in distribution.requirements():
        match = re.match(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", text)
        if match is None:
            continue
        name, least = match[1].lower(), match[2]
        version = versions.get(name) or version_of(name)
        if version and _numbers(version) < _numbers(least):
            found[f"{name} {version}"] = f"{name}>={least}"
    return found


def _numbers(version: str) -> list[int]:
    numbers = re.match(r"[0-9.]*", version)
    return [int(part) for part in (numbers[0] if numbers else "").split(".") if part]


def _tensorflow() -> TensorFlow:
    """Import TensorFlow in a separate process: it may crash, and must not stay in this one."""
    try:
        said = subprocess.run(
            [sys.executable, "-c", TENSORFLOW],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TENSORFLOW_SECONDS,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    except subprocess.TimeoutExpired:
        return TensorFlow(failed=f"its import took more than {TENSORFLOW_SECONDS:.0f} s")
    if said.returncode:
        last = said.stderr.strip().splitlines()[-1:] or [f"the process ended with status {said.returncode}"]
        return TensorFlow(failed=last[0])
    seconds, gpus = json.loads(said.stdout.strip().splitlines()[-1])
    return TensorFlow(seconds, tuple(gpus))
