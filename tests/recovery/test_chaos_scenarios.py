"""Random scenarios, the short form of `make chaos`: with any faults, consumers are handed what the model predicts.

Other tests are of the harness itself: its model gives the streams that the documentation shows, and its comparison
tells apart loss, repetition, a different order, and damage.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.chaos import __main__ as chaos_main
from tests.chaos import compare, model, reading, sample, scenario
from tests.chaos.run import run
from tests.chaos.scenario import Consumer, Failure, Fault, FeedCase, Job, Scenario, Step
from tests.conftest import PATCHED, Daemon, DaemonLauncher

SEEDS = (2, 3, 5, 8, 9, 10, 13, 26)
"""Among them are five kinds of feeds, a group, ranks beside others, hosts, a private daemon, and most of the
faults."""
SOAK = (1, 4, 6, 7, 12, 14, 15, *range(17, 26), *range(27, 31))


@pytest.fixture
def forked_daemons(monkeypatch: pytest.MonkeyPatch, daemon_launchers: list[DaemonLauncher]) -> None:
    """Have the daemons forked, by turns with different hash seeds. (`make chaos` starts them as users do.)"""
    launchers = cycle(daemon_launchers)

    def start(command: list[str], folder: Path, log: Path, environment: dict[str, str]) -> Daemon:
        words = [PATCHED.format(patched={}), *command[3:]]
        del environment["PYTHONFAULTHANDLER"]
        return Daemon(words, folder, log, environment, launcher=next(launchers))

    monkeypatch.setattr("tests.chaos.service.Daemon", start)


def some(seeds: Iterable[int], soak: Iterable[int]) -> list[Any]:
    """These seeds, and further ones for `make soak`."""
    return [*seeds, *(pytest.param(seed, marks=pytest.mark.soak) for seed in soak)]


def with_tensorflow(seed: int) -> bool:
    found = scenario.scenario(seed)
    return any(consumer.how in ("eager", "mapped") for job in found.jobs for consumer in job.consumers)


@pytest.mark.parametrize("seed", some(SEEDS, SOAK))
@pytest.mark.usefixtures("forked_daemons")
def test_consumers_are_handed_what_the_model_says_whatever_goes_wrong(seed: int) -> None:
    assert not with_tensorflow(seed)
    result = run(scenario.scenario(seed))
    assert not result.differences, result.report()


@pytest.mark.parametrize("seed", some([11], [16, 57, 79]))
@pytest.mark.usefixtures("tf", "forked_daemons")
def test_so_are_those_that_read_with_tensorflow(seed: int) -> None:
    assert with_tensorflow(seed)
    result = run(scenario.scenario(seed))
    assert not result.differences, result.report()


def once(feed: FeedCase, *consumers: Consumer, together: str = "", memory: float | None = None) -> Scenario:
    return Scenario(-1, (Job(feed, consumers, together),), memory=memory)


PLAIN = FeedCase("list", 10, ((200, 200),), batch_size=8, lanes=2, turn=8)
PASSES = Failure(split=1, number=37)

ONCE = {
    "what stands before a sample in its batch was lost when user code raised": once(
        replace(PLAIN, failures=(PASSES,)), Consumer(epochs=1)
    ),
    "so it was when the sample was tried again": once(
        replace(PLAIN, on_error="retry", failures=(PASSES,)), Consumer(epochs=1)
    ),
    "one exception at the first sample ended the daemon": once(
        replace(PLAIN, on_error="retry", failures=(Failure(0, 0),)), Consumer(epochs=1)
    ),
    "a member of a group took the rest of its slab along": once(
        replace(PLAIN, batch_size=4),
        *(Consumer(epochs=1, pause=0.001), Consumer(epochs=1, steps=(Step(3, "close"),))),
        together="group",
    ),
    "a member that closed took what waited in its queue along": once(
        FeedCase("list", 10, ((60, 60, 60),), batch_size=None, lanes=3, pause=0.001),
        Consumer(epochs=1),
        *(Consumer(epochs=1, steps=(Step(4, "close"),), pause=0.01, joins=joins) for joins in range(5)),
        together="group",
    ),
    "a state could not be loaded with the least memory": once(
        FeedCase("list", 10, ((40,),), batch_size=3, turn=3, shuffle=100, pause=0.001),
        Consumer(epochs=1, steps=(Step(3, "load"),)),
        memory=1.0,
    ),
}
"""Scenarios that once differed from the model, reduced as far as possible."""


@pytest.mark.usefixtures("tf", "forked_daemons")
def test_an_epoch_that_was_left_goes_on_after_the_batches_that_were_read_if_tensorflow_had_taken_its_error() -> None:
    feed = FeedCase("list", 10, ((60,),), batch_size=1, failures=(Failure(split=0, number=40, epoch=0),))
    steps = (Step(3, "break"), Step(5, "close"))
    result = run(once(feed, Consumer("mapped", epochs=2, steps=steps, pause=0.1)))
    assert not result.differences, result.report()


@pytest.mark.parametrize("once", list(ONCE.values()), ids=list(ONCE))
@pytest.mark.usefixtures("forked_daemons")
def test_what_differed_once_does_not_differ_again(once: Scenario) -> None:
    result = run(once)
    assert not result.differences, result.report()


# --- the harness itself ---


def test_a_scenario_is_a_literal_and_its_seed_gives_it_again() -> None:
    for seed in range(300):
        found = scenario.scenario(seed)
        assert eval(repr(found), vars(scenario)) == found == scenario.scenario(seed)


def test_busy_loops_run_beside_scenarios_and_end_with_them() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with chaos_main.busy(2):
        loops = [child for child in psutil.Process().children() if child.pid not in before]
        assert len(loops) == 2
    assert not any(psutil.pid_exists(loop.pid) for loop in loops)


def test_seeds_give_all_kinds_of_feeds_consumers_and_faults() -> None:
    found = [scenario.scenario(seed) for seed in range(3000)]
    jobs = [job for one in found for job in one.jobs]
    assert len({job.feed.kind for job in jobs}) == 10
    assert {job.feed.format for job in jobs} == {"", "h5", "npz", "parquet"}
    assert len({consumer.how for job in jobs for consumer in job.consumers}) == 6
    assert {job.together for job in jobs} == {"", "drop", "pad", "group"}
    assert len({fault.what for one in found for fault in one.faults}) == 24
    assert {job.feed.transforms for job in jobs} == {"", "reverse", "draw"}
    assert {len(job.feed.weights) for job in jobs} == {0, 2, 3}
    assert {job.feed.rebatches for job in jobs} == {True, False}
    assert {job.feed.cache for job in jobs} == {True, False}
    starts = {consumer.start for job in jobs for consumer in job.consumers}
    assert starts == {"beginning", "latest", "next_epoch"}
    assert {one.keys for one in found} == {False, True}
    assert {one.host_slots for one in found} == {None, 1, 2, 4}
    assert {one.hosts for one in found} == {0, 1, 2}
    assert {job.together for job in jobs if job.of is not None} == {"", "drop", "pad"}
    failing = {(job.feed.on_error, failure.what) for job in jobs for failure in job.feed.failures}
    assert failing == {(on_error, what) for on_error in ("raise", "retry", "skip") for what in ("raise", "die", "hang")}
    steps = {step.then for job in jobs for consumer in job.consumers for step in consumer.steps}
    assert steps == {"go", "break", "resume", "load", "close"}


LANES = FeedCase("list", 0, ((19, 14, 5),), batch_size=4, lanes=3, turn=2)
"""The lanes of the picture in docs/architecture.md: a0 to a3 and 3 rows, b0 to b2 and 2, c0 and 1."""


def epoch(case: FeedCase = LANES, turn: int = 2, **more: object) -> list[model.Batch]:
    return list(model.batches(case, turn, **more))  # type: ignore[arg-type]


def test_the_models_stream_is_the_one_of_the_picture() -> None:
    def rows(split: int, batch: int) -> model.Batch:
        return tuple((split, 4 * batch + row) for row in range(4))

    assert epoch() == [
        *(rows(0, 0), rows(0, 1), rows(1, 0), rows(1, 1), rows(2, 0)),
        *(rows(0, 2), rows(0, 3), rows(1, 2)),
        ((2, 4), (1, 12), (1, 13), (0, 16)),
        ((0, 17), (0, 18)),
    ]
    assert epoch(replace(LANES, drop_remainder=True)) == epoch()[:-1]


def test_the_model_knows_splits_that_are_left_out_ready_batches_and_segments() -> None:
    left_out = {row for batch in epoch(cuts={1: 3}) for row in batch}
    assert {number for split, number in left_out if split == 1} == {0, 1, 2}
    assert len(left_out) == 19 + 3 + 5

    ready = epoch(replace(LANES, batch_size=None), 1)
    assert len(ready) == 19 + 14 + 5
    assert [batch[0] for batch in ready[:4]] == [(0, 0), (1, 0), (2, 0), (0, sample.ROWS)]

    segments = FeedCase("segment", 0, batch_size=5, lanes=2, segment=10, tells_samples=24, turn=1)
    assert [batch[0] for batch in epoch(segments, 1)] == [(0, 0), (1, 0), (0, 5), (1, 5), (2, 0)]

    endless = FeedCase("endless", 0, batch_size=5, lanes=2, segment=10, turn=1)
    assert len(list(islice(model.batches(endless, 1), 1000))) == 1000


def test_the_models_blocks_hold_each_sample_of_a_lane_once() -> None:
    case = FeedCase("segment", 0, batch_size=4, lanes=2, segment=7, tells_samples=100, shuffle=24, interleave=3)
    for lane in range(2):
        found = list(model.blocks(case, lane))
        samples = list(model.lanes_of(case)[lane])
        assert sorted(row for block in found for row in block) == sorted(samples)
        assert [len(block) for block in found[:-1]] == [12] * (len(found) - 1)
        assert {split for split, _ in found[0]} == {lane, lane + 2, lane + 4}


def log_of(batches: list[model.Batch], end: bool = True) -> list[compare.Event]:
    events: list[compare.Event] = [["batch", [[0, split, number, 0] for split, number in rows]] for rows in batches]
    return [*events, ["end", 0]] if end else events


def differences(log: list[compare.Event], case: FeedCase = LANES) -> str:
    return " ".join(compare.single(Job(case, (Consumer(),)), 2, log))


def test_each_kind_of_difference_is_told_apart() -> None:
    good = epoch()
    assert differences(log_of(good)) == ""
    assert differences(log_of(good[:3], end=False)) == ""
    assert differences([*log_of(good[:3], end=False), ["resumed"], *log_of(good[3:])]) == ""
    assert "4 samples are lost: [1:0" in differences(log_of(good[:2] + good[3:]))
    assert "came twice or from elsewhere: [1:0" in differences(log_of([*good[:3], *good[2:]]))
    assert "the samples are the same, in another order" in differences(log_of([good[1], good[0], *good[2:]]))
    assert "the epoch ended" in differences(log_of(good[:-1]))
    assert "is of epoch 1" in differences([["batch", [[1, 0, 0, 0]]]])


def test_a_reader_that_resumes_at_the_end_of_the_last_epoch_finds_no_other() -> None:
    good, last = epoch(), replace(LANES, epochs=1)
    over: list[compare.Event] = [["resumed"], ["over"]]
    assert differences([*log_of(good, end=False), *over], last) == ""
    assert "did not come" in differences([*log_of(good[:-1], end=False), *over], last)
    assert "no more epochs after 0 of 1" in differences([*log_of(good, end=False), ["over"]], last)


def test_a_late_reader_finds_no_epoch_that_begins_if_the_others_read_the_last_one() -> None:
    job = Job(replace(LANES, epochs=2), (Consumer(start="next_epoch"),))
    assert compare.single(job, 2, [["over"]], late=True) == []
    assert compare.single(job, 2, [["in", 0], ["over"]], late=True) != []
    assert compare.single(job, 2, [["over"]]) != []


def test_differences_of_shuffled_epochs_are_told_apart() -> None:
    case = replace(LANES, shuffle=10)
    rows = [row for batch in epoch() for row in batch][::-1]
    good = [tuple(rows[at : at + 4]) for at in range(0, len(rows), 4)]
    assert differences(log_of(good), case) == ""
    assert "samples are lost" in differences(log_of(good[1:]), case)
    assert "came twice" in differences(log_of([good[0], *good]), case)
    assert "has 2 rows" in differences(log_of([good[-1], *good[:-1]]), case)

    fast = replace(LANES, order="fast")
    good = epoch()
    assert differences(log_of([*good[3:8], *good[:3], *good[8:]]), fast) == ""
    torn = [good[0][:2] + good[1][2:], good[1][:2] + good[0][2:], *good[2:]]
    assert "is neither a batch of a lane nor made of leftovers" in differences(log_of(torn), fast)


def test_what_members_of_a_group_lose_or_repeat_is_named() -> None:
    good = epoch()

    def found(
        *logs: list[compare.Event],
        killed: tuple[int, ...] = (),
        unheard: tuple[int, ...] = (),
        transport: str = "local",
    ) -> str:
        job = Job(LANES, (Consumer(transport=transport), Consumer()), "group")
        return " ".join(compare.group(job, 2, list(logs), killed, unheard))

    assert found(log_of(good[::2]), log_of(good[1::2])) == ""
    assert "1 of 10 batches came to nobody: [1:0" in found(log_of(good[:2]), log_of(good[3:]))
    assert found(log_of(good[:2], end=False), log_of(good[3:]), killed=(0,)) == ""
    assert "1 batches came twice" in found(log_of(good[:3]), log_of(good[2:]))
    assert "1 batches came twice" in found(log_of(good[:3], end=False), log_of(good[2:]), killed=(0,))
    assert found(log_of(good[:3], end=False), log_of(good[2:]), killed=(0,), transport="tcp") == ""
    assert found(log_of(good[:3], end=False), log_of(good[2:]), unheard=(0,)) == ""
    assert "1 batches came twice" in found(log_of(good[:6], end=False), log_of([good[0], *good[6:]]), unheard=(0,))
    assert "came to nobody" in found(log_of(good[:2], end=False), log_of(good[3:]), unheard=(0,))
    twice = log_of([*good[2:], good[5]])
    assert "1 batches came twice" in found(log_of(good[:3], end=False), twice, killed=(0,), transport="tcp")
    assert "is not a batch of it" in found(log_of([good[0][:2]]), log_of(good[1:]))


def test_a_consumer_that_comes_late_gets_all_that_follows() -> None:
    good = epoch()
    job = Job(LANES, (Consumer(start="latest"),))
    assert compare.single(job, 2, log_of(good[4:]), late=True) == []
    assert compare.single(job, 2, log_of(good[4:])) != []
    for wrong in ([*good[4:6], *good[7:]], [*good[4:], good[3]], good[4:-1], good[5:3:-1]):
        assert compare.single(job, 2, log_of(wrong), late=True) != []
    shuffled = replace(LANES, shuffle=10)
    assert compare.quiet(shuffled, [log_of(good[4:])], log_of(good), True, [0]) == []
    assert compare.quiet(shuffled, [log_of(good[4:])], log_of(good), True) != []
    assert compare.quiet(shuffled, [log_of([*good[4:6], *good[7:]])], log_of(good), True, [0]) != []


def test_what_ranks_are_handed_is_theirs() -> None:
    good = epoch()  # 10 batches: three rounds of three, and one
    drop = Job(LANES, (Consumer(),) * 3, "drop")
    assert compare.ranks(drop, 2, [log_of(good[:9][rank::3]) for rank in range(3)]) == []
    pad = replace(drop, together="pad")
    assert compare.ranks(pad, 2, [log_of([*good[:9][rank::3], good[9]]) for rank in range(3)]) == []
    assert compare.ranks(pad, 2, [log_of(good[:9][rank::3]) for rank in range(3)]) != []
    assert compare.ranks(drop, 2, [log_of(good[:9][rank::3]) for rank in (1, 0, 2)]) != []


def test_a_run_in_which_nothing_moves_is_a_hang_and_shows_where_everybody_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.chaos.run.STILL", 1.0)
    slow = replace(PLAIN, turn=2, pause=0.002)
    result = run(replace(once(slow, Consumer(epochs=1)), workers=1, faults=(Fault(3, "stop worker"),)))
    assert result.differences[0].startswith("a hang: nothing came for 1 s")
    assert result.differences[0].endswith("consumers [0] wait")
    for place in ("worker/process/loop.py", "chaos/reading.py"):  # the worker, and the consumer's thread
        assert place in result.report()


def test_a_damaged_sample_is_named() -> None:
    case = FeedCase("list", 7, width=9)
    draw = np.array([0.5, 1.5])
    body = sample.payload(7, 0, 1, 2, 9).copy()
    identity = np.array([[7, 0, 1, 2, sample.checksum(body, draw)]])

    def wrong(body: np.ndarray, draw: np.ndarray) -> str:
        return reading.look(case, (body[None], draw[None], identity))[1]

    assert wrong(body, draw) == ""
    assert "is damaged: its checksum" in wrong(body, draw + 1)
    body[4] ^= 1
    assert "the payload of sample 1:2 of epoch 0 is another's, or damaged" in wrong(body, draw)


def test_other_random_numbers_and_another_shuffled_order_than_a_quiet_runs_are_named() -> None:
    case = replace(LANES, shuffle=10)
    good = log_of(epoch())
    assert compare.quiet(case, [good], good, True) == []
    other: Iterator[compare.Event] = (["batch", [[0, s, n, 1] for _, s, n, _ in event[1]]] for event in good[:1])
    assert "has other random numbers" in compare.quiet(case, [[*other, *good[1:]]], good, True)[0]
    swapped = [good[1], good[0], *good[2:]]
    assert "in a quiet run" in compare.quiet(case, [swapped], good, True)[0]
    assert compare.quiet(case, [swapped], good, False) == []


def test_the_command_runs_scenarios_in_processes() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--scenarios", "2", "--seed", "3", "--jobs", "2", "--load", "0"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"2 scenarios with \d+ faults and \d+ batches in .*; 0 differ$", done.stdout), done.stdout
