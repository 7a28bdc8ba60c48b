"""The compatibility page has the outcomes of the newest result, and its judge notices the mistakes of loaders."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "cells"))

import compatibility
import judge
import report
from table import COLUMNS, ROWS


def sample(number, label="int64"):
    return {"image": np.full(2, number, np.float32), "label": np.dtype(label).type(number)}


SAMPLES = [sample(number) for number in range(6)]


def test_the_page_has_what_the_newest_result_says():
    path = report.newest("compatibility")
    page = compatibility.PAGE.read_text()
    drawn = compatibility.drawn(json.loads(path.read_text()), path)
    assert report.replaced(page, "compatibility", drawn) == page


def test_the_result_has_every_cell():
    cells = json.loads(report.newest("compatibility").read_text())["cells"]
    assert list(cells) == list(ROWS)
    assert all(list(row) == list(COLUMNS) for row in cells.values())


def test_the_same_samples_in_another_order_are_right():
    assert judge.judged(SAMPLES[::-1], SAMPLES) is None


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        (SAMPLES * 2, "every sample comes twice"),
        (SAMPLES[1:], "of 6 samples, 1 missing"),
        ([*SAMPLES, SAMPLES[0]], "of 6 samples, 1 too often"),
        ([*SAMPLES[1:], sample(9)], "of 6 samples, 1 missing, 1 not of the source"),
        ([sample(number, "int32") for number in range(6)], "other dtypes"),
        ([dict(reversed(one.items())) for one in SAMPLES], "the order of a dict's keys is lost"),
    ],
)
def test_what_differs_is_named(got, wrong):
    assert judge.judged(got, SAMPLES) == wrong


def test_lists_and_lost_nuls_are_named():
    assert judge.judged([[np.int64(1), b"a"]], [(np.int64(1), b"a")]) == "tuples become lists"
    assert judge.judged(np.array([b"a\0"]), [b"a\0"]) == "NULs at the end of texts are lost"


def test_batches_of_structures_are_taken_apart():
    batch = {"z": (np.arange(2), np.ones((2, 3))), "a": np.array([b"x", b"y"], object)}
    first, second = judge.rows(batch)
    assert list(first) == ["z", "a"]
    assert (first["z"][0], second["a"]) == (0, b"y")


def test_workers_that_draw_the_same_random_numbers_are_noticed():
    draws = [np.random.default_rng(seed).random(3) for seed in (0, 1, 0, 1)]
    assert judge.judged_random(draws[:2], draws[0]) is None
    assert judge.judged_random(draws, draws[0]).startswith("2 of 4 batches are copies")


def test_two_processes_count_if_both_made_some():
    assert judge.parallel([1] * 50 + [2] * 50)
    assert not judge.parallel([1] * 99 + [2])
