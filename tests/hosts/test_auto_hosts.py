"""`serve --on ray --hosts MIN:MAX`: the number of hosts follows the load, by the policy that workers have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_proto import StartError
from penstock_proto.status.figures import Figures
from penstock_proto.status.span import Key
from penstock_proto.status.status_shape import HostEngine
from penstock_server.cli.main import main
from penstock_server.coordinator.model.workers import Workers
from penstock_server.hosts.joined_host import JoinedHost
from penstock_server.scaling import host_scaling
from penstock_server.scaling.auto_workers import CALM, LOOKED, AutoWorkers, _useful
from penstock_server.scaling.host_scaling import HostScaling
from penstock_server.status.current_status import CurrentStatus
from tests.conftest import Serve
from tests.hosts.test_join import SLOW
from tests.workers.test_auto_workers import KEY, Model


@dataclass
class Hosts(Model):
    """A model of hosts. Each has several workers, and as many CPUs. The base class is a model of workers.

    Attributes:
        each_host: the number of workers of a host.
        bounds: the fewest and the most hosts.
        hosts: the number of hosts that are there.
        wanted: the number of hosts that were asked for.
        delay: seconds until a host that was asked for comes.
    """

    each_host: int = 4
    bounds: tuple[int, int] = (1, 6)
    hosts: int = 1
    wanted: int = 1
    delay: float = 20.0
    lanes: int | None = None

    def __post_init__(self) -> None:
        least, most = self.bounds
        each = self.each_host
        self.decides = AutoWorkers(None, step=each, least=least * each, most=most * each)
        self.hosts = self.wanted = max(self.hosts, least)
        self.asked_at = self._came = -math.inf
        self.update()

    def update(self) -> None:
        self.workers = self.hosts * self.each_host
        self.cpus = self.workers + self.others

    def run(self, seconds: float) -> list[int]:
        """Let `seconds` seconds pass. Return the numbers of hosts that were asked for."""
        tried = []
        for _ in range(round(seconds)):
            self.now += 1
            if self.wanted > self.hosts and self.now - self.asked_at >= self.delay:
                self.hosts, self._came = self.wanted, self.now
                self.update()
            if self.now < self.decides.since + LOOKED:
                continue
            seen = {} if self.now < self._came + LOOKED else {KEY: self.figures()}
            coming = (self.wanted - self.hosts) * self.each_host
            decision = self.decides.decide(self.now, self.workers, seen, coming)
            if decision is not None:
                self.decisions.append((self.now, decision))
                asked, rest = divmod(decision.workers, self.each_host)
                assert not rest
                assert self.bounds[0] <= asked <= self.bounds[1]
                assert asked != self.wanted
                assert asked <= self.hosts or self.wanted == self.hosts
                self.wanted, self.asked_at = asked, self.now
                self.hosts = min(self.hosts, asked)
                self.update()
                self.decides.changed(self.now)
                tried.append(asked)
        return tried


def test_hosts_are_added_though_all_cpus_are_busy_until_the_trainer_does_not_wait() -> None:
    model = Hosts(demand=150)
    assert model.run(200) == [2, 4]
    assert model.decisions[0][1].why == "the trainer waits 73 % of the time, and workers are busy 100 %"
    assert not model.run(3600)


def test_there_are_never_more_hosts_than_may_be_and_never_fewer() -> None:
    model = Hosts(demand=10_000, bounds=(2, 3))
    assert model.run(600) == [3]
    model.demand = 0.1
    assert model.run(600) == [2]
    assert not model.run(7200)


def test_hosts_leave_when_fewer_are_enough_for_a_minute() -> None:
    model = Hosts(demand=150)
    model.run(200)
    model.demand = 30
    assert model.run(CALM - 1) == []
    assert model.run(300) == [3, 2]
    model.demand = 150
    assert model.run(60) == [4]


def test_while_a_host_has_not_come_no_more_are_asked_for_and_it_is_not_waited_for_when_nobody_waits() -> None:
    model = Hosts(delay=math.inf)
    assert model.run(7200) == [2]
    model.demand = 20
    assert model.run(CALM) == []
    assert model.run(30) == [1]
    assert model.decisions[-1][1].why == "no trainer has waited for 60 s, and 4 workers have not come yet"
    assert not model.run(7200)


def test_a_host_that_is_lost_is_waited_for_and_nothing_is_judged_meanwhile() -> None:
    model = Hosts(demand=75, bounds=(2, 6))
    assert not model.run(100)
    model.hosts, model.asked_at = 1, model.now  # and Ray starts it again
    model.update()
    assert not model.run(600)
    assert model.hosts == 2


def test_with_a_load_that_comes_and_goes_the_number_of_hosts_settles_where_the_load_needs_it() -> None:
    model = Hosts(delay=100)
    changes = []
    for _ in range(40):
        model.demand = 75
        changes.append(len(model.run(180)))
        model.demand = 5
        changes.append(len(model.run(180)))
    assert sum(changes[-20:]) <= 2
    assert model.hosts == 2


def test_hosts_that_do_not_help_are_given_back_and_tried_less_and_less_often() -> None:
    model = Hosts(most=30, demand=1000)
    assert model.run(60) == [2, 1]
    assert model.decisions[-1][1].why == "with 8 workers batches come no faster than with 4"
    assert len(model.run(3600)) == 2 * len((60, 120, 240, 480, 960))
    assert len(model.run(3600)) <= 2
    assert model.hosts == 1


def test_a_host_is_not_added_whose_workers_would_have_no_lanes() -> None:
    assert not Hosts(lanes=16, each_host=16, demand=1000).run(3600)
    assert Hosts(lanes=64, each_host=16, demand=10_000).run(3600) == [2, 4]
    assert _useful(64, 96, 16) == [16, 32, 64]


@settings(max_examples=25)
@given(st.data())
def test_under_any_steady_load_the_number_of_hosts_settles(data: st.DataObject) -> None:
    least = data.draw(st.integers(1, 4))
    model = Hosts(
        each=10 ** data.draw(st.floats(-1, 2)),
        demand=10 ** data.draw(st.floats(-1, 4)),
        cpu=data.draw(st.floats(0.01, 1)),
        lanes=data.draw(st.none() | st.integers(1, 300)),
        most=10 ** data.draw(st.floats(0, 4)),
        others=data.draw(st.integers(0, 20)),
        each_host=data.draw(st.integers(1, 12)),
        bounds=(least, data.draw(st.integers(least, 12))),
        delay=data.draw(st.sampled_from([0.0, 10.0, 300.0, math.inf])),
    )
    model.run(3600)
    tried = len(model.decisions)
    model.run(3600)
    assert len(model.decisions) - tried <= 6, model.decisions[-10:]


# --- requests for hosts ---


class Engine:
    """Stands in for Ray."""

    name, workers = "ray", 4

    def __init__(self, bounds: tuple[int, int]) -> None:
        self.bounds = bounds
        self.hosts = bounds[0]
        self.asked: list[int] = []

    def scale(self, hosts: int) -> None:
        self.hosts = hosts
        self.asked.append(hosts)


class World:
    """A daemon with an engine. Its figures are those of a model."""

    def __init__(self, bounds: tuple[int, int]) -> None:
        self.engine, self.workers = Engine(bounds), Workers(1, idle=True)
        self.joined: list[Any] = [self.host("ray-1"), self.host("rayleigh"), self.host("by-hand")]
        self.seconds = 0.0
        self.model = Hosts(demand=1000)
        self.scaling = HostScaling(self.engine, self.workers, cast(list[JoinedHost], self.joined))

    @staticmethod
    def host(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, working=True)

    def figures(self, since: float, least: float) -> Mapping[Key, Figures]:
        ran = self.seconds - since >= least
        return {KEY: dataclasses.replace(self.model.figures())} if ran else {}

    def run(self, seconds: int) -> list[int]:
        self.engine.asked.clear()
        for _ in range(seconds):
            self.seconds += 1
            self.scaling.another_second(cast(CurrentStatus, self))
        return self.engine.asked


def test_only_hosts_of_the_engine_are_counted_and_those_that_have_not_come_or_gone_are_waited_for() -> None:
    world = World((1, 6))
    assert world.run(60) == [2]
    world.joined[0].working = False
    assert world.run(60) == [], "two are still to come"
    world.joined[0].working = True
    world.joined += [world.host("ray-2")]
    world.model.hosts = 2
    world.model.update()
    assert world.run(30) == [4]
    world.joined += [world.host(f"ray-{number}") for number in (3, 4, 5)]
    assert world.run(60) == [], "one still has to leave"
    del world.joined[-1]
    world.workers.leaving.add(7)
    assert world.run(60) == [], "and it has workers"


def test_a_number_that_a_user_asks_for_stays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", host_scaling.__name__)
    world = World((1, 6))
    assert world.scaling.described() == HostEngine(name="ray", hosts=1, adjusts=(1, 6))
    assert world.scaling.scale(3) == (1, 3)
    assert world.scaling.described() == HostEngine(name="ray", hosts=3, adjusts=None)
    assert [record.message for record in caplog.records] == [
        "the number of hosts is no longer adjusted",
        "hosts: 1, now 3",
    ]
    assert world.run(600) == []
    assert World((2, 2)).run(600) == [], "the bounds are fixed"


def test_without_an_engine_a_number_of_hosts_is_refused_with_what_to_do() -> None:
    world = World((1, 1))
    none = HostScaling(None, world.workers, [])
    none.another_second(cast(CurrentStatus, world))
    assert none.described() is None
    with pytest.raises(StartError, match=r"started without --on ray, .* run `penstock join` on further hosts"):
        none.scale(3)


def test_a_daemon_without_ray_says_what_to_do(serve: Serve) -> None:
    daemon = serve(SLOW)
    assert "`penstock join` on further hosts, or end it there with SIGTERM" in daemon.scale("--hosts", "3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "3", "8"], "--hosts is the number of hosts, and N is about workers"),
        (["--hosts", "3", "--host", "b"], "--hosts is the number of hosts, and --host is about workers"),
        (["--hosts", "3", "--now"], "--hosts is the number of hosts, and --now is about workers"),
        (["--host", "b"], "give the number of workers, N, or --hosts N"),
        (["--host", "", "3"], "--host needs the name of a host"),
        (["--hosts", "0"], "0 is not in the range 1<=x<=4096"),
        ([], "give the number of workers, N, or --hosts N"),
    ],
)
def test_what_scale_cannot_mean_is_refused(words: list[str], message: str) -> None:
    ran = CliRunner().invoke(main, ["scale", "tcp://127.0.0.1:9", *words])
    assert ran.exit_code == 2
    assert message in ran.output
