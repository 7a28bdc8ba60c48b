"""Judges a machine: the problems that a daemon or a trainer would have there, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock_proto import distribution
from penstock_proto.status.figures import size

from ...machine import descriptors
from .findings import ERROR, NOTE, WARNING, Finding, by_severity
from .machine import NEEDED, Machine

LEAST_MEMORY = 512 << 20
"""Bytes of available memory below which hardly any feed has room."""

FEW_FILES = 1024
"""Limit of open files below which a daemon has room for few workers and streams."""

SLOTS = 64
"""Slots that are assumed when workers are counted: about as many as a few streams take together."""

SMALL_SHM = 256 << 20

SLOW_CLOCK = 500.0
"""Nanoseconds of a clock reading above which the clock counts as slow."""

FEW_PROCESSES = 256

SECONDS_IN_2024 = 1_704_067_200


def judged(machine: Machine) -> list[Finding]:
    """Return the findings, the most severe first."""
    found = [*_kernel(machine), *_cpus(machine), *_memory(machine), *_files(machine), *_packages(machine)]
    return by_severity([*found, *_tensorflow(machine), *_clock(machine)])


def rows(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield the facts as pairs of a name and a text."""
    yield "system", machine.system
    usable = f", {machine.usable_cpus} of them for this process" if machine.usable_cpus < machine.cpus else ""
    quota = f", a cgroup quota allows {machine.limits.cpus:g}" if machine.limits.cpus is not None else ""
    yield "CPUs", f"{machine.cpus}{usable}{quota}; load {machine.load:.1f}"
    limit = f", a cgroup allows {size(machine.limits.memory)}" if machine.limits.memory is not None else ""
    yield (
        "memory",
        f"{size(machine.memory)}{limit}, {size(machine.available)} available; without --memory, a daemon takes "
        f"{size(machine.default_memory)}",
    )
    yield "files", f"{_files_in_words(machine.files[1])} may be open in a daemon"
    memfd = "does not work" if "memfd_create" in machine.broken else "works"
    shm = "there is none" if machine.shm is None else size(machine.shm)
    yield "shared", f"memfd {memfd}; /dev/shm, which Penstock does not use: {shm}"
    if any(machine.huge_pages):
        yield "hugepages", f"{machine.huge_pages[0] or '?'}, for shared memory {machine.huge_pages[1] or '?'}"
    yield "clock", f"{machine.clock or 'unknown source'}, {machine.clock_ns:.0f} ns a reading"
    yield "python", machine.python
    yield "packages", ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    yield "trainer", f"TensorFlow {_tensorflow_in_words(machine)}"


def _files_in_words(limit: int) -> str:
    return "any number" if limit < 0 else f"up to {limit:,}"


def _tensorflow_in_words(machine: Machine) -> str:
    seen = machine.tensorflow
    if seen is None:
        return "is not installed; a loader host does not need it"
    if seen.failed:
        return "cannot be imported"
    gpus = f"sees {len(seen.gpus)} GPU{'' if len(seen.gpus) == 1 else 's'}" if seen.gpus else "sees no GPU"
    return f"was imported in {seen.seconds:.1f} s, and {gpus}"


def _kernel(machine: Machine) -> Iterator[Finding]:
    fixes = {
        "memfd_create": "allow memfd_create in the container's seccomp profile; Docker's default one does",
        "pidfd_open": "use Linux 5.3 or newer, and allow pidfd_open in the container's seccomp profile",
        "unix sockets": "allow SOCK_SEQPACKET sockets and descriptor passing; without them batches go over TCP",
    }
    for name, error in machine.broken.items():
        yield Finding(ERROR, "kernel", f"{name} does not work: {error}", fix=fixes.get(name, ""))


