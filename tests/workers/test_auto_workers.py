"""`serve --workers auto`: the number of workers follows the load, settles, and never changes the stream."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock_proto.messages import ScaleHostsRequest, ScaleRequest
from penstock_proto.status.figures import CpuUse, Figures, WorkerShares
from penstock_proto.status.status_history import History
from penstock_proto.status.verdict import verdict
from penstock_server.coordinator.model.workers import Workers
from penstock_server.scaling import auto_workers
from penstock_server.scaling.auto_workers import CALM, LOOKED, AutoWorkers, Decision, _useful
from penstock_server.scaling.scale_requests import ScaleRequests
from tests.conftest import Daemon, Serve, wait_until

KEY = ("stream",)


@dataclass
class Model:
    """A model of a host, a feed and a trainer. A second of the clock is a second of work.

    Attributes:
        each: batches per second that one worker makes.
        demand: batches per second that the trainer takes if it never waits.
        cpu: CPUs that a busy worker uses. For the rest of the time it waits for files.
        most: the most batches per second that the disk allows.
        idle_cpus: the host's idle CPUs while no worker works.
    """

    each: float = 10.0
    demand: float = 75.0
    cpu: float = 1.0
    cpus: int = 16
    lanes: int | None = 16
    most: float = float("inf")
    idle_cpus: float = 16.0
    others: int = 0
    workers: int = 2
    now: float = 0.0
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    _figures: tuple[object, Figures] | None = None
    """The latest figures, with the state that they belong to. Most seconds are like the one before."""

    def __post_init__(self) -> None:
        self.decides = AutoWorkers(self.cpus)

    @property
    def could(self) -> float:
        """Batches per second that the workers can make."""
        here = self.workers + self.others
        usable = here if self.lanes is None else self.lanes / -(-self.lanes // here)
        return min(self.each * usable, self.most)

    def figures(self) -> Figures:
        now = (self.each, self.demand, self.cpu, self.cpus, self.lanes, self.most, self.others, self.workers)
        if self._figures is None or self._figures[0] != now:
            self._figures = now, self._look()
        return self._figures[1]

    def _look(self) -> Figures:
        here = self.workers + self.others
        rate = min(self.could, self.demand)
        busy = min(1.0, rate / (self.each * here)) if rate < self.most else 1.0
        cpu = min(1.0, rate / (self.each * here)) * self.cpu
        shares = tuple(WorkerShares(n, 0.9 * busy, 1 - busy, cpu, 0.0) for n in range(here))
        waiting = 1 - rate / self.demand
        free = max(0.0, self.idle_cpus - cpu * here)
        return Figures(
            url="", transport="local", consumer="NumPy", seconds=LOOKED, batches=round(1000 * rate * LOOKED), samples=1,
            nbytes=1, first_batch_seconds=0, waiting=waiting, receiving=0, step=1 - waiting, workers=shares,
            daemon_cpu=0.05, consumer_cpu=0, cpus=self.cpus, lanes=self.lanes, slots=1000,
            machine=CpuUse(self.cpus, self.cpus, free, free, 0.0),
        )  # fmt: skip

    def run(self, seconds: float) -> list[int]:
        """Let `seconds` seconds pass. Return the numbers of workers that were tried."""
        tried = []
        for _ in range(round(seconds)):
            self.now += 1
            if self.now < self.decides.since + LOOKED:
                continue
            decision = self.decides.decide(self.now, self.workers, {KEY: self.figures()})
            if decision is not None:
                assert decision.workers != self.workers
                self.workers = decision.workers
                self.decisions.append((self.now, decision))
                self.decides.changed(self.now)
                tried.append(self.workers)
        return tried


def test_workers_are_added_until_the_trainer_does_not_wait() -> None:
    model = Model()
    assert model.run(60) == [4, 8]
    assert model.decisions[0][1].why == "the trainer waits 73 % of the time, and workers are busy 100 %"
    assert not model.run(3600)


def test_a_step_is_no_larger_than_what_is_needed() -> None:
    model = Model(demand=26)
    assert model.run(60) == [3]


def test_a_trainer_that_needs_less_gets_fewer_workers_after_a_while_and_more_again_at_once() -> None:
    model = Model()
    model.run(60)
    model.demand = 22
    assert model.run(CALM - 1) == []
    assert model.run(CALM) == [6]
    assert re.fullmatch("no trainer has waited for 60 s, and workers are busy 2[78] %", model.decisions[-1][1].why)
    assert model.run(300) == [4], "three would be busy more than 60 %"
    model.demand = 75
    assert model.run(30) == [8]


def test_with_a_load_that_comes_and_goes_the_number_settles_where_the_load_needs_it() -> None:
    model = Model()
    changes = []
    for _ in range(30):  # three minutes of training, three of something lighter
        model.demand = 75
        changes.append(len(model.run(180)))
        model.demand = 5
        changes.append(len(model.run(180)))
    assert sum(changes) <= 25
    assert sum(changes[-20:]) <= 2
    assert model.workers == 8


def test_workers_that_do_not_help_are_taken_back_and_tried_less_and_less_often() -> None:
    model = Model(most=25, lanes=None)
    assert model.run(60) == [4, 8, 4]
    assert model.decisions[-1][1].why == "with 8 workers batches come no faster than with 4"
    assert len(model.run(3600)) == 2 * len((60, 120, 240, 480, 960))
    assert len(model.run(3600)) <= 2
    assert model.workers == 4


def test_a_step_is_not_judged_before_the_new_workers_have_lanes() -> None:
    model = Model()
    assert model.run(10) == [4]
    idle = tuple(WorkerShares(n, 0.9 if n < 2 else 0.0, 0.0 if n < 2 else 1.0, 0.5, 0.0) for n in range(4))
    before = dataclasses.replace(Model().figures(), workers=idle)
    for now in range(20, 400):
        assert model.decides.decide(now, 4, {KEY: before}) is None
    model.now = 400
    assert model.run(60) == [8]


def test_workers_that_help_too_little_are_taken_back() -> None:
    model = Model(most=22, lanes=None)
    assert model.run(60) == [4, 2]
    assert model.decisions[-1][1].why == "with 4 workers batches come only 10 % faster than with 2"


def test_cpus_are_the_limit_unless_workers_wait_for_something_else() -> None:
    computing = Model(cpus=4, idle_cpus=4, demand=1000, lanes=None)
    computing.run(300)
    assert computing.workers in (3, 4)
    waiting = Model(cpus=4, idle_cpus=4, demand=1000, cpu=0.02, lanes=None)
    waiting.run(300)
    assert waiting.workers == 4 * 4, "at most four for each CPU"


def test_cpus_that_others_use_are_not_free() -> None:
    model = Model(cpus=8, idle_cpus=2.2, demand=1000)
    model.run(300)
    assert model.workers == 2


def test_there_are_no_more_workers_than_lanes() -> None:
    model = Model(lanes=5, demand=1000)
    assert model.run(300) == [5]


def test_a_limit_of_the_daemon_is_not_tried_again() -> None:
    model = Model()
    model.decides.limit(3)
    assert model.run(300) == [3]
    assert not model.run(3600)


def test_workers_of_other_hosts_count() -> None:
    model = Model(others=4, workers=1)
    assert model.run(60) == [4]


def test_one_worker_stays() -> None:
    model = Model(workers=3, demand=0.1)
    model.run(1000)
    assert model.workers == 1


def test_while_nobody_reads_nothing_changes_and_calm_is_not_counted() -> None:
    decides = AutoWorkers(8)
    model = Model(workers=8, demand=1)
    assert decides.decide(100, 8, {KEY: model.figures()}) is None
    assert decides.decide(150, 8, {}) is None
    assert decides.decide(170, 8, {KEY: model.figures()}) is None


@pytest.mark.parametrize(
    ("change", "limit"), [({"slots": 1}, "memory"), ({"sending_share": 1.0, "transport": "tcp"}, "transport")]
)
def test_where_workers_are_not_the_limit_none_are_added(change: dict[str, object], limit: str) -> None:
    figures = dataclasses.replace(Model().figures(), **change)  # type: ignore[arg-type]
    if limit == "memory":
        shares = tuple(WorkerShares(n, 0.3, 0.7, 0.3, 0.0) for n in range(2))
        figures = dataclasses.replace(figures, workers=shares, ahead=0.7)
    assert verdict(figures).limit == limit
    assert AutoWorkers(8).decide(100, 2, {KEY: figures}) is None


@settings(max_examples=25)
@given(st.data())
def test_under_any_steady_load_the_number_settles(data: st.DataObject) -> None:
    model = Model(
        each=10 ** data.draw(st.floats(-1, 2)),
        demand=10 ** data.draw(st.floats(-1, 3)),
        cpu=data.draw(st.floats(0.01, 1)),
        cpus=data.draw(st.integers(1, 64)),
        lanes=data.draw(st.none() | st.integers(1, 64)),
        most=10 ** data.draw(st.floats(0, 3)),
        others=data.draw(st.integers(0, 3)),
        workers=data.draw(st.integers(1, 8)),
    )
    model.idle_cpus = data.draw(st.floats(0, model.cpus))
    model.run(3600)
    assert 1 <= model.workers <= max(8, auto_workers.PER_CPU * model.cpus)
    tried = len(model.decisions)
    model.run(3600)
    assert len(model.decisions) - tried <= 6, model.decisions[-10:]


@pytest.mark.parametrize("lanes", [1, 5, 16, 24, None])
def test_with_each_useful_count_the_busiest_worker_has_fewer_lanes(lanes: int | None) -> None:
    counts = _useful(lanes, 40)
    assert counts[0] == 1
    assert counts == sorted(set(counts))
    if lanes is not None:
        loads = [-(-lanes // count) for count in counts]
        assert loads == sorted(set(loads), reverse=True)
        assert loads[-1] == 1


def test_a_history_has_no_figures_while_a_worker_has_not_run_for_all_of_the_time() -> None:
    assert History().figures(0, LOOKED) == {}


# --- a daemon ---

FEED = """
    import time
    import numpy as np
    from penstock_server import Feed
    def slow(split):  # lanes move to new workers where a split has ended
        for i in range(8):
            time.sleep(0.02)
            yield np.array([split, i])
    feed = Feed(slow, splits=range(16 * 10_000), batch_size=4, turn=1)
