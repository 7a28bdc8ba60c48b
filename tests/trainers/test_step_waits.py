"""A training step's wait follows from when it asked and when its batch was handed over."""

from __future__ import annotations

import dataclasses

import pytest

from penstock._measure.feeding_summary import summary
from penstock._measure.step_waits import StepWaits, Waits, spread
from penstock._state.hand_overs import MOST, HandOver, HandOvers
from penstock_proto.status.figures import Figures
from tests.fakes import figures as fakes
from tests.fakes.figures import worker


def handed(*times: float) -> list[HandOver]:
    return [HandOver(number + 1, at, at, at) for number, at in enumerate(times)]


@pytest.mark.parametrize(
    ("asked", "ended", "times", "waits"),
    [
        (10, 11, [9], [0]),  # the batch was there
        (10, 15, [14], [4]),
        (10, 14, [1, 2, 3, 4], [0, 0, 0, 0]),
        (10, 34, [12, 18, 24, 30], [2, 2, 2, 2]),  # each step takes 4 s, and a batch comes every 6 s
        (10, 18, [9, 9, 15, 15], [0, 0, 2, 0]),  # 1.5 s a step
        (10, 10, [10], [0]),
    ],
)
def test_the_waits_of_a_call_follow_from_its_hand_overs(
    asked: float, ended: float, times: list[float], waits: list[float]
) -> None:
    found = list(spread(asked, ended, handed(*times)))
    assert [wait for _, wait, _ in found] == pytest.approx(waits)
    work = (ended - asked - sum(waits)) / len(waits)
    assert found[-1][0] + found[-1][1] + work == pytest.approx(ended), "the steps fill the call"


def source(*slabs: tuple[int, float, float, float]) -> HandOvers:
    overs = HandOvers()
    overs.on_epoch_begun()
    for slab in slabs:
        overs.on_handed(*slab)
    return overs


def test_a_wait_is_divided_into_production_transfer_and_hand_off() -> None:
    waits = StepWaits([source((1, 14, 16, 17), (2, 1, 1, 2))])
    waits.asks(10)
    found = waits.end(20)
    assert found == Waits(seconds=10, steps=1, ready=0, production=4, transfer=2, handoff=1)
    assert found.waiting == pytest.approx(0.7)
    for _ in range(2):  # both batches of the second slab
        waits.asks(20)
        waits.end(21)
    assert waits.sums == Waits(seconds=12, steps=3, ready=2, production=4, transfer=2, handoff=1)
    assert waits.fits


def test_a_step_of_two_feeds_waits_for_the_later_one() -> None:
    waits = StepWaits([source((1, 12, 12, 12)), source((1, 15, 15, 15))])
    waits.asks(10)
    found = waits.end(20)
    assert found is not None
    assert (found.waited, found.ready) == (5, 0)


def test_the_first_call_is_left_out_and_its_batches_are_not() -> None:
    waits = StepWaits([source((1, 5, 5, 5), (1, 14, 14, 14))], skip=1)
    assert waits.asks(1) is None
    assert waits.asks(10) is None
    assert waits.end(15) == Waits(seconds=5, steps=1, production=4)


def test_batches_that_were_taken_ahead_of_an_iteration_that_is_left_are_not_consumed() -> None:
    overs = source((3, 1, 1, 1), (3, 2, 2, 2))
    waits = StepWaits([overs])
    waits.asks(3)
    waits.end(4)
    waits.end_epoch()
    overs.on_epoch_begun()  # a new iteration, before the epoch has ended
    overs.on_handed(1, 15, 15, 15)
    waits.asks(10)
    assert waits.end(16) == Waits(seconds=6, steps=1, production=5)

    overs.on_epoch_ended()
    overs.on_epoch_begun()  # as repeat() does: nothing is dropped
    overs.on_handed(1, 17, 17, 17)
    waits.asks(16)
    assert waits.end(18) == Waits(seconds=2, steps=1, production=1)


