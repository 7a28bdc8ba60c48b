"""`penstock.keras.Feeding` says in `fit` how long training waits for data, and what limits it."""

from __future__ import annotations

import csv
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import penstock
from penstock._measure.feeding_summary import figures_of_training
from penstock._transport import daemon_status
from penstock_proto.status.status_shape import Status
from penstock_proto.status.verdict import verdict
from tests.conftest import Serve
from tests.fakes.fault_proxy import FaultProxy
from tests.proto.test_status_history import status

FEEDS = """
    import time
    import numpy as np
    from penstock_server import Feed

    def made(seconds, size=4):
        def generator(split):
            block = np.ones(size, np.float32)
            while True:
                time.sleep(seconds)
                yield block
        return generator

    options = {"splits": range(16), "batch_size": 1, "turn": 1}
    slow = Feed(made(0.06), **options)
    slower = Feed(made(0.15), **options)
    quick = Feed(made(0), **options)
    one_lane = Feed(made(0.06), **{**options, "splits": range(1)})
    wide = Feed(made(0, 250_000), **options)
    large = Feed(made(0.06, 1_000_000), **options)
"""

Fit = Callable[..., Any]


@pytest.fixture
def fit(tf: Any) -> Fit:
    """`fit(dataset, feeding, step=0.1, epochs=2, steps=20)` trains with steps that sleep, and returns the history."""
    import keras

    class Sleeps(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, seconds: float, ended: Callable[[float, float], None] | None) -> None:
            super().__init__()
            self.seconds, self.ended = seconds, ended

        def call(self, x: Any) -> Any:
            def slept(x: Any) -> Any:
                began = time.monotonic()
                time.sleep(self.seconds)
                if self.ended is not None:
                    self.ended(began, time.monotonic())
                return x

            y = tf.py_function(slept, [x], x.dtype)
            y.set_shape(x.shape)
            return y

    def fit(
        dataset: Any,
        *callbacks: Any,
        step: float = 0.0,
        epochs: int = 2,
        steps: int = 20,
        per_call: int = 1,
        validation: Any = None,
        ended: Callable[[float, float], None] | None = None,
        **options: Any,
    ) -> Any:
        def example(x: Any) -> Any:
            return x[:, :4], tf.zeros([tf.shape(x)[0], 1])

        dataset = dataset.map(example).repeat()
        if validation is not None:
            options["validation_data"] = validation.map(example).repeat()
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.Dense(1)(Sleeps(step, ended)(x) if step else x))
        model.compile("sgd", "mse", steps_per_execution=per_call, jit_compile=not step)
        options = {"verbose": 0, **options}
        return model.fit(dataset, epochs=epochs, steps_per_epoch=steps, callbacks=[*callbacks], **options).history

    return fit


@contextmanager
def another_rank(url: str, step: float) -> Iterator[None]:
    """Run a slow rank 1 of 2."""
    ends = threading.Event()

    def read() -> None:
        with penstock.connect(url, rank=1, world_size=2) as connection, suppress(penstock.StreamClosed):
            for _ in connection.batches():
                if ends.wait(step):
                    break

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize(
    ("feed", "step", "options", "waits", "cause"),
    [
        ("quick", 0.05, {}, False, "The trainer is the bottleneck"),
        ("slower", 0.0, {}, True, "Workers are busy"),
        ("one_lane", 0.0, {}, True, "The feed has 1 split for 2 workers, give it more splits"),
        ("wide", 0.0, {"throttled": True}, True, "The network, which carries"),
        ("large", 0.0, {"workers": 4, "memory": "60M"}, True, "slots in production, too little for 4 workers"),
        ("quick", 0.0, {"ranks": 2}, True, "Rank 1 is slower"),
    ],
)
def test_the_summary_names_the_cause(
    serve: Serve, fit: Fit, feed: str, step: float, options: dict[str, Any], waits: bool, cause: str
) -> None:
    throttled, ranks = options.pop("throttled", False), options.pop("ranks", 1)
    daemon = serve(FEEDS, feed, **options)
    from penstock.keras import Feeding

    feeding = Feeding()
    with ExitStack() as stack:
        url, how = daemon.url, {}
        if throttled:
            proxy = stack.enter_context(FaultProxy(int(re.search(r":(\d+)/", url)[1])))  # type: ignore[index]
            proxy.throttle(20_000_000, 60)
            url, how = re.sub(r":\d+/", f":{proxy.port}/", url), {"transport": "tcp"}
        if ranks > 1:
            stack.enter_context(another_rank(url, 0.06))
            how = {"rank": 0, "world_size": 2}
        connection = stack.enter_context(penstock.connect(url, **how))
        steps = 20 if feed == "slower" else 40
        history = fit(connection.dataset(), feeding, step=step, epochs=2, steps=steps)
    assert cause in feeding.summary, feeding.summary
    assert (feeding.train.waiting > 0.5) is waits, feeding.summary
    assert (history["data_ready"][1] > 0.5) is not waits
    assert (history["data_wait"][1] > 0.01) is waits
    assert feeding.train.steps == 2 * steps - 1, "all but the first"


