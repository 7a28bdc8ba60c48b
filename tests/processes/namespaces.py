"""Several machines on this one: network namespaces whose cables meet in a bridge.

    with namespaces.Network("head", "b") as network:
        network["head"].limit(1000)
        subprocess.Popen([*network["b"].within, "penstock", "join", f"tcp://{network['head'].address}:5555", ...])
        network["b"].unplug()

Everything, including the bridge, lives in namespaces, and disappears with them. Their names contain the id of this
process, so networks of several processes do not collide. A killed process leaves its namespaces behind; the next
network of any process removes them. The caller has to end the processes that it starts in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess

PREFIX = "penstock-"
SUBNET = "10.213.77"
BURST = 256 * 1024
"""Bytes that pass a rate limit at once: a few of the kernel's large packets."""


class Machine:
    """A namespace with one network device, `eth0`.

    Attributes:
        address: its IP address.
        namespace: its name.
        within: words to put before a command, to run it there. The command replaces them, so signals reach it.
    """

    def __init__(self, namespace: str, bridge: str, number: int) -> None:
        self.address = f"{SUBNET}.{number}"
        self.namespace = namespace
        self.within = ("ip", "netns", "exec", namespace)
        self._bridge = bridge
        self._port = f"port{number}"

    def lay(self) -> None:
        """Make the namespace and its cable to the bridge.

        Raises:
            OSError: this process may not make them.
        """
        _run("ip", "netns", "add", self.namespace)
        ends = ("eth0", "netns", self.namespace, "type", "veth", "peer", self._port, "netns", self._bridge)
        _run("ip", "link", "add", *ends)
        _run("ip", "-n", self._bridge, "link", "set", self._port, "master", "bridge", "up")
        _run("ip", "-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", self.namespace, "link", "set", device, "up")

    def unplug(self) -> None:
        """Cut its cable. Connections stay open, but nothing passes."""
        _run("ip", "-n", self._bridge, "link", "set", self._port, "down")

    def plug(self) -> None:
        """Restore its cable."""
        _run("ip", "-n", self._bridge, "link", "set", self._port, "up")

    def block(self, other: Machine) -> None:
        """Let nothing pass from here to another machine. So nothing from there is answered, either."""
        _run("ip", "-n", self.namespace, "route", "add", "blackhole", f"{other.address}/32")

    def pids(self) -> list[int]:
        """Return the ids of the processes that run in it."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    def sent(self) -> int:
        """Return how many bytes it has sent over its cable."""
        (device,) = json.loads(_run("ip", "-n", self.namespace, "-s", "-j", "link", "show", "eth0"))
        return int(device["stats64"]["tx"]["bytes"])

    def limit(self, megabits: float) -> None:
        """Limit its cable to `megabits` Mbit/s each way."""
        for namespace, device in ((self.namespace, "eth0"), (self._bridge, self._port)):
            shape = ("tbf", "rate", f"{megabits:g}mbit", "burst", str(BURST), "latency", "100ms")
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)


class Network:
    """The bridge and its machines. Use it in a `with`; `network[name]` is a machine.

    Args:
        names: the names of the machines, at most 250.

    Raises:
        OSError: no namespaces can be made here; the message says why.
    """

    def __init__(self, *names: str) -> None:
        own = f"{PREFIX}{os.getpid()}-{id(self):x}-"
        self._bridge = f"{own}bridge"
        self._machines = {name: Machine(own + name, self._bridge, 1 + n) for n, name in enumerate(names)}
        self._names = [self._bridge, *(own + name for name in names)]

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def __enter__(self) -> Network:
        if shutil.which("ip") is None:
            raise OSError("network namespaces are made with `ip` (iproute2), which is not installed")
        remove_left()
        try:
            _run("ip", "netns", "add", self._bridge)
            _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
            for machine in self._machines.values():
                machine.lay()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            with contextlib.suppress(OSError):  # it was not made
                _run("ip", "netns", "del", name)


def remove_left() -> None:
    """Remove the namespaces of processes that no longer exist."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):  # another process has removed it
                _run("ip", "netns", "del", name)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}`: {done.stderr.strip()}")
    return done.stdout
