"""The hosts on a Ray cluster: finds a node for each, runs it there, and runs it again when it ends.

Each host has its own placement group, so that hosts can come and go one at a time. To keep hosts apart, a group avoids
nodes that other hosts use. Groups that were made at the same time may still get the same node. Then all but one of them
are placed again.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .host import RayHost
from .orders import Ended, HeadAt, Plan

SOON = 3.0
"""Seconds without a node after which the log says what is missing."""
AGAIN = 60.0
"""Seconds between two log lines about that, unless the text changes."""
LONGEST_PAUSE = 60.0
"""Maximum seconds before a host that failed is tried again."""
LEAVING = 40.0
"""Seconds that a host has to hand over its work and end: more than --grace of `penstock join`."""
END = 3.0
"""Seconds that hosts have to end after the head."""
NODE = "ray.io/node-id"
"""Ray's label of each node."""
LOOK = 0.5
"""Seconds between two looks."""

Say = Callable[[str, str], None]


class HeadUnreachable(Exception):
    """Hosts cannot reach the head; the text says why and what to do."""


@dataclass(eq=False)
class _Host:
    """A host.

    Attributes:
        name: its name at the head.
        group: its placement group.
        avoids: the nodes that the group avoids.
        since: when the group was made, or the node was lost.
        node: its node; "" while it has none.
        actor: the actor that runs it, once the head is known.
        run: the call that runs it now, or None.
        began: when its last run began.
        again: when to run it again, if it has ended.
        pause: seconds to wait before it is run again if it fails once more.
        lost: when the loss of its actor was reported, if it is lost.
        leaves: when it was told to leave, if it was.
    """

    name: str
    group: Any
    avoids: frozenset[str]
    since: float = field(default_factory=time.monotonic)
    node: str = ""
    actor: Any = None
    run: Any = None
    began: float = 0.0
    again: float | None = None
    pause: float = 1.0
    lost: float | None = None
    leaves: float | None = None


