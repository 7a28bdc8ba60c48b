"""How the Ray driver places hosts, runs them and lets them go, with a simulated Ray that only keeps books."""

from __future__ import annotations

import re
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock_server.on_ray import placed_hosts
from penstock_server.on_ray.orders import Ended, HeadAt, Plan
from penstock_server.on_ray.placed_hosts import HeadUnreachable, PlacedHosts

HEAD = HeadAt("*", 5555, local=False)


class ActorLost(Exception):
    """Stands in for Ray's RayActorError."""


class Run:
    """A call of an actor's `run`."""

    def __init__(self, actor: Actor, arguments: tuple[Any, ...]) -> None:
        self.actor = actor
        self.name = arguments[2]
        self.outcome: Ended | Exception | None = None


class Actor:
    """A host's actor."""

    def __init__(self, ray: Ray, options: dict[str, Any]) -> None:
        self.group = options["scheduling_strategy"].placement_group
        self.alive, self.left = True, False
        self.run = SimpleNamespace(remote=lambda *arguments: ray.begin(self, arguments))
        self.leave = SimpleNamespace(remote=lambda: setattr(self, "left", True))


class Ray:
    """A cluster whose nodes have two CPUs each. The first node runs the driver, and has no free CPUs.

    `labels` are "obeyed" when it places groups, "ignored", or "unknown" to this version.
    """

    def __init__(self, nodes: int, labels: str) -> None:
        self._obeys = labels == "obeyed"
        self.free = {"n0": 0} | {f"n{number}": 2 for number in range(1, nodes + 1)}
        self.groups: list[SimpleNamespace] = []
        self.runs: list[Run] = []
        self.actors: list[Actor] = []
        self.exceptions = SimpleNamespace(RayActorError=ActorLost)
        self.util = SimpleNamespace(
            placement_group=(lambda bundles: self._group(bundles)) if labels == "unknown" else self._group,
            placement_group_table=self._table,
            remove_placement_group=self._removed,
        )

    def _group(self, bundles: list[dict[str, int]], bundle_label_selector: list[dict[str, str]] | None = None) -> Any:
        avoids = re.findall(r"n[0-9]+", bundle_label_selector[0]["ray.io/node-id"]) if bundle_label_selector else []
        self.groups.append(SimpleNamespace(cpus=bundles[0]["CPU"], avoids=avoids, node=""))
        return self.groups[-1]

    def _table(self, group: Any) -> dict[str, Any]:
        return {"state": "CREATED" if group.node else "PENDING", "bundles_to_node_id": {0: group.node}}

    def _removed(self, group: Any) -> None:
        self.groups.remove(group)
        if group.node:
            self.free[group.node] += group.cpus

    def place(self) -> None:
        """Place groups as Ray does, as closely as they fit."""
        for group in self.groups:
            for node, free in self.free.items():
                if not group.node and free >= group.cpus and not (self._obeys and node in group.avoids):
                    group.node = node
                    self.free[node] -= group.cpus

    def begin(self, actor: Actor, arguments: tuple[Any, ...]) -> Run:
        self.runs.append(Run(actor, arguments))
        return self.runs[-1]

    def remote(self, kind: type) -> Any:
        def made(**options: Any) -> Any:
            self.actors.append(Actor(self, options))
            return SimpleNamespace(remote=lambda: self.actors[-1])

        return SimpleNamespace(options=made)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "NodeManagerAddress": f"10.0.0.{node[1:]}", "Alive": True, "Resources": {"CPU": 2.0}}
            for node in self.free
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": float(sum(self.free.values()))}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "n0")

    def wait(self, runs: list[Run], timeout: float, num_returns: int = 1) -> tuple[list[Run], list[Run]]:
        return [run for run in runs if run.outcome is not None], []

    def get(self, run: Run) -> Ended:
        if isinstance(run.outcome, Exception):
            raise run.outcome
        assert run.outcome is not None
        return run.outcome

    def kill(self, actor: Actor, no_restart: bool) -> None:
        assert no_restart
        actor.alive = False


class World:
    """A driver and its cluster. `look` runs one look of the driver, after Ray has placed what it can."""

    def __init__(self, nodes: int, *, workers: int = 2, labels: str = "obeyed") -> None:
        self.ray = Ray(nodes, labels)
        self.said: list[str] = []
        over = threading.Event()
        over.wait = lambda timeout=None: False  # type: ignore[method-assign]
        plan = Plan("ray", 1, workers, "", ["feeds:feed"], [], {})
        self.hosts = PlacedHosts(self.ray, plan, lambda level, text: self.said.append(f"{level}: {text}"), over)

    def look(self, wanted: int, times: int = 4, head: HeadAt | None = HEAD) -> None:
        for _ in range(times):
            self.hosts.look(wanted, head)
            self.ray.place()

    @property
    def running(self) -> dict[str, str]:
        """The node of each running host."""
        return {run.name: run.actor.group.node for run in self.ray.runs if run.outcome is None and run.actor.alive}

    def ends(self, name: str, outcome: Ended | Exception) -> None:
        run = next(run for run in self.ray.runs if run.name == name and run.outcome is None)
        run.outcome = outcome


