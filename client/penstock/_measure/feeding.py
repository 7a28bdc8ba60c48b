"""`Feeding`: measures how long training waits for data, in `Model.fit` or in a loop of your own, and says why.

`penstock.keras` exports it. `step_waits.py` explains how a wait is measured. `feeding_summary.py` draws conclusions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras

from penstock_proto.status.figures import Figures

from .._state.hand_overs import HandOvers
from .._stream.handoff import HandOff
from .._stream.stream_handle import datasets
from .._transport.daemon_status import DaemonStatus
from .feeding_summary import figures_of_training, summary
from .step_waits import StepWaits, Waits

ASK_EVERY = 5.0
"""Seconds between two questions for the daemon's status, at the beginning of a step."""
PATIENCE = 2.0
"""Most seconds that the end of the training waits for the daemon's last status."""
QUICK = 0.002
"""In a loop of your own, a batch counts as ready if `next` returns within this many seconds."""
_EARLY = ("torch", "numpy")
"""The backends on which Keras takes the batch of a step before it says that the step begins."""
_READY, _WAIT = "data_ready", "data_wait"
_END = object()

logger = logging.getLogger("penstock")


@dataclass(slots=True)
class _Stream:
    """A stream that `fit` may read.

    Attributes:
        feed, rank: the stream's feed and rank.
        handoff: hands the stream over. (This is not the stream's handle, which would keep the connection open after the
            user's last dataset is gone.)
        overs: records when each slab is handed over.
        status: the status of its daemon, or None if it has no daemon.
        validation: True if validation reads it, False if training does, None before it is read.
    """

    feed: str
    rank: int | None
    handoff: HandOff
    overs: HandOvers
    status: DaemonStatus | None
    validation: bool | None = None