class PlacedHosts:
    """All hosts that are wanted, each with its placement group and its actor.

    Args:
        ray: the module, connected.
        plan: what to run. `look` gets the number of hosts.
        say: sends the head news: a level and a text.
        over: set when the head has ended.
    """

    def __init__(self, ray: Any, plan: Plan, say: Say, over: threading.Event) -> None:
        self._ray = ray
        self._plan = plan
        self._say = say
        self._over = over
        self._can_avoid = "bundle_label_selector" in inspect.signature(ray.util.placement_group).parameters
        """Whether this version of Ray places groups by labels. If not, several hosts may get the same node."""
        self._hosts: dict[int, _Host] = {}
        self._wanted = 0
        self._waiting = ""
        self._said = 0.0

    def look(self, wanted: int, head: HeadAt | None) -> None:
        """Do the next step: keep `wanted` hosts, and run them for the head once it is known. Takes half a second.

        Raises:
            HeadUnreachable: hosts have nodes that cannot reach the head.
        """
        self._wanted = wanted
        self._have(wanted)
        for number, host in list(self._hosts.items()):
            if host.leaves is not None:
                self._let_go(number, host)
        for host in self._hosts.values():
            if not host.node and host.leaves is None:
                self._place(host)
        self._say_what_is_missing()
        if head is not None:
            self._start(head)
        self._hear()

    def end(self) -> None:
        """Wait for the hosts to end, as the head has told them to, and remove everything."""
        with contextlib.suppress(Exception):  # the cluster may be gone, and the job's end removes all of it too
            runs = [host.run for host in self._hosts.values() if host.run is not None]
            if runs:
                self._ray.wait(runs, num_returns=len(runs), timeout=END)
            for host in self._hosts.values():
                self._remove(host)

    def _have(self, wanted: int) -> None:
        """Make missing hosts, and let surplus hosts leave: first those without a node, then the last ones."""
        staying = sorted(number for number, host in self._hosts.items() if host.leaves is None)
        staying.sort(key=lambda number: not self._hosts[number].node)
        for number in staying[wanted:]:
            self._leave(self._hosts[number])
        for _ in range(len(staying), wanted):
            number = next(number for number in itertools.count(1) if number not in self._hosts)
            self._hosts[number] = _Host(f"{self._plan.name}-{number}", *self._new_group())

    # --- places ---

    def _new_group(self) -> tuple[Any, frozenset[str]]:
        """Make a placement group for a host, and return it with the nodes that it avoids."""
        avoids = self._used() if self._can_avoid else frozenset()
        options = {"bundle_label_selector": [{NODE: f"!in({','.join(sorted(avoids))})"}]} if avoids else {}
        return self._ray.util.placement_group([{"CPU": self._plan.workers}], **options), avoids

    def _used(self) -> frozenset[str]:
        """Return the nodes that have a host."""
        return frozenset(host.node for host in self._hosts.values() if host.node)

    def _place(self, host: _Host) -> None:
        """Note where the host's group was placed. Make another group if that node has a host already, or if the group
        avoids a node that has become free."""
        table = self._ray.util.placement_group_table(host.group)
        used = self._used()
        if table["state"] == "CREATED":
            node = table["bundles_to_node_id"][0]
            if host.actor is not None or node not in used or node in host.avoids or not self._can_avoid:
                host.node = node  # perhaps a shared one, if this version of Ray ignores labels
                return
        elif host.actor is not None or host.avoids <= used:
            return
        self._ray.util.remove_placement_group(host.group)
        host.group, host.avoids = self._new_group()

    def _say_what_is_missing(self) -> None:
        now = time.monotonic()
        missing = [host for host in self._hosts.values() if not host.node and host.leaves is None]
        if not any(now - host.since > SOON for host in missing):
            self._waiting = "" if not missing else self._waiting
            return
        text = self._what_is_missing(len(missing))
        if text != self._waiting or now - self._said > AGAIN:
            self._say("warning", text)
            self._waiting, self._said = text, now

    def _what_is_missing(self, missing: int) -> str:
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        has = ", ".join(f"{node['NodeManagerAddress']} with {node['Resources']['CPU']:.0f} CPUs" for node in nodes[:8])
        more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
        free = self._ray.available_resources().get("CPU", 0)
        placed = self._wanted - missing
        fewer = f"`penstock scale URL --hosts {placed}`" if placed > 0 else "a smaller --workers-per-host"
        cpus = _count(self._plan.workers, "free CPU")
        needs = f"needs a node of its own with {cpus}" if missing == 1 else f"need a node each with {cpus}"
        return (
            f"waiting for Ray: {missing} of {_count(self._wanted, 'host')} {needs}, and the cluster has "
            f"{_count(len(nodes), 'node')}: {has or 'none'}{more}; {free:.0f} CPUs are free. Add nodes (`ray start "
            f"--address=...`), end other jobs, or ask for less ({fewer})"
        )

    # --- runs ---

    def _start(self, head: HeadAt) -> None:
        """Start the hosts that have a node, and restart those that have ended."""
        now = time.monotonic()
        started, address = 0, ""
        for host in self._hosts.values():
            if host.leaves is not None or host.run is not None or not (host.actor or host.node):
                continue
            if host.again is not None and now < host.again:
                continue
            try:
                address = self._address(head, host.node)
            except HeadUnreachable as error:
                if not any(other.actor for other in self._hosts.values()):
                    raise
                self._say("error", str(error))
                host.again = now + LONGEST_PAUSE
                continue
            if host.actor is None:
                host.actor = self._actor(host)
                started += 1
            host.began, host.again = now, None
            host.run = host.actor.run.remote(self._plan, address, host.name)
        if started:
            self._say("info", f"Ray starts {_count(started, 'host')} for the head at {address}")

    def _actor(self, host: _Host) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as At

        place = At(placement_group=host.group, placement_group_bundle_index=0)
        return (
            self._ray.remote(RayHost)
            .options(
                scheduling_strategy=place,
                num_cpus=self._plan.workers,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=2,  # so that it can be told to leave
            )
            .remote()
        )

    def _address(self, head: HeadAt, node: str) -> str:
        """Return the head's address for a host on this node."""
        address = {one["NodeID"]: one["NodeManagerAddress"] for one in self._ray.nodes()}
        own = address[self._ray.get_runtime_context().get_node_id()]
        if head.local and address.get(node, own) != own:
            raise HeadUnreachable(
                f"the head listens on {head.host}, and hosts on {address[node]} do not reach it: give "
                "--bind tcp://0.0.0.0:5555, with --keys or --insecure"
            )
        host = own if head.host == "*" else head.host
        return f"tcp://[{host}]:{head.port}" if ":" in host else f"tcp://{host}:{head.port}"

    def _hear(self) -> None:
        """Wait a moment for hosts to end, and handle those that did."""
        now = time.monotonic()
        for host in self._hosts.values():
            if host.lost is not None and host.run is not None and now - host.began > SOON:
                host.lost = None
        runs = {host.run: (number, host) for number, host in self._hosts.items() if host.run is not None}
        if not runs:
            self._over.wait(LOOK)
            return
        done, _ = self._ray.wait(list(runs), timeout=LOOK)
        for run in done:
            number, host = runs[run]
            host.run = None
            if host.leaves is not None:
                self._gone(number, host)
            else:
                self._ended(host, run, time.monotonic())

    def _ended(self, host: _Host, run: Any, now: float) -> None:
        try:
            ended: Ended = self._ray.get(run)
        except self._ray.exceptions.RayActorError as error:
            self._is_lost(host, error, now)
            return
        except Exception as error:  # any error of the actor
            level, how = "error", f"failed, and is tried again: {type(error).__name__}: {error}"
        else:
            if self._over.wait(LOOK):
                return  # it ended because the head did
            level = "error" if ended.status else "info"
            how = f"ended with status {ended.status}, and is started again: {_reason(ended.said)}"
        self._say(level, f"host {host.name} on Ray {how}")
        if now - host.began >= LONGEST_PAUSE:
            host.pause = 1.0
        host.again = now + host.pause
        host.pause = min(2 * host.pause, LONGEST_PAUSE)

    def _is_lost(self, host: _Host, error: Exception, now: float) -> None:
        """Handle a lost actor. Ray starts it again, perhaps on another node."""
        host.again = now + 1.0
        host.node, host.since = "", now
        if host.lost is None:
            self._say("error", f"host {host.name} on Ray is lost, and Ray starts it again: {_first_line(error)}")
            host.lost = now

    # --- the end ---

    def _leave(self, host: _Host) -> None:
        host.leaves = time.monotonic()
        if host.run is not None and host.lost is None:
            host.actor.leave.remote()

    def _let_go(self, number: int, host: _Host) -> None:
        """Remove a host that has left, or takes too long to leave."""
        assert host.leaves is not None
        if host.run is None or host.lost is not None or time.monotonic() - host.leaves > LEAVING:
            self._gone(number, host)

    def _gone(self, number: int, host: _Host) -> None:
        self._remove(host)
        del self._hosts[number]

    def _remove(self, host: _Host) -> None:
        if host.actor is not None:
            self._ray.kill(host.actor, no_restart=True)
        self._ray.util.remove_placement_group(host.group)


def _reason(said: str) -> str:
    """Return a host's last output, without log lines that only show its progress."""
    return "\n".join(line for line in said.splitlines() if " INFO " not in line[:40]).strip() or "it did not say why"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
