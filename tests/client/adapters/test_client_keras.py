"""After a crash, `fit` and custom loops continue in the middle of an epoch, with identical results."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock
from tests.conftest import Serve, StartTrainer, wait_until
from tests.fakes.fake_daemon import FakeDaemon, dealt, numbers
from tests.processes.forked import Forked
from tests.processes.killed_fit import KILL, check_equal

LANES = [41, 30, 27]
TOTAL = -(-sum(LANES) // 4)
EPOCHS = 4

TRAIN = (
    """
import os, signal, sys
import keras, numpy as np, tensorflow as tf
import penstock, penstock.keras
url, directory, out, kill_at = sys.argv[1:5]
keras.utils.set_random_seed(7)
tf.config.experimental.enable_op_determinism()
model = keras.Sequential([
    keras.layers.Input((16,)), keras.layers.Rescaling(1e-3), keras.layers.Dense(8, "tanh"),
    keras.layers.Dropout(0.5), keras.layers.Dense(1),
])
model.compile("adam", "mse")
"""
    + KILL
    + """
connection = penstock.connect(url)
resume = penstock.keras.Resume(connection, directory, every=3)
history = model.fit(
    connection.dataset().map(lambda x, y: (x, tf.cast(y, tf.float32) * 1e-3)),
    epochs=4, verbose=0, shuffle=False, callbacks=[resume, Kill()],
)
print(Kill.steps, resume.consumed, history.epoch)
np.savez(out, *[np.array(v) for v in [*model.get_weights(), *[v.numpy() for v in model.optimizer.variables]]])
connection.close()
"""
)


def ended(trainer: Forked, status: int = 0) -> tuple[str, str]:
    """Wait until the trainer ends with `status`. Return its stdout and stderr."""
    out, err = trainer.communicate(timeout=100)
    assert trainer.returncode == status, err
    return out, err


@pytest.mark.timeout(240)
@pytest.mark.parametrize("turn", [1, 3])
def test_fit_killed_in_the_middle_of_epoch_2_ends_with_the_same_weights_bit_by_bit(
    start_trainer: StartTrainer, tmp_path: Path, turn: int
) -> None:
    info, epoch = dealt(LANES, turn=turn)
    with FakeDaemon(info, epoch) as daemon:

        def train(name: str, kill_at: int = 0) -> Forked:
            return start_trainer(TRAIN, daemon.url, str(tmp_path / name), str(tmp_path / f"{name}.npz"), str(kill_at))

        quiet = train("a")
        ended(train("b", kill_at=2 * TOTAL + 10), -signal.SIGKILL)
        again = train("b")
        out, _ = ended(quiet)
        assert out.split("\n")[0] == f"{EPOCHS * TOTAL} {EPOCHS * TOTAL} [0, 1, 2, 3]"
        out, err = ended(again)
        steps, consumed, *epochs = out.split("\n")[0].split(maxsplit=2)
        assert int(consumed) == EPOCHS * TOTAL
        assert TOTAL < int(steps) < 2 * TOTAL, "it must continue within epoch 2, and epoch 3 must have its full length"
        assert epochs == ["[2, 3]"]
        assert "ran out of data" not in err
        check_equal(tmp_path / "a.npz", tmp_path / "b.npz")


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Let Keras drop the objects that it keeps."""
    yield
    import keras

    keras.backend.clear_session()
    gc.collect()