def test_batches_that_were_taken_to_build_the_model_are_not_consumed() -> None:
    overs = HandOvers()
    overs.on_handed(2, 1, 1, 1)  # from an earlier iteration
    overs.on_epoch_begun()
    overs.on_handed(1, 15, 15, 15)
    waits = StepWaits([overs])
    waits.asks(10)
    assert waits.end(16) == Waits(seconds=6, steps=1, production=5)


def test_an_epoch_may_end_with_fewer_batches_and_with_a_call_that_finds_none() -> None:
    waits = StepWaits([source((6, 1, 1, 1))])
    waits.asks(2, 4)
    assert waits.asks(4, 4) == Waits(seconds=2, steps=4, ready=4)
    assert waits.end(5) == Waits(seconds=1, steps=2, ready=2)
    waits.end_epoch()
    assert waits.fits
    waits.asks(6, 4)
    waits.end_epoch()
    assert waits.sums.steps == 6


def test_steps_that_do_not_consume_a_batch_each_are_noticed() -> None:
    waits = StepWaits([source((1, 1, 1, 1))])
    for second in range(2, 5):  # as after unbatch()
        waits.asks(second)
    assert not waits.fits
    assert summary(waits.sums, None, fits=False, asked_in_vain=0).startswith(
        "waits are unknown, because a step did not"
    )


def test_what_nobody_consumes_is_forgotten() -> None:
    overs = source(*[(1, 1, 1, 1)] * (MOST + 1))
    assert overs.overflowed
    assert len(overs.take(2 * MOST)) == MOST


FIGURES = dataclasses.replace(
    fakes.FIGURES, workers=(worker(0, 0.95, idle=0.05, cpu=0.1), worker(1, 0.95, idle=0.05, cpu=0.1)), lanes=16
)
WAITING = Waits(seconds=10, steps=100, ready=40, production=4)
IDLE = dataclasses.replace(FIGURES, workers=(worker(0, 0.5, idle=0.5, cpu=0.1), worker(1, 0.5, idle=0.5, cpu=0.1)))


@pytest.mark.parametrize(
    ("sums", "figures", "in_vain", "said"),
    [
        (
            WAITING,
            FIGURES,
            0.9,
            "the trainer waited 4 s of 10 s for data (40 %), and would be up to 1.7 times as fast without waiting; 40 "
            "% of the steps found a batch ready. Workers are busy 95 %, add workers (2 -> 4)",
        ),
        (WAITING, IDLE, 0.9, "Workers are busy 50 %, add workers (2 -> 4)"),  # workers were idle during validation
        (WAITING, None, 0.9, "40 % of the steps found a batch ready"),
        (dataclasses.replace(WAITING, production=1, transfer=3), FIGURES, 0.9, "The network, which carries 500 MB/s"),
        (
            dataclasses.replace(WAITING, production=1, handoff=3),
            FIGURES,
            0.9,
            "Batches were there, and the trainer",
        ),
        (
            Waits(seconds=10, steps=100, ready=100),
            None,
            0.3,
            "(0 %); 100 % of the steps found a batch ready. The trainer",
        ),
        (
            Waits(seconds=10, steps=100, ready=100),
            IDLE,
            0.3,
            "The trainer is the bottleneck: the loader could give 2.0x",
        ),
        (
            Waits(seconds=10, steps=100, ready=100),
            IDLE,
            0.9,
            "or shuffle() or batch() after connection.dataset() holds",
        ),
        (Waits(), IDLE, 0.9, "no steps were measured"),
    ],
)
def test_the_summary_says_what_the_loader_cost_and_why(
    sums: Waits, figures: Figures | None, in_vain: float, said: str
) -> None:
    if figures is not None:
        figures = dataclasses.replace(figures, waiting=sums.waiting, step=1 - sums.waiting)
        if sums.transfer:
            figures = dataclasses.replace(figures, transport="tcp")
    assert said in summary(sums, figures, fits=True, asked_in_vain=in_vain)