@pytest.mark.parametrize("per_call", [1, 5])
def test_the_measured_wait_is_that_of_the_steps_and_not_that_of_tensorflows_thread(
    serve: Serve, fit: Fit, per_call: int
) -> None:
    """Each step notes when it got its batch and when it finished."""
    daemon = serve(FEEDS, "slow", workers=1)
    from penstock.keras import Feeding

    with penstock.connect(daemon.url) as connection:
        feeding, times = Feeding(), list[tuple[float, float]]()
        fit(
            connection.dataset(),
            feeding,
            step=0.02,
            epochs=1,
            steps=30,
            per_call=per_call,
            ended=lambda *at: times.append(at),
        )
        truth = sum(
            begun - ended for (_, ended), (begun, _) in pairwise(times[per_call - 1 :])
        )  # without the first call
        assert 0.4 * truth < feeding.train.waited < 1.05 * truth, "Keras spends the rest between two steps"
        assert 0.3 * feeding.train.seconds < feeding.train.waited < connection.stats()["wait_seconds"]


def test_the_figures_are_shown_where_keras_shows_figures(
    serve: Serve, fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import keras

    from penstock.keras import Feeding

    daemon = serve(FEEDS, "slow", "quick")
    log = tmp_path / "log.csv"
    callbacks = Feeding(), keras.callbacks.CSVLogger(log)
    with penstock.connect(daemon.urls["slow"]) as train, penstock.connect(daemon.urls["quick"]) as validation:
        history = fit(
            train.dataset(),
            *callbacks,
            validation=validation.dataset(),
            epochs=2,
            steps=40,
            validation_steps=5,
            verbose=1,
        )
    shown = capsys.readouterr().out
    assert re.search(r"/40.* - data_ready: 0\.\d+ - data_wait: 0\.\d+", shown), shown
    assert re.search(r"40/40.* - val_data_ready: \S+ - val_data_wait: \S+", shown), shown
    assert re.search(r"\npenstock: the trainer waited .* of the steps found a batch ready", shown)
    names = ["data_ready", "data_wait", "val_data_ready", "val_data_wait"]
    with log.open() as file:
        rows = list(csv.DictReader(file))
    for name in names:
        assert float(rows[1][name]) == pytest.approx(history[name][1])
    assert callbacks[0].validation.steps == 9, "all but the first"


def test_what_cannot_be_known_is_not_shown(serve: Serve, fit: Fit) -> None:
    from penstock.keras import Feeding

    daemon = serve(FEEDS, "quick")
    feeding = Feeding()
    with penstock.connect(daemon.url) as connection:
        twice = connection.dataset().flat_map(tf_repeated)
        history = fit(twice, feeding, epochs=1, steps=20)
    assert feeding.summary.startswith("waits are unknown, because a step did not consume one batch")
    assert np.isnan(history["data_ready"]).all()


def tf_repeated(x: Any) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensors(x).repeat(40)


def test_a_loop_of_ones_own_is_measured_exactly_whatever_stages_it_has(serve: Serve, tf: Any) -> None:
    from penstock.keras import Feeding

    daemon = serve(FEEDS, "slow", "quick")
    feeding = Feeding()
    with penstock.connect(daemon.urls["slow"]) as connection:
        began = time.monotonic()
        for number, _ in enumerate(feeding.watch(connection.dataset().shuffle(4).batch(2))):
            if number == 0:
                began = time.monotonic()
            if number == 15:
                break
        seconds = time.monotonic() - began
    assert feeding.train.steps == 15
    assert feeding.train.waited == pytest.approx(seconds, rel=0.2)
    assert feeding.train.production > 0.2 * feeding.train.waited
    assert feeding.train.ready < 10
    assert "the trainer waited" in feeding.summary

    feeding = Feeding()
    with penstock.connect(daemon.urls["quick"]) as connection:
        for number, _ in enumerate(feeding.watch(connection.dataset())):
            time.sleep(0.05)
            if number == 15:
                break
    assert feeding.train.waiting < 0.5


def test_the_figures_of_two_daemons_are_not_compared() -> None:
    here = f"{socket.gethostname()}:{os.getpid()}"
    first, last, renewed = (
        replace(status(second, second, client=here), id=daemon) for second, daemon in ((1, "a"), (9, "a"), (9, "b"))
    )
    found = figures_of_training([first, last], "train", None, 0.5)
    assert found is not None
    assert found.consumer_cpu == 0.5
    answers: list[Status] = []
    for state in (first, last, renewed):
        answers = [*daemon_status.kept(state, answers), state]
    assert answers == [renewed]
    assert figures_of_training(answers, "train", None, 0.5) is None


def test_of_a_long_training_two_statuses_are_kept_for_each_number_of_workers() -> None:
    answers: list[Status] = []
    for second in range(60):
        made = status(second, second)
        state = replace(made, workers=[replace(made.workers[0], number=n) for n in range(2 if second < 30 else 4)])
        answers = [*daemon_status.kept(state, answers), state]
    assert [state.seconds for state in answers] == [0, 1, 29, 30, 59], "the first has no batch yet"
    for second in range(60, 100):  # one comes and goes
        made = status(second, second)
        state = replace(made, workers=[replace(made.workers[0], number=n) for n in range(4 + second % 2)])
        answers = [*daemon_status.kept(state, answers), state]
    assert [state.seconds for state in answers] == [*range(100 - daemon_status.MOST, 100)]


def test_a_training_whose_workers_were_scaled_is_judged_by_the_time_since() -> None:
    here = f"{socket.gethostname()}:{os.getpid()}"

    def state(second: int, workers: int) -> Status:
        made = status(second, second, client=here, waits={"production": 0.9})
        return replace(made, workers=[replace(made.workers[0], number=number) for number in range(workers)])

    early, late = [state(second, 2) for second in (1, 20)], [state(second, 4) for second in (30, 60)]
    found = figures_of_training([*early, *late], "train", None, 0.0)
    assert found is not None
    assert (len(found.workers), found.seconds) == (4, 30)
    found = figures_of_training([*early, late[0]], "train", None, 0.0)
    assert found is not None
    assert "the number of workers went from 2 to 4" in verdict(found).text


def test_a_connections_stats_say_why_its_consumer_waited(serve: Serve) -> None:
    daemon = serve(FEEDS, "slow", "wide")
    with penstock.connect(daemon.urls["slow"]) as connection:
        assert connection.stats()["ready"] is None
        for _ in islice(connection.batches(), 20):
            pass
        stats = connection.stats()
    assert stats["ready"] < 0.7
    assert sum(stats["waits"].values()) == pytest.approx(stats["wait_seconds"])
    assert stats["waits"]["production"] > 0.5 * stats["wait_seconds"]
    with FaultProxy(int(re.search(r":(\d+)/", daemon.urls["wide"])[1])) as proxy:  # type: ignore[index]
        proxy.throttle(10_000_000, 60)
        url = re.sub(r":\d+/", f":{proxy.port}/", daemon.urls["wide"])
        with penstock.connect(url, transport="tcp") as connection:
            for _ in islice(connection.batches(), 15):
                pass
            waits = connection.stats()["waits"]
    assert waits["transfer"] > waits["production"] + waits["handoff"]


def test_it_never_fails_a_training(
    serve: Serve, fit: Fit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock._measure import feeding as _feeding
    from penstock._transport import daemon_status
    from penstock.keras import Feeding

    daemon = serve(FEEDS, "quick")
    feeding = Feeding()
    monkeypatch.setattr(daemon_status, "parse", lambda url: (_ for _ in ()).throw(OSError("no such host")))
    with penstock.connect(daemon.url) as connection:
        fit(connection.dataset(), feeding, epochs=1, steps=5)
    assert "of the steps found a batch ready" in feeding.summary

    def broken(*_: object, **__: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(_feeding, "summary", broken)
    with caplog.at_level(logging.ERROR, "penstock"), penstock.connect(daemon.url) as connection:
        fit(connection.dataset(), Feeding(), epochs=1, steps=5)
    assert "the summary of the training failed" in caplog.text
    caplog.clear()  # its traceback holds the connection