def model_of(width: int = 16) -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((width,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_a_checkpoint_carries_the_state_with_the_model(tf: Any, tmp_path: Path) -> None:
    from penstock.keras import CheckpointState

    info, epoch = dealt(LANES)
    found = []
    with FakeDaemon(info, epoch) as daemon:
        for _ in range(3):
            connection = penstock.connect(daemon.url)
            step = tf.Variable(0, dtype=tf.int64)
            data = CheckpointState(connection, consumed=step)
            checkpoint = tf.train.Checkpoint(step=step, data=data)
            manager = tf.train.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
            if manager.latest_checkpoint:
                checkpoint.restore(manager.latest_checkpoint)
            for _, y in connection.dataset().take(7):
                found.append(int(y[0]))
                step.assign_add(1)
            manager.save()
            connection.close()
            del connection, data, checkpoint, manager
            gc.collect()
    assert found == list(range(21))


def test_a_dataset_whose_elements_are_not_batches_is_refused(
    tf: Any, forgotten: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.keras import Resume

    def even(x: Any, y: Any) -> Any:
        return tf.equal(y[0] % 2, 0)

    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        data = connection.dataset().filter(even).map(lambda x, y: (x, tf.cast(y, tf.float32)))
        with pytest.raises(ValueError, match="must be one batch"), pytest.warns(UserWarning, match="ran out"):
            model_of().fit(data, verbose=0, callbacks=[Resume(connection, tmp_path)])
        assert (
            "checkpoints are saved only at the ends of epochs, because fit counts no steps in an epoch" in caplog.text
        )
        del data


def test_another_model_than_that_of_the_checkpoint_is_refused(tf: Any, forgotten: None, tmp_path: Path) -> None:
    import keras

    from penstock.keras import Resume

    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon:
        with penstock.connect(daemon.url) as connection:
            data = connection.dataset().map(lambda x, y: (x, tf.cast(y, tf.float32)))
            model_of().fit(data, verbose=0, callbacks=[Resume(connection, tmp_path)])
            del data
        with penstock.connect(daemon.url) as connection:
            other = model_of()
            other.add(keras.layers.Dense(3))
            other.compile("sgd", "mse")
            data = connection.dataset().map(lambda x, y: (x, tf.cast(y, tf.float32)))
            with pytest.raises(ValueError, match="made with another model: it has 4 variables, and this model 6"):
                other.fit(data, epochs=2, verbose=0, callbacks=[Resume(connection, tmp_path)])
            del data, other


def test_a_feed_of_unknown_length_is_resumed_at_the_ends_of_epochs(tf: Any, forgotten: None, tmp_path: Path) -> None:
    from penstock.keras import Resume

    info, epoch = numbers(5)
    assert info.batches is None
    with FakeDaemon(info, epoch) as daemon:
        for run in range(2):
            connection = penstock.connect(daemon.url)
            resume = Resume(connection, tmp_path, every=1)
            assert resume.initial_epoch == run
            data = connection.dataset().map(lambda x, y: (x, tf.cast(y, tf.float32)))
            with pytest.warns(UserWarning, match="ran out of data"):
                model_of().fit(data, epochs=run + 1, verbose=0, callbacks=[resume])
            assert resume.consumed == 5 * (run + 1)
            connection.close()
            del data, connection, resume
            gc.collect()


def test_keras_is_not_surprised_by_the_end_of_an_epoch_of_unknown_length_or_the_log_explains_it(
    tf: Any, forgotten: None, caplog: pytest.LogCaptureFixture
) -> None:
    def arranged(batch: Any) -> Any:
        return batch[0], tf.cast(batch[1], tf.float32)

    info, epoch = numbers(5)
    with FakeDaemon(info, epoch) as daemon:
        with penstock.connect(daemon.url) as connection:
            model_of().fit(connection.keras(arranged), epochs=2, verbose=0)  # a warning would be an error
        assert not caplog.records
        data = penstock.dataset(daemon.url).map(lambda x, y: (x, tf.cast(y, tf.float32)))
        with pytest.warns(UserWarning, match="ran out of data"):
            model_of().fit(data, epochs=2, verbose=0)
        wait_until(lambda: bool(caplog.messages))
        (explained,) = caplog.messages
        assert "this epoch had 5 batches" in explained
        assert "ran out of data, which is harmless here: Feed(samples=" in explained


RANKS = """
    import numpy as np
    from penstock_server import Feed

    def rows(split):
        for i in range(20):
            yield np.full(16, i, "float32"), np.int64(20 * split + i)

    feed = Feed(rows, splits=range(8), batch_size=4, lanes=2, turn=2, samples=160)
"""


class OtherRank(threading.Thread):
    """Rank 1 of 2. It reads epoch after epoch, keeps each batch and the state after it, and stops once the other rank
    has closed its connection."""

    def __init__(self, url: str, state: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.read: list[int] = []
        self.states: dict[int, dict[str, Any]] = {}
        self._url, self._state = url, state
        self.start()

    def run(self) -> None:
        with penstock.connect(self._url, rank=1, world_size=2) as connection:
            if self._state is not None:
                connection.load_state_dict(self._state)
            with contextlib.suppress(penstock.StreamClosed):
                while True:
                    for _, y in connection.batches():
                        self.read.append(int(y[0]))
                        state = connection.state_dict()
                        self.states[state["consumed"]] = state


def test_fit_of_a_rank_goes_on_within_an_epoch(tf: Any, forgotten: None, serve: Serve, tmp_path: Path) -> None:
    import keras

    from penstock.keras import Resume

    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.params["epochs"] == 2 and resume.consumed == 27:
                deadline = time.monotonic() + 60
                while 25 not in other.states and time.monotonic() < deadline:  # its state there is needed below
                    time.sleep(0.01)
                raise InterruptedError

    daemon = serve(RANKS)
    state, read = None, []
    for epochs, raised in ((2, pytest.raises(InterruptedError)), (3, contextlib.nullcontext())):
        connection = penstock.connect(daemon.url, rank=0, world_size=2)
        assert connection.cardinality == 20
        resume = Resume(connection, tmp_path / "run", every=5)
        other = OtherRank(daemon.url, state)  # it connects once the state of this rank is loaded
        data = connection.dataset().map(lambda x, y: (x, tf.cast(y, tf.float32)))
        with raised:
            model = model_of()
            history = model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=[resume, Crash()])
        connection.close()
        other.join(60)
        state = other.states.get(25)
        read += other.read[: 25 - len(read)] if epochs == 2 else other.read
        del data, connection
    assert history.epoch == [1, 2]
    assert resume.consumed == 60
    assert int(model.optimizer.iterations.numpy()) == 60, "no step may be undone"
    with penstock.connect(daemon.url) as alone:
        stream = [int(y[0]) for _ in range(3) for _, y in alone.batches()]
    assert read[:60] == stream[1::2]


def data_of(connection: penstock.Connection) -> Any:
    """Return the connection's dataset in the form that `model_of` needs."""
    import tensorflow

    return connection.dataset().map(lambda x, y: (x, tensorflow.cast(y, tensorflow.float32)))


def test_resume_refuses_what_is_not_the_connection_that_fit_will_read(tf: Any, tmp_path: Path) -> None:
    from penstock.keras import CheckpointState, Resume

    info, epoch = dealt(LANES)
    (tmp_path / "file").touch()
    with FakeDaemon(info, epoch) as daemon, contextlib.ExitStack() as stack:

        def connection(**options: Any) -> penstock.Connection:
            return stack.enter_context(penstock.connect(daemon.url, **options))

        good = connection()
        for wrong, words in ((daemon.url, "a URL"), (good.dataset(), "a dataset"), (None, "None")):
            for user in (Resume, CheckpointState):
                with pytest.raises(TypeError, match=f"{user.__name__} was given {words}, but needs the connection"):
                    user(wrong, tmp_path)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"every='10': must be a number of steps"):
            Resume(good, tmp_path, every="10")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="keep=0: must be a number of checkpoints"):
            Resume(good, tmp_path, keep=0)
        with pytest.raises(OSError, match=r"cannot save checkpoints in .*file"):
            Resume(good, tmp_path / "file")
        with pytest.raises(OSError, match="cannot save checkpoints in '/proc/nothing'"):
            Resume(good, "/proc/nothing")
        batches = good.batches()
        next(batches)
        with pytest.raises(ValueError, match="has been read already"):
            Resume(good, tmp_path)
        with pytest.raises(ValueError, match=r"was given a state \(after 1 batches\).*connect without state="):
            Resume(connection(state=good.state_dict()), tmp_path)
        with pytest.raises(ValueError, match="of a group, whose stream has no state"):
            Resume(connection(group="all"), tmp_path)
        good.close()
        with pytest.raises(penstock.StreamClosed, match="connect again, and give Resume the new connection"):
            Resume(good, tmp_path)
        tf.train.Checkpoint(x=tf.Variable(1)).save(tmp_path / "other" / "c")
        with pytest.raises(ValueError, match=r"c-1 was not written by penstock\.keras\.Resume"):
            Resume(connection(), tmp_path / "other")
        assert not list(tmp_path.glob(".*")), "the trial files must be removed"


def test_fit_of_another_dataset_is_noticed_at_its_first_step(tf: Any, forgotten: None, tmp_path: Path) -> None:
    from penstock.keras import Resume

    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as one, penstock.connect(daemon.url) as two:
        model = model_of()
        with pytest.raises(ValueError, match=r"(?s)trained on 1 batches, but .* handed over 0: fit reads another"):
            model.fit(data_of(two), verbose=0, shuffle=False, callbacks=[Resume(one, tmp_path)])


def test_a_connection_that_fit_reads_for_validation_too_is_refused(tf: Any, forgotten: None, tmp_path: Path) -> None:
    from penstock.keras import Resume

    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        resume, data = Resume(connection, tmp_path), data_of(connection)
        with pytest.raises(ValueError, match=f"handed over {2 * TOTAL} batches .*fit trained on {TOTAL}: something"):
            model_of().fit(data, validation_data=data, epochs=2, verbose=0, shuffle=False, callbacks=[resume])
        del data


def test_a_connection_that_was_read_before_the_first_step_is_refused(tf: Any, forgotten: None, tmp_path: Path) -> None:
    from penstock.keras import Resume

    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        resume, data = Resume(connection, tmp_path), data_of(connection)
        next(iter(data))
        with pytest.raises(ValueError, match=r"was read between Resume and the first step of fit"):
            model_of().fit(data, verbose=0, shuffle=False, callbacks=[resume])
        del data


def test_the_batch_that_keras_reads_to_build_a_model_does_not_keep_resume_from_working(
    tf: Any, forgotten: None, tmp_path: Path
) -> None:
    from penstock.keras import Resume

    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        resume, data = Resume(connection, tmp_path), data_of(connection)
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            model = model_of()
        model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[resume])
        assert resume.consumed == connection.stats()["batches"] == 2 * TOTAL
        del data


