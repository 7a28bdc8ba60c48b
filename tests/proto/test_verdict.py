"""Each situation of a measured feed has one right verdict, and its advice. (test_verdicts.py builds some of them with
real workers, and benchmarks/verdicts.py all that a machine can show.)"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock_proto.status.figures import Figures, HostUse
from penstock_proto.status.verdict import NAMES, verdict
from tests.fakes.figures import FIGURES, IDLE, machine, worker

BUSY: dict[str, Any] = {"free": 0.1}
COMPUTING = (worker(0, 0.9, cpu=0.85), worker(1, 0.9, cpu=0.85))
SENDING = {"transport": "tcp", "sending_share": 0.6}
SLOW_STEPS = {"waiting": 0.2, "step": 0.8, "workers": (worker(0, 0.1, idle=0.85, cpu=0.1),) * 2}
HOST = (worker(0, 0.9), worker(1_000_000, 0.9, awaited=0.5, host="b"), worker(1_000_001, 0.9, awaited=0.4, host="b"))

ON_HOSTS: dict[str, Any] = {
    "workers": (worker(0, 0.9, cpu=0.85), worker(1_000_000, 0.9, cpu=0.85, host="b")),
    "hosts": (HostUse("b", machine(free=0.2, count=4), 0.0), HostUse("idle", machine(free=4.0, count=4), 0.0)),
    "cpus": 6,
}

SITUATIONS: list[tuple[str, dict[str, Any], str, str]] = [
    # the trainer does not wait
    ("slow trainer", {"waiting": 0.05, "step": 0.9, "receiving": 0.05}, "consumer", "The loader keeps up"),
    ("trainer that receives", {"waiting": 0.0, "step": 0.0, "receiving": 1.0}, "consumer", "than the consumer can rec"),
    ("rank that others wait for", {"waiting": 0.0, "holding_up": 0.4}, "consumer", "other ranks wait for it 40 %"),
    # workers
    ("no workers", {"without_makers": True, "workers": ()}, "workers", "run `penstock join` on a host"),
    ("first batch", {"began": False, "awaited_at": "a.h5"}, "start", "and its worker is at split a.h5. A first batch"),
    ("import", {"began": False, "starting": ("importing f.py (9 s)",) * 2}, "start", "not made yet: importing f.py (9"),
    ("half start", {"starting": ("importing f.py (9 s)",)}, "start", "1 of 2 workers are not ready: importing f.py"),
    ("dying workers", {"workers": ()}, "workers", "Workers end and are started again"),
    (
        "dying workers that start again",
        {"workers": (), "starting": ("starting",) * 2, "ended": 5},
        "workers",
        "Workers end and are started again",
    ),
    ("half start, and a death", {"starting": ("starting",) * 2, "ended": 1}, "start", "2 of 2 workers are not ready"),
    ("dying worker", {"ended": 2, "interrupted": 0.3}, "workers", "Workers end and are started again"),
    ("one death", {"ended": 1, "interrupted": 0.02}, "generator", "2 workers make"),
    ("nothing but errors", {"interrupted": 1.0, "began": False}, "workers", "after user code raised"),
    ("retries", {"interrupted": 0.6}, "workers", "after user code raised or a worker ended"),
    ("stopped worker", {"stopped": ("3",)}, "workers", "Worker 3 is stopped by a signal: continue it"),
    ("scaled", {"workers_before": 2, "workers_after": 16}, "unknown", "from 2 to 16 during the measurement"),
    # between workers and trainer
    ("slow rank", {"slow_rank": 3, "ranks_share": 0.6}, "ranks", "waits for 90 % of the time, mostly for rank 3"),
    ("slow network", SENDING, "transport", "is the limit at 500 MB/s: it takes no more, or a batch is coming, in 60 %"),
    ("slow network, few batches", {**SENDING, "batches": 9}, "transport", "consumer is the limit: it takes no more"),
    ("slow network, others", {**SENDING, "others": 1}, "transport", "consumer is the limit: it takes no more"),
    ("distant daemon", {"transport": "tcp", "unmade": 0.2}, "transport", "over TCP is the limit: batches are ready"),
    ("tiny batches", {"unmade": 0.2}, "transport", "The hand-over is the limit: batches are ready"),
    ("trainer with a busy GIL", {"handing_share": 0.7}, "taking", "in the trainer's process in 70 % of the waits"),
    # CPUs
    ("computing", {"workers": COMPUTING, "machine": machine(**BUSY)}, "cpus", "and trainer use 1.9, and workers spend"),
    ("computing, one CPU", {"workers": COMPUTING[:1], "cpus": 1, "machine": machine(free=0.0, count=1)}, "cpus", "The"),
    ("collating", {"workers": (worker(0, 0.2, cpu=0.9),) * 2, "machine": machine(**BUSY)}, "cpus", "time collating"),
    ("quota", {"workers": COMPUTING, "machine": machine(free=0.1, idle=29.0, count=32, allowed=2)}, "cpus", "quota of"),
    (
        "busy machine",
        {"workers": (worker(0, 0.3, cpu=0.3, lacking=0.6),) * 2, "machine": machine(free=0.0)},
        "contention",
        "other work uses 1.2 of the 2 CPUs of the daemon's host, and the feed gets 0.8",
    ),
    (
        "some other work",
        {"workers": COMPUTING[:1] * 2, "cpus": 4, "machine": machine(free=0.2, count=4)},
        "cpus",
        "ther",
    ),
    ("busy machine, waits for files", {"machine": machine(free=0.0)}, "generator", "use more workers than CPUs"),
    (
        "pinned workers",
        {"workers": (worker(0, 0.25, cpu=0.25, lacking=0.75),) * 4, "machine": machine(free=7.0, count=8)},
        "unknown",
        "have no CPU 75 % of the time, although 7.0 of the 8 CPUs of the daemon's host are idle",
    ),
    ("busy daemon", {"workers": IDLE, "daemon_cpu": 0.9}, "daemon", "at 100 batches/s"),
    ("busy hosts", {**ON_HOSTS, "machine": machine(**BUSY)}, "cpus", "of the 6 CPUs of all hosts, the feed uses 1.9"),
    # what workers do
    (
        "one idle host",
        {**ON_HOSTS, "machine": machine(free=1.0)},
        "generator",
        "Add workers (2 -> 3): of the 6 CPUs of all hosts",
    ),
    ("slow splits=", {"listing": 0.7}, "listing", "in 70 % of the waits the next epoch's splits are not known"),
    ("one lane", {"lanes": 1, "without_lane": 0.5}, "lanes", "Only 1 of 2 workers is busy: the feed has 1 lane, so"),
    ("one split", {"lanes": 1, "splits": 1, "without_lane": 0.5}, "lanes", "the feed has 1 split, so no more can work"),
    ("odd lanes", {"lanes": 6, "workers": (worker(0, 0.7),) * 4, "ahead": 0.25}, "lanes", "some make 2 and others 1"),
    (
        "last splits",
        {"without_lane": 0.4},
        "lanes",
        "While it waits, 40 % of the workers have no lane to",
    ),
    ("little memory", {"ahead": 0.5, "slots": 2}, "memory", "has 1 slot for batches of this stream in production, too"),
    ("little memory, known", {"ahead": 0.5, "slots": 2, "memory": 64 << 20}, "memory", "1 slot of its 64.0 MiB for"),
    ("little memory, stripes", {"ahead": 0.5, "slots": 2, "stripe": 512}, "memory", "Give it more --memory"),
    ("long turns", {"turn": 128, "made": 2000, "sent": 100}, "turn", "gives 128 batches in a row"),
    ("short ranges", {"turn": 128, "stripe": 128, "made": 2000, "sent": 100}, "order", "Batches take unevenly long"),
    ("short turns", {"turn": 4, "made": 2000, "sent": 100}, "order", "Batches take unevenly long"),
    (
        "slow split",
        {"made": 4000, "workers": (worker(0, 0.9, awaited=0.9), worker(1, 0.9)), "awaited_at": "big.h5"},
        "split",
        "worker 0 makes the next batch in 90 % of the waits, at split big.h5, and others are ahead of it",
    ),
    ("slow split, full memory", {"ahead": 0.5, "workers": (worker(0, 0.9, awaited=0.9), *IDLE)}, "split", "worker 0"),
    (
        "slow host",
        {"ahead": 0.5, "cpus": 8, "workers": HOST, "hosts": (HostUse("b", machine(free=0.1, count=4), 0.9),)},
        "host",
        "in 90 % of the waits, and others are ahead. Its 2 workers use 1.0 of 4 CPUs; 0.1 are idle",
    ),
    ("uneven batches", {"ahead": 0.4, "workers": IDLE}, "order", 'or use Feed(order="fast")'),
    ("uneven batches, memory", {"ahead": 0.4, "workers": IDLE, "memory_full": False}, "order", "long: use Feed(order="),
    ("slow generator", {}, "generator", "100 batches/s, 50 each. Add workers (2 -> 4): of the 2 CPUs of the daemon's"),
    ("slow generator, 16 lanes", {}, "generator", "use more workers than CPUs. Best are divisors of its 16 lanes."),
    (
        "slow indexable feed",
        {"lanes": None},
        "generator",
        "use more workers than CPUs. The consumer could be up to 3.0",
    ),
    ("as many workers as lanes", {"lanes": 2}, "generator", "More workers need more splits and Feed(lanes=): it has 2"),
    ("a generator that cannot be divided", {"undivided": True}, "generator", "share only the work of transform=:"),
    ("cold cache", {"cache_filling": True}, "generator", "Splits are written to the cache meanwhile, and later epochs"),
    ("slow copies", {"workers": (worker(0, 0.2),) * 2, "lanes": 2}, "collating", "Yield few, large NumPy arrays"),
    ("samples one by one", {"workers": (worker(0, 0.2),) * 2}, "collating", "or whole batches with batch_size=None"),
    ("a little idle", {"workers": (worker(0, 0.82, idle=0.18), worker(1, 0.76, idle=0.24))}, "generator", "2 workers"),
    (
        "pauses",
        {"workers": (worker(0, 0.3, idle=0.65),) * 2, "reading": 0.35, "waiting": 0.4},
        "generator",
        "The generator is the limit",
    ),
    ("uneven steps", SLOW_STEPS, "pace", "waits for 20 % of the time, and workers are idle for 85 %, mostly at other"),
    ("nothing fits", {"workers": IDLE}, "unknown", "workers are idle for 65 %, and neither lanes, memory, the order"),
]


@pytest.mark.parametrize(
    ("changes", "limit", "words"), [one[1:] for one in SITUATIONS], ids=[one[0] for one in SITUATIONS]
)
def test_the_verdict_names_what_limits_and_what_to_do(changes: dict[str, Any], limit: str, words: str) -> None:
    found = verdict(dataclasses.replace(FIGURES, **changes))
    assert (found.limit, words in found.text) == (limit, True), found
    assert found.cause in found.headline


def test_every_limit_has_a_situation() -> None:
    assert {limit for _, _, limit, _ in SITUATIONS} == NAMES.keys()


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "workers are busy 100 %, add workers (2 -> 4) for up to 2.0x"),
        ({"waiting": 0.2}, "workers are busy 100 %, add workers (2 -> 4) for up to 1.2x"),
        ({"lanes": 1, "splits": 1, "without_lane": 0.5}, "the feed has 1 split for 2 workers, give it more splits for"),
        (
            {"turn": 128, "made": 200, "sent": 100},
            "each turn of 128 batches takes one worker 13 s, while others are ahead, use Feed(turn=1) for up to 2.0x",
        ),
        ({"lanes": 2}, "workers are busy 100 %, and more of them need more lanes than 2"),
        (SENDING, "the network, which carries 500 MB/s"),
    ],
)
def test_half_a_sentence_has_evidence_advice_and_what_it_would_bring(changes: dict[str, Any], cause: str) -> None:
    found = verdict(dataclasses.replace(FIGURES, **changes))
    assert found.cause.startswith(cause)
    assert (found.gain is not None) == (" for up to " in found.cause)


@pytest.mark.parametrize(
    ("changes", "limit", "never"),
    [
        ({"workers": COMPUTING, "machine": machine(free=0.5)}, "generator", "Add workers"),
        ({"without_lane": 0.4, "fast": True}, "lanes", "order="),
        ({"ahead": 0.4, "fast": True}, "order", "order="),
        ({"ahead": 0.4, "memory_full": False}, "order", "--memory"),
        ({"workers": (worker(0, 0.2),) * 2, "whole_batches": True}, "collating", "batch_size=None"),
        ({**SENDING, "bytes_only": True}, "transport", "smaller dtypes"),
        ({"unmade": 0.2, "memory_full": False}, "transport", "--memory"),
        ({"ahead": 0.5, "slots": 2}, "memory", "turn=1"),
    ],
)
def test_what_is_set_already_is_never_advised(changes: dict[str, Any], limit: str, never: str) -> None:
    found = verdict(dataclasses.replace(FIGURES, **changes))
    assert found.limit == limit
    assert never not in found.text


@pytest.mark.parametrize(
    ("waiting", "cpu", "lanes", "more"),
    [
        (0.95, 0.02, None, 16),  # eight times as many at most
        (0.75, 0.02, None, 8),  # as many as are needed
        (0.15, 0.02, None, 3),
        (0.75, 0.02, 12, 12),  # a divisor of the lanes
        (0.95, 0.02, 12, 12),  # no more than lanes
        (0.75, 0.02, 5, 5),
        (0.75, 0.9, None, 5),  # as many as CPUs are idle for
        (0.95, 0.02, 2, None),
    ],
)
def test_as_many_workers_are_advised_as_the_trainer_needs(
    waiting: float, cpu: float, lanes: int | None, more: int | None
) -> None:
    workers = tuple(worker(number, 0.9, cpu=cpu) for number in range(2))
    idle = machine(free=2.7, count=8)
    found = verdict(dataclasses.replace(FIGURES, waiting=waiting, workers=workers, lanes=lanes, machine=idle))
    assert ("add workers" in found.cause) == (more is not None)
    assert more is None or f"add workers (2 -> {more})" in found.cause


def test_a_trainer_that_does_not_wait_is_told_how_much_more_the_loader_could_give() -> None:
    def said(**changes: Any) -> str:
        return verdict(dataclasses.replace(FIGURES, waiting=0.0, step=1.0, **changes)).headline

    assert said() == "the trainer is the bottleneck, and the loader has little to spare"
    assert said(workers=IDLE).endswith("could give 2.9x")
    assert said(workers=IDLE, machine=machine(free=0.2)).endswith("could give 1.5x"), "the CPUs allow no more"
    assert said(sent=200, made=1000).endswith("could give 5.0x"), "workers make batches for later"
    assert said(workers=()) == "the trainer is the bottleneck"


def test_cpus_count_together_with_what_uses_them() -> None:
    figures: Figures = dataclasses.replace(FIGURES, workers=HOST, machine=machine(free=0.5))
    assert figures.cpus_used == pytest.approx(1.7)
    assert figures.other_cpu == pytest.approx(0.8), "workers of hosts use other CPUs"


def test_what_the_loader_could_give_counts_the_idle_cpus_of_all_hosts_with_workers() -> None:
    on_hosts = dataclasses.replace(FIGURES, **ON_HOSTS, machine=machine(free=0.0), waiting=0.0, step=1.0)
    half = tuple(dataclasses.replace(one, generating=0.4, idle=0.5) for one in on_hosts.workers)
    host = HostUse("b", machine(free=3.8, count=4), 0.0)
    assert verdict(dataclasses.replace(on_hosts, workers=half, hosts=(host,))).headline.endswith("could give 2.0x")
