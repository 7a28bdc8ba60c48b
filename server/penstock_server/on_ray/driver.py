"""The Ray driver: `python -m penstock_server.on_ray.driver`, a child of the head that places the hosts.

It is a process of its own so that the head does not depend on Ray: Ray ends a driver whose node is lost, and the head
then starts another. All that Ray holds for the hosts (actors, placement group) belongs to this driver's job, and Ray
removes it when the driver ends in any way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

import msgspec

from .host import RayHost
from .orders import Ended, HeadAt, News, Plan

_SOON = 3.0
"""Seconds before the first word about what is waited for."""
_AGAIN = 60.0
"""Seconds between two words about that, unless it changes."""
_LONGEST_PAUSE = 60.0
"""Most seconds before a host that failed is tried again."""
_REACH = 10.0
"""Seconds for the cluster to take a connection."""
_END = 3.0
"""Seconds that hosts have to end after the head."""


def main() -> None:
    """Start the hosts that the first line of stdin tells of, and keep them until stdin ends."""
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing else is to print there

    def say(level: Any, text: str = "") -> None:
        with contextlib.suppress(OSError):  # the head is gone, and so is stdin
            stdout.write(msgspec.json.encode(News(level, text)).decode() + "\n")

    orders = Orders()
    try:
        ray = _connected(orders.plan)
    except _Failed as error:
        say("failed", str(error))
        sys.exit(1)
    say("connected")
    try:
        Hosts(ray, orders, say).run()
    except _Failed as error:
        say("failed", str(error))
        sys.exit(1)
    finally:
        ray.shutdown()


class _Failed(Exception):
    """The driver cannot do its work; the text says why and what to do."""


class Orders:
    """What the head says on stdin.

    Attributes:
        plan: the first line.
        head: the second line, once `told` is set; None if the head ended before.
        told: set when there is nothing to wait for before the hosts are started.
        ended: set when stdin has ended.
    """

    def __init__(self) -> None:
        # Without a buffer, whose lock the thread would hold when the interpreter ends.
        self._stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
        self.plan = msgspec.json.decode(self._stdin.readline(), type=Plan)
        self.head: HeadAt | None = None
        self.told = threading.Event()
        self.ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        if line := self._stdin.readline():
            self.head = msgspec.json.decode(line, type=HeadAt)
            self.told.set()
            self._stdin.read()
        self.ended.set()
        self.told.set()


def _connected(plan: Plan) -> Any:
    """Connect to the cluster of RAY_ADDRESS, or to that of this machine, and return the module `ray`."""
    import ray
    import ray.util

    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        raise _Failed(
            f"RAY_ADDRESS={address} is for Ray Client: run this on a machine of the cluster, and set RAY_ADDRESS to "
            "HOST:6379 or leave it out"
        )
    environment = {"working_dir": plan.code} if plan.code else {}
    try:
        if address != "auto":
            _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=environment)
    except OSError as error:  # ConnectionError is one
        if address == "auto":
            raise _Failed(
                "no Ray cluster runs on this machine: `ray start --head` starts one, `ray start --address=HOST:6379` "
                "makes this machine a part of another, and RAY_ADDRESS=HOST:PORT names one that it is a part of"
            ) from None
        raise _Failed(
            f"there is no Ray cluster at RAY_ADDRESS={address} ({error}): `ray start --head` starts one on this machine"
        ) from None
    except Exception as error:  # Ray raises errors of many kinds
        raise _Failed(f"cannot connect to Ray at {address}: {type(error).__name__}: {error}") from error
    return ray


def _reach(address: str) -> None:
    """Connect to HOST:PORT and close again: Ray itself would try for many minutes.

    Raises:
        OSError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()


