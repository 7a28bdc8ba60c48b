"""One Ctrl-C is one KeyboardInterrupt, also where the main thread waits for data inside TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock._adapters import interrupts
from penstock_server import Feed
from tests.fakes.fake_daemon import FakeDaemon, Stall, numbers

ctrl_c = functools.partial(os.kill, os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def ctrl_c_after(seconds: float, times: int = 1) -> Iterator[None]:
    timers = [threading.Timer(seconds + 0.5 * i, ctrl_c) for i in range(times)]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()


def test_fit_that_waits_for_data_raises_keyboard_interrupt(tf: Any) -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    info, epoch = numbers(3)
    with FakeDaemon(info, lambda e: [*epoch(e), Stall()]) as daemon:
        dataset = penstock.dataset(daemon.url)
        with ctrl_c_after(3), pytest.raises(KeyboardInterrupt):
            model.fit(dataset, epochs=2, verbose=0)


def slow(rng: np.random.Generator) -> Iterator[np.float32]:
    while True:
        time.sleep(0.01)
        yield np.float32(0)


def test_one_interrupt_is_enough_while_tensorflow_gathers_batches_that_keep_coming(tf: Any) -> None:
    dataset = penstock.dataset(Feed(slow, segment=1000, batch_size=4), workers=0).unbatch().shuffle(1_000_000)
    with ctrl_c_after(1), pytest.raises(KeyboardInterrupt):
        next(iter(dataset))


def called_from_c(tmp_path: Path, end: str) -> Callable[[Any], Any]:
    """Return a function in a file named as TensorFlow's, which is interrupted and then goes on to `end`."""
    file = tmp_path / "tensorflow/python/framework/errors_impl.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"def inner(item):\n    ctrl_c()\n    done.append(item)\n    {end}\n\ndef outer(item):\n    inner(item)\n"
    )
    names: dict[str, Any] = {"ctrl_c": ctrl_c, "done": []}
    exec(compile(file.read_text(), file, "exec"), names)
    names["outer"].done = names["done"]
    return names["outer"]


@pytest.mark.parametrize("end", ["return", "raise ValueError"])
def test_a_function_that_tensorflow_calls_from_c_ends_before_the_interrupt_is_raised(tmp_path: Path, end: str) -> None:
    function = called_from_c(tmp_path, end)
    after = []
    interrupts.listen()
    try:
        with pytest.raises(KeyboardInterrupt):
            next(map(function, [1]))  # from C
            after.append(1)
    finally:
        interrupts.unlisten()
    assert function.done == [1]  # type: ignore[attr-defined]
    assert after == [] or end == "return", "from Python 3.12 on it may be raised some lines later"
    assert sys.gettrace() is None
    assert not interrupts.pending()


def test_an_interrupt_that_is_handled_is_not_pending() -> None:
    interrupts.listen()
    try:
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
            time.sleep(1)
        time.sleep(0.15)
        assert not interrupts.pending()
    finally:
        interrupts.unlisten()


def test_the_users_own_handler_is_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    interrupts.listen()
    try:
        ctrl_c()
        time.sleep(0.15)
        assert heard == [signal.SIGINT]
        assert not interrupts.pending()
    finally:
        interrupts.unlisten()
        signal.signal(signal.SIGINT, before)


def test_the_handler_lives_as_long_as_a_dataset_does() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupts.listen()
    interrupts.listen()
    interrupts.unlisten()
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    interrupts.unlisten()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


FITS = """
import os, signal, sys, threading, time
import numpy as np
import penstock

def rows():
    for number in range(100):
        if number == 50:
            {then}
        yield np.zeros(3, "f4"), 1.0

if __name__ == "__main__":
    import keras
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = penstock.dataset(penstock.Feed(rows, batch_size=2), workers=1, prefetch=256)
    model.fit(batches, verbose=0, callbacks=[{callback}])
"""


@pytest.mark.parametrize(
    ("then", "callback"),
    [
        ("raise ValueError('no pixels')", ""),
        (
            "time.sleep(60)",
            "keras.callbacks.LambdaCallback(on_train_begin=lambda logs: "
            "threading.Timer(3, os.kill, [os.getpid(), signal.SIGINT]).start())",
        ),
    ],
    ids=["error", "Ctrl-C"],
)
def test_the_end_of_a_training_is_not_logged_once_for_each_batch_of_a_buffer(
    tmp_path: Path, then: str, callback: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FITS.format(then=then, callback=callback))
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "no pixels" in ended.stderr or "KeyboardInterrupt" in ended.stderr
    assert ended.stderr.count("op_kernel.cc") < 20
