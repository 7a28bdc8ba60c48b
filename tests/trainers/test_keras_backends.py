"""`fit` trains on the stream, on every backend of Keras and by every route, although Keras reads a batch to build the
model."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.conftest import Serve
from tests.processes.forked import Launcher

SCRIPT = Path(__file__).with_name("keras_trainer.py")
EPOCHS = 3
STEPS = 4

FEEDS = """
import numpy as np
from penstock_server import Feed

def numbers(split):
    for i in range(8):
        yield np.full(3, 8 * split + i, "float32"), np.float32(8 * split + i)

def endless(rng):
    while True:
        number = rng.integers(10_000)
        yield np.full(3, number, "float32"), np.float32(number)

options = {"batch_size": 8, "seed": 5, "shuffle": 8, "lanes": 2, "turn": 2}
known = Feed(numbers, splits=range(6), samples=48, **options)
unknown = Feed(numbers, splits=range(6), **options)
endless = Feed(endless, segment=16, **options)
"""
LENGTHS = ("known", "unknown", "endless")
STATE_AFTER = 2


class Streams:
    """The streams of FEEDS, as `batches()` yields them."""

    def __init__(self, urls: dict[str, str]) -> None:
        self.urls = urls
        self.epochs: dict[str, list[list[int]]] = {}
        self.states: dict[str, Any] = {}
        for name in LENGTHS:
            with penstock.connect(urls[name]) as connection:
                found = []
                for _ in range(1 if name == "endless" else 4):
                    batches = connection.batches()
                    found.append([int(batch[1][0]) for batch in itertools.islice(batches, 24)])
                    del batches
            self.epochs[name] = found
            with penstock.connect(urls[name]) as connection:
                batches = connection.batches()
                for _ in range(STATE_AFTER):
                    next(batches)
                self.states[name] = connection.state_dict()
                del batches

    def of(self, case: dict[str, Any]) -> list[list[int]]:
        """Return the stream that a case reads, epoch by epoch."""
        first, *others = self.epochs[case["feed"]]
        return [first[STATE_AFTER if case.get("state") else 0 :], *others]


@pytest.fixture
def streams(serve: Serve) -> Streams:
    return Streams(serve(FEEDS, *LENGTHS).urls)


def run(streams: Streams, launcher: Launcher, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run cases in a process of this launcher, and return their results."""
    trainer = launcher.start("import keras_trainer; keras_trainer.main()", folder=SCRIPT.parent, stdin=True)
    try:
        assert trainer.stdin is not None
        with trainer.stdin as stdin:
            json.dump([streams.urls, cases], stdin)
        out, errors = trainer.communicate(280)
        assert trainer.returncode == 0, errors
        *results, _ = map(json.loads, out.splitlines())
        assert len(results) == len(cases), out
        return results
    finally:
        trainer.close()


def cases_of(streams: Streams, route: str, **options: Any) -> list[dict[str, Any]]:
    """Return the cases of a route: {from 0, from a state} x {known, unknown, endless} x {validation, steps}."""
    cases = []
    for feed, resumed, also in itertools.product(LENGTHS, (False, True), ("validation", "steps")):
        case = {"route": route, "feed": feed, **options}
        if resumed:
            case["state"] = streams.states[feed]
        if also == "validation":
            case["validation"] = 2
        if also == "steps" or feed == "endless":
            case["steps"] = STEPS
        if resumed and feed == "unknown" and route != "keras" and also != "steps":
            case["epochs"] = 1  # more are refused
        cases.append(case)
    return cases


def check(streams: Streams, cases: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
    for case, result in zip(cases, results, strict=True):
        assert "error" not in result, (case, result)
        stream = streams.of(case)
        epochs = case.get("epochs", EPOCHS)
        if "steps" not in case:
            assert result["trained"] == stream[:epochs], case
        else:  # Keras ends an epoch early at the end of the stream's
            flat = [*itertools.chain.from_iterable(result["trained"])]
            assert flat == [*itertools.chain.from_iterable(stream)][: len(flat)], case
            assert len(flat) >= 2 * STEPS, case
        if "validation" in case and case["feed"] != "endless":  # (each validation begins the next epoch)
            assert result["validated"] == [epoch[:2] for epoch in streams.epochs[case["feed"]][:epochs]], case


def routes_of(backend: str) -> list[str]:
    """Return the routes that can be tested here."""
    needed = {"keras": backend, "dataset": "tensorflow", "torch": "torch"}
    return [route for route, library in needed.items() if find_spec(library) is not None]


def half(cases: list[dict[str, Any]], *, rest: bool = False) -> list[dict[str, Any]]:
    """Return half of the cases of each route, or the other half. In both, any two of the settings meet."""
    return [case for at, case in enumerate(cases) if (at % 12 in (0, 3, 5, 6, 8, 11)) is not rest]


def strategy_cases(streams: Streams) -> list[dict[str, Any]]:
    """Return a few of the cases, under a strategy: it is slow without a graph."""
    keras, dataset = (cases_of(streams, route, strategy=True) for route in ("keras", "dataset"))
    return [keras[2], keras[5], dataset[1], dataset[6]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_fit_trains_on_the_stream_by_every_route(streams: Streams, keras_launcher: Launcher, backend: str) -> None:
    routes = routes_of(backend)
    cases = half([case for route in routes for case in cases_of(streams, route)])
    if backend == "tensorflow":
        cases += strategy_cases(streams)
    state = streams.states["unknown"]
    refused = [{"route": route, "feed": "unknown", "state": state} for route in routes if route != "keras"]
    beside = [{"route": "torch", "feed": "known", "strategy": True}] * (backend == "tensorflow" and "torch" in routes)
    results = run(streams, keras_launcher, cases + refused + beside)
    check(streams, cases, results[: len(cases)])
    for result in results[len(cases) : len(cases) + len(refused)]:
        # Keras would take the length of the rest for that of the other epochs.
        assert "Give fit connection.keras(), or set Feed(samples=)" in result["error"]
    for result in results[len(cases) + len(refused) :]:
        assert "the model would never see those batches: give model.fit connection.keras()" in result["error"]


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_fit_trains_with_any_three_settings_together(streams: Streams, keras_launcher: Launcher, backend: str) -> None:
    cases = half([case for route in routes_of(backend) for case in cases_of(streams, route)], rest=True)
    results = run(streams, keras_launcher, cases)
    check(streams, cases, results)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_dataset_for_keras_imports_nothing_but_the_backend(streams: Streams, backend: str) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    fits, predicts = {"route": "keras", "feed": "known", "fits": 3}, {"route": "keras", "feed": "known", "predicts": 1}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=json.dumps([streams.urls, [fits, predicts]]),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"},
    )
    assert ended.returncode == 0, ended.stderr
    fitted, predicted, imported = map(json.loads, ended.stdout.splitlines())
    check(streams, [fits], [fitted])
    assert predicted == {"predicted": 48}, "the batch that built the model is in it"
    assert imported == [backend] * (backend != "jax")