def test_a_training_that_has_ended_says_that_nothing_is_left(
    tf: Any, forgotten: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.keras import Resume

    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon:
        weights = []
        for trained in ([0, 1], []):
            with penstock.connect(daemon.url) as connection:
                resume, model = Resume(connection, tmp_path), model_of()
                history = model.fit(data_of(connection), epochs=2, verbose=0, shuffle=False, callbacks=[resume])
                assert history.epoch == trained
                weights.append(model.get_weights())
                said = [record.getMessage() for record in caplog.records if "nothing left" in record.getMessage()]
                assert len(said) == (not trained)
                with pytest.raises(ValueError, match="was used by a fit before"):
                    model.fit(data_of(connection), epochs=4, verbose=0, shuffle=False, callbacks=[resume])
        assert "2 epochs are trained and saved here, so fit(epochs=2) has nothing left to train" in said[0]
        for one, two in zip(*weights, strict=True):
            np.testing.assert_array_equal(one, two)


def test_an_epoch_that_was_interrupted_goes_on_with_the_same_number_of_steps(
    tf: Any, forgotten: None, tmp_path: Path
) -> None:
    import keras

    from penstock.keras import Resume

    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 15:
                raise InterruptedError

    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon:
        with penstock.connect(daemon.url) as connection, pytest.raises(InterruptedError):
            resume = Resume(connection, tmp_path, every=3)
            model_of().fit(data_of(connection), verbose=0, shuffle=False, callbacks=[resume, Crash()])
        with penstock.connect(daemon.url) as connection:
            data = data_of(connection).repeat()
            with pytest.raises(ValueError, match=f"after step 15 of epoch 0, when fit counted {TOTAL} steps .* 10: "):
                model_of().fit(
                    data, steps_per_epoch=10, verbose=0, shuffle=False, callbacks=[Resume(connection, tmp_path)]
                )
            del data
        with (
            FakeDaemon(msgspec.structs.replace(info, seed=7), epoch) as other,
            penstock.connect(other.url) as connection,
            pytest.raises(penstock.StateMismatch, match=r"ckpt-\d+: .*seed was 0 and is 7 now.*another directory"),
        ):
            Resume(connection, tmp_path)


def test_a_callback_that_stops_within_an_epoch_leaves_the_last_checkpoint(
    tf: Any, forgotten: None, tmp_path: Path
) -> None:
    import keras

    from penstock.keras import Resume

    class Enough(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 15

    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon:
        with penstock.connect(daemon.url) as connection:
            resume = Resume(connection, tmp_path, every=7)
            model_of().fit(data_of(connection), verbose=0, shuffle=False, callbacks=[resume, Enough()])
        with penstock.connect(daemon.url) as connection:
            resume = Resume(connection, tmp_path)
            assert (resume.initial_epoch, resume.consumed) == (0, 14)
