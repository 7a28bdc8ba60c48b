"""A consumer that reads and logs. It runs in a thread, or as a process: `python -m tests.chaos.reading FILE`.

compare.py describes the log. Only consumers that need TensorFlow import it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import penstock

from .sample import ROWS, checksum, payload, rows_of, width_of
from .scenario import Consumer, FeedCase, Step

AWAY = 40.0
"""Seconds that a consumer tries to connect to a daemon that is away."""


def parts(case: FeedCase, batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the payload, the draw and the id of a batch."""
    if case.structure == "tuple":
        return tuple(map(np.asarray, batch))
    if case.structure == "dict":
        return tuple(np.asarray(batch[key]) for key in ("payload", "draw", "id"))
    body, rest = batch["x"]
    identity, odd = np.asarray(batch["id"]), np.asarray(batch["odd"])
    assert (odd == (identity[..., 3] % 2 == 1)).all()
    return np.asarray(body), np.asarray(rest["draw"]), identity


def look(case: FeedCase, batch: Any) -> tuple[list[list[int]], str]:
    """Return the ids of a batch as it was before its feed transformed it, and its fault in words, or ""."""
    body, draw, identity = parts(case, batch)
    if case.transforms:
        body, draw, identity = body[::-1], draw[::-1], identity[::-1]
    found, wrong = [], ""
    for row in range(len(identity)):
        tag, epoch, split, number, crc = identity[row].tolist()
        found.append([epoch, split, number, crc])
        width = case.width
        if case.batch_size is None:
            width = width_of(width, split, number // ROWS)
            if len(identity) != rows_of(split, number // ROWS):
                wrong = f"a ready batch of split {split} has {len(identity)} rows"
        if tag != case.tag:
            wrong = f"a row of the feed {tag} came in the feed {case.tag}: {identity[row].tolist()}"
        elif not np.array_equal(body[row], payload(tag, epoch, split, number, width)):
            wrong = f"the payload of sample {split}:{number} of epoch {epoch} is another's, or damaged"
        elif checksum(np.ascontiguousarray(body[row]), np.ascontiguousarray(draw[row])) != crc:
            wrong = f"sample {split}:{number} of epoch {epoch} is damaged: its checksum is not {crc}"
    return found, wrong


class Reading:
    """One consumer. `run` reads according to `plan` and logs with `emit`.

    Args:
        meet: called before and after the consumer closes a connection to resume from a state, and before it closes the
            last one: all ranks do this together.
        more: returns whether to read more epochs than the plan has.
        state, epochs, batches: where a killed consumer continues: its state, and the epochs and batches that it had
            read.
        saves: log a state with each batch.
    """

    def __init__(
        self,
        case: FeedCase,
        plan: Consumer,
        url: str,
        emit: Callable[[list[Any]], None],
        *,
        meet: Callable[[], None] = lambda: None,
        more: Callable[[], bool] = lambda: False,
        state: dict[str, Any] | None = None,
        epochs: int = 0,
        batches: int = 0,
        saves: bool = False,
        **options: Any,
    ) -> None:
        self.case, self.plan, self.url, self.emit, self.options = case, plan, url, emit, options
        self.meet, self.more = meet, more
        self.connection: penstock.Connection | None = None
        self.turn = 0
        self._state, self._epochs, self._saves = state, epochs, saves
        self._steps = list(plan.steps)
        while batches and self._steps:  # the steps that were done when it was killed
            step = self._steps.pop(0)
            if step.batches is not None and batches <= step.batches:
                self._steps.insert(0, Step(max(1, step.batches - batches), step.then))
                break
            batches -= step.batches or batches
        self._consumed = self._loaded = 0
        self._kept: list[tuple[Any, list[list[int]]]] = []
        self._failures = 0
        self._left: tuple[int, int] | None = None
        """The epoch that a step left, and how many batches had been read then."""

    def run(self) -> None:
        """Read to the end of the plan. Log an error of Penstock."""
        try:
            self._connect(self._state)
            while (self._epochs < self.plan.epochs or self.more()) and self._epoch():
                pass
            self._recheck()
            self.meet()  # a rank that is cut off before its last batches needs the others to reconnect
        except penstock.EndOfStream:
            self.emit(["over"])
        except penstock.PenstockError as error:
            self.emit(["failed", type(error).__name__, str(error)[:600]])
        finally:
            self._kept.clear()
            if self.connection is not None:
                self.connection.close()
        self.emit(["closed"])

    def _connect(self, state: dict[str, Any] | None, load: bool = False) -> None:
        deadline = time.monotonic() + AWAY
        while True:
            try:
                given = None if load else state
                start = {"start": self.plan.start} if state is None and self.plan.start != "beginning" else {}
                self.connection = penstock.connect(
                    self.url, transport=self.plan.transport, state=given, **start, **self.options
                )
                if load:
                    self.connection.load_state_dict(state)
                break
            except (penstock.Unreachable, penstock.ConnectionLost, penstock.DaemonStopped):
                if self.connection is not None:
                    self.connection.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self.turn = self.connection.info.turn
        self._consumed = self._loaded = state["consumed"] if state else 0

    def _iterate(self) -> Iterator[Any]:
        assert self.connection is not None
        if self.plan.how in ("eager", "mapped"):
            import tensorflow as tf

            dataset = self.connection.dataset()
            if self.plan.how == "mapped":

                def touched(*leaves: Any) -> Any:
                    return tf.nest.map_structure(tf.identity, leaves if len(leaves) > 1 else leaves[0])

                dataset = dataset.map(touched, num_parallel_calls=2).prefetch(2)
            return iter(dataset)
        return self.connection.batches()

    def _epoch(self) -> bool:
        """Read to the end of an epoch, or until a step leaves it. Return whether to continue."""
        assert self.connection is not None
        step = self._steps.pop(0) if self._steps else Step(None)
        count = 0
        iterator = self._iterate()
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except penstock.EndOfStream:
                raise
            except Exception as error:  # TensorFlow wraps it
                if isinstance(self.connection.error, penstock.EndOfStream):
                    raise self.connection.error from None
                if "EndOfStream: " in str(error):  # the last epoch had no batches left
                    raise penstock.EndOfStream("in TensorFlow's words") from error
                if not self._goes_on_after(error, refused=count == 0):
                    raise self.connection.error or error from None
                if step.batches is not None:
                    self._steps.insert(0, Step(step.batches - count, step.then))
                return True
            self._handed(batch)
            del batch
            count += 1
            if self.plan.pause:
                time.sleep(self.plan.pause)
            if count == step.batches:
                if step.then != "go":
                    del iterator
                    return self._do(step.then)
                step, count = self._steps.pop(0) if self._steps else Step(None), 0
        self._epochs += 1
        self.emit(["end", self.connection.stats()["epoch"]])
        return True

    def _handed(self, batch: Any) -> None:
        assert self.connection is not None
        ids, wrong = look(self.case, batch)
        if self._consumed == self._loaded:
            self.emit(["in", self.connection.stats()["epoch"]])
        self._consumed += 1
        event: list[Any] = ["batch", ids]
        if self._saves:
            event += [self.connection.state_dict(), self._epochs]
        self.emit(event)
        if wrong:
            self.emit(["wrong", wrong])
        if self.plan.how == "hoard":
            self._kept.append((batch, ids))
        elif self.plan.how == "scribble":  # a batch belongs to its consumer: nobody else reads it again
            for leaf in parts(self.case, batch):
                leaf[...] = 77

    def _do(self, then: str) -> bool:
        assert self.connection is not None
        if then == "close":
            self.connection.close()
            return False
        if then == "break":
            self._epochs += 1
            self._left = self.connection.stats()["epoch"], self._consumed
            self.emit(["break"])
            if self.plan.how in ("eager", "mapped"):
                self._count_what_was_left()
            return True
        state = self._place()
        self.meet()
        self._again(state, load=then == "load")
        return True

    def _count_what_was_left(self) -> None:
        """Wait until TensorFlow takes no more batches of an epoch that was left. All that it took count."""
        assert self.connection is not None
        taken, still = -1, 0
        while still < 10:
            now = self.connection.stats()["batches"]
            taken, still = now, still + 1 if now == taken else 0
            time.sleep(0.03)
        self._consumed = self._loaded + taken

    def _place(self) -> dict[str, Any]:
        assert self.connection is not None
        consumed = self._consumed if self.plan.how in ("eager", "mapped") else None
        state: dict[str, Any] = json.loads(json.dumps(self.connection.state_dict(consumed)))
        return state

    def _again(self, state: dict[str, Any], load: bool = False) -> None:
        assert self.connection is not None
        self.connection.close()
        self.meet()
        self._connect(state, load)
        self.emit(["resumed"])

    def _goes_on_after(self, error: Exception, refused: bool) -> bool:
        """Resume from the state of a failed stream if its failure is a passing one. Return whether it resumed.

        A failed stream cannot begin an epoch. If it `refused` to begin the next one (TensorFlow had taken the error
        ahead, together with the batches before it), its state is still within the epoch that was left before. This
        reader then continues after the batches that it has logged, not after those that TensorFlow dropped.
        """
        assert self.connection is not None
        failed = self.connection.error
        if not isinstance(failed, penstock.GeneratorError) or self.case.on_error != "raise":
            return False
        self._failures += 1
        passing = sum(failure.times for failure in self.case.failures if failure.what == "raise")
        if self._failures > 3 * passing or any(not failure.times for failure in self.case.failures):
            return False
        self.emit(["raised", str(failed)[:200]])
        if refused and self._left is not None and self._left[0] == self.connection.stats()["epoch"]:
            self._consumed, self._left = self._left[1], None
            self._epochs -= 1
            self.emit(["not left"])
        self._again(self._place())
        return True

    def _recheck(self) -> None:
        """Check that the batches that were kept have not changed."""
        for batch, ids in self._kept:
            if look(self.case, batch)[0] != ids:
                self.emit(["wrong", f"a batch that was kept has changed: it was {ids[:4]}"])
                return


def main() -> None:
    """Read according to the JSON file. Write each event as a line of a log file, which outlives the process."""
    with open(sys.argv[1]) as file:
        said = json.load(file)
    from . import scenario

    case = eval(said["case"], vars(scenario))
    plan = eval(said["plan"], vars(scenario))
    log = os.open(said["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def emit(event: list[Any]) -> None:
        os.write(log, json.dumps(event).encode() + b"\n")

    reading = Reading(case, plan, said["url"], emit, **said["options"])
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    reading.run()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    main()