class Feeding(keras.callbacks.Callback):  # type: ignore[misc]
    """Measures how long training waits for data, and why::

        model.fit(penstock.dataset("tcp://loader:5555/train"), callbacks=[penstock.keras.Feeding()])

    `fit` then reports two more figures, in the progress bar, `History`, `CSVLogger` and `TensorBoard` (put Feeding
    before these in the list):

    - `data_ready`: the share of the steps whose batch was there when the step asked for it;
    - `data_wait`: how many seconds a step waited for its batch, on average.

    If `validation_data` comes from Penstock too, there are also `val_data_ready` and `val_data_wait`. At the end of
    `fit` it prints one line that says what the loader cost and what limits the training (not with `verbose=0`, but
    `summary` always has the line). The first call of the training step does not count, because it compiles the model.

    It detects which feeds `fit` reads. Each element of `fit`'s dataset must be one batch of each of them, in order:
    give `fit` `connection.keras()`, on any backend, or make the dataset from `connection.dataset()` with `map` and
    `prefetch`, or zip such datasets. For a loop of your own use `watch`, which measures any dataset.

    Attributes:
        summary: one line that says what the loader cost. Empty until `fit`, or an iteration of `watch`, has ended.
    """

    async_safe = True  # Keras may call `on_train_batch_end` late, on another thread

    _shown: dict[str, float] | None
    _began: float | None
    _validated: Waits | None

    def __init__(self) -> None:
        super().__init__()
        self.summary = ""
        self._early = keras.backend.backend() in _EARLY
        self._direct = keras.backend.backend() != "tensorflow"
        self._reset()

    @property
    def train(self) -> Waits:
        """Sums over the training steps that were measured."""
        return self._train.sums

    @property
    def validation(self) -> Waits:
        """Sums over the validation steps that were measured."""
        return self._validation.sums

    def watch(self, dataset: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a dataset, and measure how long each `next` takes, for a training loop of your own::

            feeding = penstock.keras.Feeding()
            for epoch in range(10):
                for images, labels in feeding.watch(dataset):
                    train_step(images, labels)
            print(feeding.summary)

        The time in `next` is exact for any dataset. `summary` is updated when an iteration ends.
        """
        if not self._streams:
            self._begin()
        iterator, start = iter(dataset), time.monotonic()
        thread_waited = self._thread_waited()
        got: float | None = None
        try:
            while True:
                asked, before = time.monotonic(), self._waited()
                if got is not None:
                    self.train.seconds += asked - got
                batch = next(iterator, _END)
                if batch is _END:
                    return
                now = time.monotonic()
                if got is not None:  # the first one waits for the iteration to begin
                    self.train.add(_of_next(now - asked, before, self._waited()))
                got = now
                self._ask_at_times(now)
                yield batch
                del batch
        finally:
            self._found_sources(validation=False)
            self._asked_in_vain += self._thread_waited() - thread_waited
            self._trained += time.monotonic() - start
            self._say()

    # --- called by Keras ---

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the streams. Called by Keras."""
        self._reset()
        self._train.skip = self._validation.skip = 1
        self._steps, self._fitting = self.model.steps_per_execution, True
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to measure the epoch. Called by Keras."""
        self._epoch = Waits()
        self._validated = None
        if self._early:
            with self._lock:
                self._train.asks(time.monotonic(), self._steps)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note that a step asks for its batch. Called by Keras."""
        now = time.monotonic()
        with self._lock:
            if not self._early:
                self._found_sources(validation=False)
                self._count(self._train.asks(now, self._steps))
            self._number = batch
            self._ask_at_times(now)
            if self._began is None and not self._train.skip:
                self._began, self._thread_had_waited = now, self._thread_waited()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the end of the step, and show its figures. Called by Keras, perhaps late."""
        now = time.monotonic()
        with self._lock:
            if batch == self._number + self._steps - 1:  # the next one has not begun
                if self._validated is None:
                    self._found_sources(validation=False)
                self._count(self._train.end(now))
                if self._early:
                    self._train.asks(now, self._steps)
            shown = self._shown
        if logs is not None and shown is not None:
            logs.update(shown)

    def on_test_begin(self, logs: Any = None) -> None:
        """End the training steps of the epoch, because validation begins. Called by Keras."""
        if self._fitting:
            self._end_of_steps()
            self._validated = Waits()
            if self._early:
                self._validation.asks(time.monotonic(), self._steps)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """As on_train_batch_begin."""
        now = time.monotonic()
        with self._lock:
            if self._validated is not None:
                if not self._early:
                    self._found_sources(validation=True)
                    self._validated.add(self._validation.asks(now, self._steps) or Waits())
                self._validation_number = batch

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """As on_train_batch_end."""
        now = time.monotonic()
        with self._lock:
            if self._validated is not None and batch == self._validation_number + self._steps - 1:
                self._found_sources(validation=True)
                self._validated.add(self._validation.end(now) or Waits())
                if self._early:
                    self._validation.asks(now, self._steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the figures of the epoch to `logs`. Called by Keras, after validation."""
        self._end_of_steps()
        self._train.end_epoch()
        self._validation.end_epoch()
        if logs is not None:
            if self._train.sources:
                logs.update(_figures(self._epoch if self._fits() else Waits()))
            if self._validation.sources and self._validated is not None:
                logs.update({f"val_{name}": value for name, value in _figures(self._validated).items()})
        self._ask()

    def on_train_end(self, logs: Any = None) -> None:
        """Print the summary. Called by Keras."""
        self._fitting = False
        self._say()
        if self.params.get("verbose"):
            print(f"penstock: {self.summary}", flush=True)
        for stream in self._streams:
            stream.handoff.hand_overs = None

    # --- the steps ---

    def _reset(self) -> None:
        self._streams: list[_Stream] = []
        self._train, self._validation = StepWaits(), StepWaits()
        self._lock = threading.Lock()
        self._number = self._validation_number = -1
        self._steps = 1
        self._epoch = Waits()
        self._shown = self._began = self._validated = None
        self._asked_in_vain = self._thread_had_waited = self._trained = 0.0
        self._fitting = False
        self._ask_at = 0.0

    def _begin(self) -> None:
        """Watch all streams that `fit` may read, and ask their daemons for the first status."""
        for handle in list(datasets):
            handoff, overs, status = handle.handoff, HandOvers(self._direct), None
            if handoff.url.startswith("tcp://"):
                status = DaemonStatus(handoff.url, handoff.keys)
            handoff.hand_overs = overs
            self._streams.append(_Stream(handle.info.name, handle.rank, handoff, overs, status))
        self._cpu, self._began_at = time.process_time(), time.monotonic()
        self._ask()

    def _ask_at_times(self, now: float) -> None:
        """Ask for a status if the last question was `ASK_EVERY` seconds ago, or before the first batch."""
        if now >= self._ask_at and self.train.steps:
            self._ask()
            self._ask_at = now + ASK_EVERY

    def _ask(self) -> None:
        for stream in self._streams:
            if stream.status is not None and not stream.validation:
                stream.status.ask()

    def _found_sources(self, *, validation: bool) -> None:
        """Assign the streams that were read for the first time to this phase."""
        for stream in self._streams:
            if stream.validation is None and stream.overs.total:
                stream.validation = validation
                (self._validation if validation else self._train).sources.append(stream.overs)

    def _count(self, found: Waits | None) -> None:
        if found is not None:
            self._epoch.add(found)
            self._shown = _figures(self._epoch) if self._fits() else None

    def _end_of_steps(self) -> None:
        """Note that all training steps of the epoch have ended."""
        with self._lock:
            self._found_sources(validation=False)
        if self._began is not None:
            self._asked_in_vain += self._thread_waited() - self._thread_had_waited
            self._trained += time.monotonic() - self._began
            self._began = None

    def _waited(self) -> tuple[float, float]:
        """Return how many seconds batches were waited for, perhaps ahead, and in how many of these they were coming."""
        waits = [stream.handoff.waited for stream in self._streams if not stream.validation]
        return max(waits, default=(0.0, 0.0))

    def _thread_waited(self) -> float:
        return self._waited()[0]

    # --- the end ---

    def _say(self) -> None:
        """Update the summary. This must not raise: the training has succeeded."""
        try:
            share = self._asked_in_vain / self._trained if self._trained > 0 else 0.0
            self.summary = summary(self.train, self._figures_of_daemon(), fits=self._fits(), asked_in_vain=share)
        except Exception:
            logger.exception("the summary of the training failed: please report this as a bug")

    def _fits(self) -> bool:
        return self._train.fits and not any(source.overflowed for source in self._train.sources)

    def _figures_of_daemon(self) -> Figures | None:
        """Return the daemon's figures for the training stream; None if it does not answer."""
        stream = next((stream for stream in self._streams if stream.validation is False), None)
        if stream is None or stream.status is None:
            return None
        stream.status.ask()
        stream.status.wait(PATIENCE)
        cpu = (time.process_time() - self._cpu) / max(1e-9, time.monotonic() - self._began_at)
        return figures_of_training(stream.status.answers, stream.feed, stream.rank, cpu)


def _of_next(seconds: float, before: tuple[float, float], after: tuple[float, float]) -> Waits:
    """Return the waits of a `next` that took `seconds`, given the waits of TensorFlow's thread before and after."""
    coming = min(seconds, after[1] - before[1])
    lacking = min(seconds, after[0] - before[0]) - coming
    return Waits(seconds, 1, seconds <= QUICK, max(0.0, lacking), coming, seconds - max(0.0, lacking) - coming)


def _figures(waits: Waits) -> dict[str, float]:
    """Return the figures of some steps for Keras's logs."""
    if not waits.steps:
        return {_READY: float("nan"), _WAIT: float("nan")}
    return {_READY: waits.ready / waits.steps, _WAIT: waits.waited / waits.steps}