def _cpus(machine: Machine) -> Iterator[Finding]:
    quota = machine.limits.cpus
    if quota is not None and quota < machine.usable_cpus:
        yield Finding(
            NOTE,
            "cpus",
            f"a cgroup quota allows {quota:g} of {machine.usable_cpus} CPUs, so `penstock serve` starts "
            f"{math.ceil(quota)} workers",
            fix="to run more, raise the limit (--cpus in docker, CPUQuota= in systemd)",
        )
    elif machine.usable_cpus < machine.cpus:
        yield Finding(
            NOTE,
            "cpus",
            f"this process may run on {machine.usable_cpus} of {machine.cpus} CPUs (taskset, cpuset, or a scheduler)",
        )
    if machine.load > 1.5 * machine.usable_cpus:
        yield Finding(
            NOTE,
            "cpus",
            f"{machine.load:.1f} processes compete for {machine.usable_cpus} CPUs: other work slows workers down",
        )


def _memory(machine: Machine) -> Iterator[Finding]:
    if machine.available < LEAST_MEMORY:
        where = "the cgroup" if machine.limits.memory is not None else "the machine"
        yield Finding(
            WARNING,
            "memory",
            f"{size(machine.available)} are left: batches, shuffle blocks and your libraries in each worker need more",
            fix=f"end other programs, or give {where} more memory",
        )


def _files(machine: Machine) -> Iterator[Finding]:
    limit = machine.files[1]
    if limit < 0:
        return
    most = descriptors.most_workers(limit, SLOTS)
    if most < max(1, machine.usable_cpus) or limit < FEW_FILES:
        yield Finding(
            ERROR if most < 1 else WARNING,
            "files",
            f"a daemon may have {limit:,} open files, which is enough for {max(0, most)} workers with some streams",
            fix=descriptors.HOW_TO_RAISE,
        )
    processes = machine.limits.processes
    if processes is not None and processes < FEW_PROCESSES:
        yield Finding(
            WARNING,
            "processes",
            f"a cgroup allows {processes} processes and threads, and each library in a worker may start some",
            fix="raise the limit (--pids-limit in docker, TasksMax= in systemd)",
        )
    if machine.shm is not None and machine.shm < SMALL_SHM:
        yield Finding(
            NOTE,
            "shm",
            f"/dev/shm has {size(machine.shm)}: Penstock does not use it, but multiprocessing and PyTorch may",
            fix="if your code runs out of it, give more (--shm-size in docker)",
        )


def _packages(machine: Machine) -> Iterator[Finding]:
    missing = [name for name in NEEDED if name not in machine.versions]
    if missing:
        yield Finding(
            ERROR, "packages", f"a daemon needs {', '.join(missing)}", fix=f"run {distribution.pip_install('server')}"
        )
    if machine.other_project:
        yield Finding(ERROR, "packages", machine.other_project)
    for package, wanted in machine.too_old.items():
        yield Finding(WARNING, "packages", f"{package} is too old", fix=f"run pip install '{wanted}'")


def _tensorflow(machine: Machine) -> Iterator[Finding]:
    seen = machine.tensorflow
    if seen is None:
        return
    if seen.failed:
        yield Finding(
            ERROR,
            "tensorflow",
            f"TensorFlow is installed, but its import fails: {seen.failed}",
            fix="run python -c 'import tensorflow', and reinstall the library that its error names",
        )
    elif machine.nvidia and not seen.gpus:
        hidden = machine.cuda_visible is not None and machine.cuda_visible.strip() in ("", "-1")
        yield Finding(
            WARNING,
            "gpu",
            f"this machine has {', '.join(machine.nvidia)}, but TensorFlow sees no GPU",
            fix=(
                f"unset CUDA_VISIBLE_DEVICES, which is {machine.cuda_visible!r}"
                if hidden
                else "install 'tensorflow[and-cuda]' and a driver that is new enough for it"
            ),
        )


def _clock(machine: Machine) -> Iterator[Finding]:
    if machine.clock_ns > SLOW_CLOCK:
        yield Finding(
            WARNING,
            "clock",
            f"reading the clock takes {machine.clock_ns:.0f} ns ({machine.clock or 'unknown source'}), and workers "
            "read it for each batch and split",
            fix="let the kernel use tsc or kvm-clock (clocksource=, or another type of virtual machine)",
        )
    if machine.now < SECONDS_IN_2024:
        yield Finding(
            WARNING, "clock", "the date is wrong, so files at https:// cannot be opened", fix="set it, best with NTP"
        )
