"""`penstock bench` says how fast a feed is, where the time goes, and what to do; a cached dataset needs no loader."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import penstock
from penstock.commands.bench import measure
from penstock.commands.bench_report import lines
from penstock.commands.bench_verdict import judged
from penstock_proto.status.figures import Figures, joined
from penstock_proto.status.status_shape import Status
from penstock_proto.status.verdict import verdict
from penstock_server.to_daemon import control
from tests.conftest import Serve
from tests.fakes.figures import FIGURES, IDLE, machine, worker

FEEDS = """
    import time
    import numpy as np
    from penstock_server import Feed

    def cheap(split):
        for i in range(2000):
            yield {"x": np.full(64, 2000 * split + i, np.float32), "y": split}

    def slow(split):
        for i in range(1000):
            time.sleep(0.01)
            yield i

    def bad(split):
        yield 1
        raise ValueError("no such scene")

    cheap = Feed(cheap, splits=range(4), batch_size=10, samples=8000)
    slow = Feed(slow, splits=range(4), batch_size=4)
    bad = Feed(bad, splits=range(2), batch_size=1)
    short = Feed(lambda split: iter(range(10)), splits=[0], batch_size=10, epochs=1)
    once = Feed(range(300), batch_size=10, epochs=1)
"""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock_command", "bench", *arguments], capture_output=True, text=True, timeout=60
    )


def status(url: str) -> Status:
    return control.status(url, 60)


LESS_CPU = {"machine": machine(free=0.45), "workers": (worker(0, 0.95, cpu=0.65), worker(1, 0.95, cpu=0.65))}
BUSY_CPUS = {"machine": machine(free=0.1), "workers": (worker(0, 0.95, cpu=0.95), worker(1, 0.95, cpu=0.95))}
WITHOUT = {"machine": machine(free=1.9), "workers": IDLE, "unmade": 0.2}
KEEPS_UP = {"waiting": 0.02, "step": 0.9}


def parts(*changes: dict[str, Any], seconds: float = 1.0) -> Figures:
    """Return a measurement with one slice for each of `changes`. A slice is like FIGURES, except for its changes."""
    one = dataclasses.replace(FIGURES, seconds=seconds, batches=100, samples=3200, nbytes=5e8)
    slices = tuple(dataclasses.replace(one, **change) for change in changes)
    return dataclasses.replace(joined(slices), slices=slices)


@pytest.mark.parametrize(
    ("slices", "limit"),
    [
        ([{}] * 4, "generator"),
        ([{}] * 10, "generator"),
        ([BUSY_CPUS] * 10, "cpus"),
        ([BUSY_CPUS] * 9 + [LESS_CPU], "cpus"),  # a moment of a slow disk changes nothing
        ([KEEPS_UP] * 10, "consumer"),
        ([WITHOUT] * 8, "transport"),
    ],
)
def test_a_verdict_on_which_the_parts_of_the_time_agree_is_sure(slices: list[dict[str, Any]], limit: str) -> None:
    seen = parts(*slices)
    found = judged(seen)
    assert (found.limit, found.sure) == (limit, True)
    assert found.text == verdict(seen).text
    assert found.shares[limit] >= 0.9


@pytest.mark.parametrize(
    ("slices", "names"),
    [
        ([BUSY_CPUS, LESS_CPU] * 5, ["the CPUs", "the generator"]),
        ([KEEPS_UP] * 5 + [{**KEEPS_UP, "waiting": 0.19}] * 5, ["the consumer", "the generator"]),
        ([WITHOUT] * 5 + [BUSY_CPUS] * 5, ["the generator", "the connection to the consumer"]),
    ],
)
def test_one_that_changes_with_the_moment_asks_for_a_longer_run_and_advises_nothing(
    slices: list[dict[str, Any]], names: list[str]
) -> None:
    found = judged(parts(*slices))
    assert not found.sure
    assert found.text.startswith("Not sure: the limit changed during the measurement.")
    assert found.text.endswith("Measure for longer: --seconds 30.")
    for name in names:
        assert f"{name} (" in found.text
    assert "Add workers" not in found.text
    assert judged(parts(*slices)) == found, "the same figures give the same verdict"
    assert judged(parts(*slices, seconds=2.5)).text.endswith("--seconds 50.")
    assert "A longer run would hardly help" in judged(parts(*slices, seconds=10)).text


def test_a_run_of_a_moment_is_too_short_for_a_verdict() -> None:
    found = judged(parts({}, {}, {}))
    assert (found.limit, found.sure) == ("generator", False)
    assert found.text == (
        "Not sure: 3.0 s is too short to tell. It looks like the generator. Measure for longer: --seconds 30."
    )


def test_other_work_of_the_host_is_named() -> None:
    calm = parts(*[{"machine": machine(free=1.0)}] * 5)
    assert "Meanwhile" not in judged(calm).text
    busy = judged(parts(*[{"machine": machine(free=0.3, stolen=0.3)}] * 5))
    assert busy.limit == "generator", "a CPU is left"
    assert busy.text.endswith(
        "Meanwhile other work on the daemon's host used 0.6 of its 2 CPUs and its hypervisor gave 0.3 to other hosts: "
        "measure again when it is idle."
    )
    unsure = judged(parts(*[{"machine": machine(free=0.3)}] * 2))
    assert "Not sure" in unsure.text
    assert "Meanwhile other work" in unsure.text


def test_slices_are_joined_by_their_length_and_workers_must_live_in_all() -> None:
    one = dataclasses.replace(FIGURES, seconds=1.0, batches=10, samples=40, nbytes=400, waiting=0.2)
    two = dataclasses.replace(one, seconds=3.0, batches=30, waiting=0.6, workers=(worker(1, 0.5, cpu=0.9), worker(2)))
    both = joined([one, two])
    assert (both.seconds, both.batches, both.samples, both.nbytes) == (4.0, 40, 80, 800)
    assert both.waiting == pytest.approx(0.5)
    (lived,) = both.workers
    assert lived.number == 1
    assert lived.generating == pytest.approx((0.9 + 3 * 0.5) / 4)
    assert lived.cpu == pytest.approx((0.3 + 3 * 0.9) / 4)


def test_the_table_shows_the_figures_and_then_the_verdict() -> None:
    *table, empty, text = lines(dataclasses.replace(FIGURES, cached=250.0, others=1, slices=(FIGURES,) * 4))
    assert table == [
        "feed         tcp://127.0.0.1:5555/train (local), read with NumPy for 10.0 s",
        "speed        100 batches/s, 3,200 samples/s, 500 MB/s",
        "first batch  after 0.50 s",
        "consumer     90 % waiting, 10 % receiving, 0 % in its step",
        "worker 0     90 % generating, 10 % collating, 0 % idle, 0 % without a CPU; it used 30 % of a CPU",
        "worker 1     90 % generating, 10 % collating, 0 % idle, 0 % without a CPU; it used 30 % of a CPU",
        "daemon       10 % of a CPU; its host has 2",
        "spread       100 to 100 batches/s in 4 parts of the time",
        "its host     1.2 of 2 CPUs idle, 0 % of a CPU by other work",
        "others       1 other consumer of this daemon: its figures include them",
        "cached       250 batches/s: with an infinitely fast loader this consumer would be 2.50 times as fast",
    ]
    assert empty == ""
    assert text.startswith("The generator is the limit")
    shared = "shared       by 3 jobs: each batch is made once for all of them"
    assert shared in lines(dataclasses.replace(FIGURES, jobs=3))
    over_tcp = dataclasses.replace(FIGURES, transport="tcp", sending_share=0.25)
    assert "consumer     90 % waiting (25 % of that while a batch is coming), 10 % receiving, 0 % in its step" in lines(
        over_tcp
    )


def test_a_running_daemons_feeds_are_measured(serve: Serve) -> None:
    daemon = serve(FEEDS, "cheap", "slow", "bad", "short")
    # The generator is slow. This machine's CPUs may also be busy with other things, and stop the daemon for a moment,
    # which must not be most of the time that is measured.
    seen = measure(daemon.urls["slow"], status=status, seconds=1.5, warmup=0.1)
    assert verdict(seen).limit in ("generator", "cpus")
    assert seen.waiting > 0.5
    assert [worker.number for worker in seen.workers] == [0, 1]
    assert all(worker.generating + worker.cpu_wait > 0.5 > worker.idle + worker.collating for worker in seen.workers)
    assert seen.samples == pytest.approx(4 * seen.batches)
    assert seen.lanes == 4

    # The step is slow. Workers are paused, and their waiting counts as idle.
    seen = measure(daemon.urls["cheap"], status=status, batches=20, warmup=0.05, step=0.05, cached=3)
    assert verdict(seen).limit == "consumer"
    assert seen.batches == 20
    assert seen.step > 0.5 > seen.waiting
    assert all(worker.idle > 0.5 for worker in seen.workers)
    assert seen.cached is not None
    assert seen.cached == pytest.approx(seen.rate, rel=0.5)

    shown = bench(daemon.urls["cheap"], "--seconds", "0.2", "--warmup", "0", "--transport", "tcp", "--json")
    assert shown.returncode == 0, shown.stderr
    said = json.loads(shown.stdout)
    assert (said["transport"], said["consumer"]) == ("tcp", "NumPy")
    assert said["batches"] > 0
    assert said["limit"]
    assert said["verdict"].startswith("Not sure: 0.")
    assert (said["sure"], len(said["slices"])) == (False, 1)

    failed = bench(daemon.urls["bad"], "--warmup", "0")
    assert failed.returncode == 1
    assert "penstock: " in failed.stderr
    assert "ValueError: no such scene" in failed.stderr
    with pytest.raises(penstock.EndOfStream, match="ended after 1 batches, before the measurement began"):
        measure(daemon.urls["short"], status=status, seconds=1)
    with pytest.raises(penstock.UnknownFeed):
        measure(daemon.urls["short"] + "er", status=status)


def test_what_is_measured_while_another_daemon_takes_over_is_measured_again(serve: Serve) -> None:
    daemon = serve(FEEDS, "cheap")
    asked = 0

    def renewed(url: str) -> Status:
        nonlocal asked
        asked += 1
        state = status(url)
        return state if asked > 1 else replace(state, id="another", seconds=state.seconds + 1000)

    seen = measure(daemon.url, status=renewed, seconds=0.3, warmup=0)
    assert asked > len(seen.slices) + 1
    assert seen.seconds >= 0.3
    assert all(one.daemon_cpu >= 0 for one in seen.slices)


def test_a_module_is_measured_with_a_daemon_of_its_own(tmp_path: Any) -> None:
    (tmp_path / "feeds.py").write_text("from penstock_server import Feed\nfeed = Feed(range(100000), batch_size=10)\n")
    page = tmp_path / "bench.html"
    options = "--workers 1 --seconds 0.5 --warmup 0 --cached 2".split()
    said = bench(f"{tmp_path}/feeds.py:feed", *options, "--report", str(page))
    assert said.returncode == 0, said.stderr
    for words in ("feed         tcp://127.0.0.1:", "worker 0 ", "batches/s, ", "cached  ", "first batch  after "):
        assert words in said.stdout
    assert "worker 1" not in said.stdout
    report = page.read_text()
    speed = next(line for line in said.stdout.splitlines() if line.startswith("speed")).split(maxsplit=1)[1]
    for words in (speed, "Not sure: 0.", "Time of each part", "generating", "worker 0 (pid", '"collating"'):
        assert words in report, "figures, verdict, and a profile of the same workers"
    refused = bench("feeds.py:feed", "--report", "bench.pdf")
    assert "its name must end in .html, got 'bench.pdf'" in refused.stderr


def test_what_cannot_be_measured_is_said_as_ever() -> None:
    said = bench("nowhere.py:feed")
    assert said.returncode == 1
    assert "nowhere.py" in said.stderr
    assert "Traceback" not in said.stderr
    said = bench("localhost")
    assert said.returncode == 1
    assert "is neither a URL nor MODULE:ATTR" in said.stderr


def test_a_cached_dataset_replays_copies_of_its_first_batches(serve: Serve, tf: Any) -> None:
    daemon = serve(FEEDS, "cheap", "slow")
    with penstock.connect(daemon.urls["cheap"]) as connection:
        dataset = connection.dataset(cached=3)
        read = connection.stats()["batches"]
        assert int(dataset.cardinality()) == connection.cardinality == 800
        first = list(dataset.take(3).as_numpy_iterator())
        assert len({batch["x"].tobytes() for batch in first}) > 1
        list(dataset.map(lambda batch: batch["x"][:10] + 1.0))  # TensorFlow may write the result over the batch
        again = list(dataset.as_numpy_iterator())
        assert len(again) == 800
        for i, batch in enumerate(again):
            for name in ("x", "y"):
                np.testing.assert_array_equal(batch[name], first[i % 3][name])
        assert connection.stats()["batches"] == read
    with penstock.connect(daemon.urls["slow"]) as connection:
        assert len(list(connection.dataset(cached=2))) == 2
        with pytest.raises(ValueError, match="must be 1 or more batches"):
            connection.dataset(cached=0)


def test_tensorflows_part_is_measured_in_the_one_epoch_that_there_is(serve: Serve, tf: Any) -> None:
    daemon = serve(FEEDS, "once")
    seen = measure(daemon.urls["once"], status=status, batches=20, warmup=0, tensorflow=True, cached=4)
    assert (seen.consumer, seen.batches) == ("TensorFlow", 20)
    assert seen.cached is not None
    assert seen.cached > 0


def test_a_consumer_that_moves_to_another_stream_is_measured_again(serve: Serve) -> None:
    url = serve(FEEDS, "cheap", workers=1).urls["cheap"]
    asked = 0

    def status(url: str) -> Status:
        nonlocal asked
        asked, found = asked + 1, control.status(url, 30)
        moved = 1000 * (asked > 1)  # as if it had met another job after the first look
        return replace(found, streams=[replace(one, stream=one.stream + moved) for one in found.streams])

    seen = measure(url, status=status, seconds=0.3, warmup=0)
    assert asked > len(seen.slices) + 1
    assert seen.seconds >= 0.3