class Hosts:
    """Places the hosts, runs them, and runs them again when they end.

    Args:
        ray: the module, connected.
        orders: from the head.
        say: tells the head news: a level and a text.
    """

    def __init__(self, ray: Any, orders: Orders, say: Any) -> None:
        self._ray = ray
        self._orders = orders
        self._plan = orders.plan
        self._say = say
        self._token = secrets.token_hex(6)
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}
        """The host of each run."""
        self._began: dict[int, float] = {}
        """When each host was run last."""
        self._again: dict[int, float] = {}
        """When to run a host again."""
        self._pauses: dict[int, float] = {}
        """How long to wait before a host that fails once more is run again."""
        self._lost: dict[int, float] = {}
        """Hosts whose actors Ray is to start again, and when that was said last."""

    def run(self) -> None:
        """Return when stdin has ended."""
        group = self._ray.util.placement_group(
            [{"CPU": self._plan.workers}] * self._plan.hosts, strategy="STRICT_SPREAD"
        )
        try:
            if not self._placed(group):
                return
            self._orders.told.wait()
            if self._orders.head is None:
                return
            head = self._address(self._orders.head, group)
            self._start(group)
            self._say("info", f"Ray starts {_count(self._plan.hosts, 'host')} for the head at {head}")
            for host in range(self._plan.hosts):
                self._run(host, head)
            while not self._orders.ended.is_set():
                self._look(head)
        finally:
            self._end(group)

    def _placed(self, group: Any) -> bool:
        """Wait until each host has a node. Return False if the head ended before."""
        began, said, before = time.monotonic(), 0.0, ""
        while not group.wait(0.5):
            if self._orders.ended.is_set():
                return False
            now = time.monotonic()
            if now - began < _SOON:
                continue
            text = self._waiting()
            if text != before or now - said > _AGAIN:
                self._say("warning", text)
                said, before = now, text
        return True

    def _waiting(self) -> str:
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        has = ", ".join(f"{node['NodeManagerAddress']} with {node['Resources']['CPU']:.0f} CPUs" for node in nodes[:8])
        more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
        free = self._ray.available_resources().get("CPU", 0)
        plan = self._plan
        return (
            f"waiting for Ray: {_count(plan.hosts, 'host')} need {_count(plan.hosts, 'node')} with "
            f"{_count(plan.workers, 'free CPU')} each, and the cluster has {_count(len(nodes), 'node')}: "
            f"{has or 'none'}{more}; {free:.0f} CPUs are free. Add nodes (`ray start --address=...`), end other jobs, "
            "or start again with fewer --hosts or --workers-per-host"
        )

    def _address(self, head: HeadAt, group: Any) -> str:
        """Return the head's address for the hosts."""
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        own = address[self._ray.get_runtime_context().get_node_id()]
        table = self._ray.util.placement_group_table(group)
        others = {address[node] for node in table["bundles_to_node_id"].values()} - {own}
        if head.local and others:
            raise _Failed(
                f"the head listens on {head.host}, and hosts on {', '.join(sorted(others))} do not reach it: give "
                "--bind tcp://0.0.0.0:5555, with --keys or --insecure"
            )
        host = own if head.host == "*" else head.host
        return f"tcp://[{host}]:{head.port}" if ":" in host else f"tcp://{host}:{head.port}"

    def _start(self, group: Any) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as At

        actor = self._ray.remote(RayHost)
        for host in range(self._plan.hosts):
            place = At(placement_group=group, placement_group_bundle_index=host)
            options = {"num_cpus": self._plan.workers, "max_restarts": -1, "max_task_retries": 0}
            self._actors.append(actor.options(scheduling_strategy=place, **options).remote())

    def _run(self, host: int, head: str) -> None:
        self._again.pop(host, None)
        self._began[host] = time.monotonic()
        self._runs[self._actors[host].run.remote(self._plan, head, f"{self._token}-{host}")] = host

    def _look(self, head: str) -> None:
        """Wait a moment for hosts that end, and run them again after a pause."""
        now = time.monotonic()
        for host in [host for host, at in self._again.items() if now >= at]:
            self._run(host, head)
        for host in self._runs.values():
            if host in self._lost and now - self._began[host] > _SOON:
                del self._lost[host]
        if not self._runs:
            self._orders.ended.wait(0.2)
            return
        done, _ = self._ray.wait(list(self._runs), timeout=0.5)
        for run in done:
            host = self._runs.pop(run)
            self._ended(host, run, time.monotonic())

    def _ended(self, host: int, run: Any, now: float) -> None:
        name = f"host {host + 1} of {self._plan.hosts} on Ray"
        try:
            ended: Ended = self._ray.get(run)
        except self._ray.exceptions.RayActorError as error:
            self._again[host] = now + 1.0
            if host not in self._lost:
                self._lost[host] = now
                self._say("error", f"{name} is lost, and Ray starts it again: {_first_line(error)}")
            elif now - self._lost[host] > _AGAIN:
                self._lost[host] = now
                self._say("warning", f"{name} is lost: {self._waiting()}")
            return
        except Exception as error:  # whatever the actor raised
            level, how = "error", f"failed, and is tried again: {type(error).__name__}: {error}"
        else:
            if self._orders.ended.wait(0.5):
                return  # it ended because the head did
            level = "error" if ended.status else "info"
            how = f"ended with status {ended.status}, and is started again: {_reason(ended.said)}"
        self._say(level, f"{name} {how}")
        pause = self._pauses.get(host, 1.0) if now - self._began[host] < _LONGEST_PAUSE else 1.0
        self._again[host] = now + pause
        self._pauses[host] = min(2 * pause, _LONGEST_PAUSE)

    def _end(self, group: Any) -> None:
        """Let the hosts end, which the head has told to, and remove everything."""
        with contextlib.suppress(Exception):  # the cluster may be gone, and the job's end removes all of it too
            if self._runs:
                self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=_END)
            for actor in self._actors:
                self._ray.kill(actor, no_restart=True)
            self._ray.util.remove_placement_group(group)


def _reason(said: str) -> str:
    """Return what a host said last, without the lines of its log that only tell how far it was."""
    return "\n".join(line for line in said.splitlines() if " INFO " not in line[:40]).strip() or "it did not say why"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    main()