@pytest.fixture(autouse=True)
def strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide Ray's module of strategies, and do not wait."""
    module = ModuleType("ray.util.scheduling_strategies")
    module.PlacementGroupSchedulingStrategy = lambda **given: SimpleNamespace(**given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", module)
    monkeypatch.setattr(placed_hosts, "SOON", -1.0)


def test_each_host_has_a_node_of_its_own_though_two_would_fit_on_one() -> None:
    world = World(3, workers=1)
    world.look(3, times=8)
    assert sorted(world.running) == ["ray-1", "ray-2", "ray-3"]
    assert sorted(world.running.values()) == ["n1", "n2", "n3"]
    assert world.ray.free == {"n0": 0, "n1": 1, "n2": 1, "n3": 1}
    assert "info: Ray starts 1 host for the head at tcp://10.0.0.0:5555" in world.said


@pytest.mark.parametrize("labels", ["unknown", "ignored"])
def test_where_ray_cannot_keep_hosts_apart_they_share_nodes(labels: str) -> None:
    world = World(1, workers=1, labels=labels)
    world.look(2, times=8)
    assert world.running == {"ray-1": "n1", "ray-2": "n1"}


def test_hosts_that_have_a_node_begin_and_the_others_wait_for_one_that_becomes_free() -> None:
    world = World(2)
    world.look(3)
    assert sorted(world.running) == ["ray-1", "ray-2"]
    (waits,) = {text for text in world.said if "1 of 3" in text}
    assert waits.startswith("warning: waiting for Ray: 1 of 3 hosts needs a node of its own with 2 free CPUs, and the ")
    assert "; 0 CPUs are free. Add nodes" in waits
    assert "ask for less (`penstock scale URL --hosts 2`)" in waits
    world.ray.free["n3"] = 2
    world.look(3)
    assert sorted(world.running.values()) == ["n1", "n2", "n3"]


def test_a_node_that_another_host_has_left_is_no_longer_avoided() -> None:
    world = World(2)
    world.look(2)
    world.look(3)
    first, _, waits = world.ray.groups
    assert set(waits.avoids) == {"n1", "n2"}
    world.ray.free |= {"n1": 2, "n3": 0}
    first.node = "n3"  # n1 was lost, and is back
    world.ends("ray-1", ActorLost("The actor died"))
    world.look(3)
    assert world.running["ray-3"] == "n1"


def test_a_host_that_is_too_many_is_told_to_leave_and_its_cpus_are_given_back_when_it_has() -> None:
    world = World(3)
    world.look(3)
    world.look(1)
    assert [actor.left for actor in world.ray.actors] == [False, True, True]
    assert sorted(world.running) == ["ray-1", "ray-2", "ray-3"], "they hand over their work first"
    world.look(2)
    world.ends("ray-2", Ended(0, ""))
    world.look(2)
    world.ends("ray-3", Ended(0, ""))
    world.look(2)
    assert sorted(world.running) == ["ray-1", "ray-4"], "a host was wanted again meanwhile"
    assert len(world.ray.groups) == 2
    assert sum(world.ray.free.values()) == 2
    assert not any(text.startswith("error") for text in world.said)


def test_of_hosts_that_are_too_many_one_without_a_node_leaves_first() -> None:
    world = World(2)
    world.look(2)
    world.ray.groups[0].node = ""  # it is lost
    world.ends("ray-1", ActorLost("The actor died"))
    world.look(2)
    world.look(1)
    assert sorted(world.running) == ["ray-2"]
    assert [group.node for group in world.ray.groups] == ["n2"]


def test_a_host_that_does_not_leave_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_hosts, "LEAVING", -1.0)
    world = World(2)
    world.look(2)
    world.look(1)
    assert sorted(world.running) == ["ray-1"]
    assert len(world.ray.groups) == 1


def test_a_host_that_ends_is_run_again_later_and_one_whose_actor_is_lost_where_ray_places_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(2)
    now = [1000.0]
    monkeypatch.setattr(placed_hosts.time, "monotonic", lambda: now[0])
    world.look(1)
    for pause in (1.0, 2.0, 4.0):
        world.ends("ray-1", Ended(1, "no such file"))
        world.look(1)
        now[0] += pause - 0.1
        world.look(1)
        assert not world.running
        now[0] += 0.2
        world.look(1)
        assert list(world.running) == ["ray-1"]
    assert world.said.count("error: host ray-1 on Ray ended with status 1, and is started again: no such file") == 3
    (group,) = world.ray.groups
    group.node = ""  # its node is gone
    world.ends("ray-1", ActorLost("The actor died"))
    world.look(1, times=1)
    assert "error: host ray-1 on Ray is lost, and Ray starts it again: The actor died" in world.said
    now[0] += 2
    world.look(1)
    assert world.ray.groups == [group], "Ray must place it again"
    assert list(world.running) == ["ray-1"]


def test_the_first_host_that_cannot_reach_the_head_ends_the_driver_and_a_later_one_does_not() -> None:
    local = HeadAt("127.0.0.1", 5555, local=True)
    with pytest.raises(HeadUnreachable, match=r"listens on 127.0.0.1, and hosts on 10.0.0.1 do not reach it: give"):
        World(1).look(1, head=local)
    world = World(1)
    world.ray.free["n0"] = 2
    world.look(1, head=local)
    assert world.running == {"ray-1": "n0"}
    world.look(2, head=local)
    assert len(world.running) == 1
    assert sum("do not reach it" in text for text in world.said) == 1


def test_at_the_end_nothing_is_left() -> None:
    world = World(2)
    world.look(3)
    world.hosts.end()
    assert not world.ray.groups
    assert not any(actor.alive for actor in world.ray.actors)