"""


def tried(daemon: Daemon) -> list[int]:
    """Return the numbers of workers in the log."""
    return [int(after) for after in re.findall(r"workers: \d+, now (\d+): the trainer waits", daemon.stderr())]


def test_a_number_that_a_user_asks_for_does_not_follow_the_load() -> None:
    called: list[Any] = []
    scaling = SimpleNamespace(
        scale=lambda workers, now: called.append((workers, now)) or (3, workers),
        off=lambda: called.append("off"),
    )
    hosts = SimpleNamespace(scale=lambda *asked: called.append(asked) or (1, 2))
    engine = SimpleNamespace(off=lambda: called.append("off"), scale=lambda hosts: (4, hosts))
    requests = ScaleRequests(cast(Any, scaling), cast(Any, scaling), cast(Any, engine), cast(Any, hosts), Workers(3))
    assert requests.scale(ScaleRequest(5)) == (3, 5)
    requests.scale_by(-1)
    assert called == ["off", (5, False), "off", (2, False)]
    called.clear()
    assert requests.scale(ScaleRequest(2, now=True, host="b")) == (1, 2)
    assert called == [("b", 2, True), "off"], "the workers of hosts are those of an engine's hosts"
    assert requests.scale(ScaleHostsRequest(6)) == (4, 6)


def test_a_daemon_adds_workers_while_its_trainer_waits_and_the_stream_is_the_same(serve: Serve) -> None:
    daemon = serve(FEED, workers="auto")
    most = min(8, auto_workers.PER_CPU * len(os.sched_getaffinity(0)))  # workers sleep, and need no CPU
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        for turn, lane in itertools.product(range(20_000), range(16)):
            split, first = lane + 16 * (turn // 2), 4 * (turn % 2)
            assert next(batches).tolist() == [[split, first + i] for i in range(4)]
            if tried(daemon)[-1:] >= [most]:
                break
        wait_until(lambda: len(daemon.workers()) >= most)
        assert f"workers  {len(daemon.workers())}, adjusted to the load" in penstock_command("status", daemon.url)
        assert penstock_command("scale", daemon.url, "3").endswith("-> 3\n")
        assert "the number of workers is no longer adjusted" in daemon.stderr()
        assert "adjusted to the load" not in penstock_command("status", daemon.url)


@pytest.mark.parametrize("given", ["many", "-1", "5000"])
def test_another_number_of_workers_is_refused(given: str) -> None:
    command = [sys.executable, "-m", "penstock_server", "serve", "feeds.py:feed", "--workers", given]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert f"must be a number from 0 to 4096, or auto, got '{given}'" in refused.stderr


def test_a_private_daemon_adjusts_its_workers_too(tmp_path: Path) -> None:
    (tmp_path / "scenes.py").write_text(textwrap.dedent(FEED))
    with penstock.connect(f"{tmp_path}/scenes.py:feed", workers="auto") as connection:
        assert next(connection.batches()).shape == (4, 2)
        children = [process.cmdline() for process in psutil.Process().children()]
        assert any(words[-1:] == ["--until-stdin-closes"] and "auto" in words for words in children)
    with pytest.raises(ValueError, match=r'must be 0 .* or "auto"'):
        penstock.connect(f"{tmp_path}/scenes.py:feed", workers="some")  # type: ignore[arg-type]


def penstock_command(*words: str) -> str:
    command = [sys.executable, "-m", "penstock_server", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
