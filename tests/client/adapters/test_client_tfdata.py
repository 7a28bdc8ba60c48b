"""The promises of `penstock.dataset` and `Connection.dataset`, with real TensorFlow and a scripted daemon."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto import Leaf, TupleSpec
from penstock_proto.batches.inferring import infer
from penstock_proto.messages import Begin, Leave
from tests.conftest import StartTrainer
from tests.fakes.fake_daemon import Fail, FakeDaemon, Stall, feed_info, numbers, slab

both = pytest.mark.parametrize("transport", ["local", "tcp"])
turns = pytest.mark.parametrize("turn", [1, 4])


def first(batch: Any) -> int:
    x, y = batch
    assert (x.numpy() == y.numpy()[0]).all()
    return int(y.numpy()[0])


def address(tensor: Any) -> int:
    if tensor.dtype == "bfloat16":  # it has no buffer
        return 0
    found: int = np.asarray(memoryview(tensor)).__array_interface__["data"][0]
    return found


def shared(tensor: Any) -> bool:
    """Return whether `tensor` lies in the daemon's memfd."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:fake" in line:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                if start <= address(tensor) < end:
                    return True
    return False


@both
@turns
def test_iterating_once_is_one_epoch_and_iterating_again_the_next(tf: Any, transport: str, turn: int) -> None:
    info, epoch = numbers(10, turn=turn, batches=10)
    with FakeDaemon(info, epoch) as daemon:
        dataset = penstock.dataset(daemon.url, transport=transport)
        for e in range(3):
            assert [first(batch) for batch in dataset] == [100 * e + i for i in range(10)]
        assert dataset.cardinality() == 10
        assert daemon.count(Begin) == 3
        del dataset


@pytest.mark.parametrize(("drop", "rows"), [(False, None), (True, 4)])
def test_the_element_spec_is_exact(tf: Any, drop: bool, rows: int | None) -> None:
    sample = {"x": np.zeros((8, 3), np.uint8), "y": (np.float16(0), np.bool_(0))}
    info = feed_info(infer(sample), 4, drop_remainder=drop)
    with FakeDaemon(info, lambda _: []) as daemon, penstock.connect(daemon.url) as connection:
        dataset = connection.dataset()
        assert dataset.element_spec == {
            "x": tf.TensorSpec([rows, 8, 3], tf.uint8),
            "y": (tf.TensorSpec([rows], tf.float16), tf.TensorSpec([rows], tf.bool)),
        }
        assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
        auto = tf.data.experimental.AutoShardPolicy.OFF
        assert dataset.options().experimental_distribute.auto_shard_policy == auto
        del dataset


DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bfloat16"


@both
@turns
@pytest.mark.parametrize("width", [7, 16, 8192])
def test_every_dtype_arrives_exactly_and_aliased_where_it_can_be(
    tf: Any, transport: str, turn: int, width: int
) -> None:
    import ml_dtypes

    rng = np.random.default_rng(0)

    def batch(rows: int) -> dict[str, np.ndarray[Any, Any]]:
        made = {}
        for name in DTYPES.split():
            dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
            made[name] = (rng.random((rows, width)) * 100).astype(dtype)
        return made

    info = feed_info(infer({key: value[0] for key, value in batch(1).items()}), 4, turn=turn)
    made = [batch(4), batch(4), batch(3)]
    slabs = [slab(info, made[0], made[1]), slab(info, made[2])] if turn > 1 else [slab(info, m) for m in made]
    with FakeDaemon(info, lambda _: slabs) as daemon, penstock.connect(daemon.url, transport=transport) as connection:
        for number, (want, have) in enumerate(zip(made, connection.dataset(), strict=True)):
            for name, array in want.items():
                np.testing.assert_array_equal(array, have[name].numpy())
                assert have[name].dtype == name
                cut = array.nbytes % 64 == 0 and name != "bool"  # the graph can cut it without a copy
                large = turn == 1 and array.nbytes >= 16 * 1024
                if transport == "local" and name != "bfloat16" and (cut or (large and number < 2)):
                    assert shared(have[name]), (name, number)
                assert address(have[name]) % 64 == 0
        del have, connection


@both
def test_batches_of_varying_shapes_arrive_aliased_in_their_structure(tf: Any, transport: str) -> None:
    spec = TupleSpec((Leaf("float64", (None, 2)), Leaf("int32", ()), Leaf("bool", (None,))))
    info = feed_info(spec, None)
    made = [(np.random.rand(n, 2), np.array(n, np.int32), np.random.rand(n) > 0.5) for n in (1000, 0, 3)]
    with (
        FakeDaemon(info, lambda _: [slab(info, m) for m in made]) as daemon,
        penstock.connect(daemon.url, transport=transport) as connection,
    ):
        dataset = connection.dataset()
        assert dataset.element_spec == (
            tf.TensorSpec([None, 2], tf.float64),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([None], tf.bool),
        )
        for want, have in zip(made, dataset, strict=True):
            for w, h in zip(want, have, strict=True):
                np.testing.assert_array_equal(w, h.numpy())
            if transport == "local" and len(want[0]):
                assert shared(have[0])
                assert shared(have[2])
        del have, dataset


@turns
def test_no_slot_is_reused_while_a_tensor_over_it_lives(tf: Any, turn: int) -> None:
    info, epoch = numbers(40, turn=turn)
    with FakeDaemon(info, epoch, slots=6, quota=4) as daemon, penstock.connect(daemon.url) as connection:
        held = list(connection.dataset())
        assert [first(batch) for batch in held] == list(range(40))
        assert connection.stats()["copies"] == 40 // turn - 4
        seen = sorted(first(batch) for batch in connection.dataset().shuffle(16))
        assert seen == list(range(100, 140))
        assert [first(batch) for batch in held] == list(range(40))
        del held
        gc.collect()
        daemon.wait_for(lambda: daemon.in_use == 0)


def test_writing_into_slices_neither_crashes_nor_disturbs_another_batch(tf: Any) -> None:
    info, epoch = numbers(12, rows=64, width=1024)
    with FakeDaemon(info, epoch, slots=10) as daemon, penstock.connect(daemon.url) as connection:
        for change in (
            lambda x, y: (x[:32] + 1, y),
            lambda x, y: (x[0] + 1, y),
            lambda x, y: (tf.split(x, 4)[1] * 2 + 1, y),
            lambda x, y: (tf.unstack(tf.ensure_shape(x, [64, 1024]))[3] + 1, y),
        ):
            base = 100 * (connection.stats()["epoch"] + 1)
            for i, (x, y) in enumerate(connection.dataset().map(change)):
                number = base + i
                assert (y.numpy() == number).all()
                assert x.numpy()[..., 0].min() in (number + 1, 2 * number + 1)
        del x, y


@both
@pytest.mark.parametrize(("prefetch", "turn"), [(0, 1), (2, 1), (None, 1), (None, 2)])
def test_breaking_off_returns_at_once_although_no_data_comes(
    tf: Any, transport: str, prefetch: int | None, turn: int
) -> None:
    info, epoch = numbers(4, turn=turn)
    with (
        FakeDaemon(info, lambda e: [*epoch(e), Stall()]) as daemon,
        penstock.connect(daemon.url, transport=transport) as connection,
    ):
        dataset = connection.dataset(prefetch)
        for _ in range(2):
            iterator = iter(dataset)
            next(iterator)
            assert daemon.stalled.wait(60)
            daemon.stalled.clear()
            del iterator  # no data comes, so a wait for data would never end
        daemon.wait_for(lambda: daemon.count(Leave) == 2)
        del dataset


@both
@pytest.mark.parametrize(
    ("prefetch", "turn", "ahead"), [(0, 1, 0), (3, 1, 3), (None, 1, 2), (0, 5, 0), (10, 5, 10), (None, 5, 10)]
)
def test_tensorflow_takes_two_slabs_ahead_unless_you_say_how_many_batches(
    tf: Any, transport: str, prefetch: int | None, turn: int, ahead: int
) -> None:
    info, epoch = numbers(60, turn=turn)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url, transport=transport) as connection:
        iterator = iter(connection.dataset(prefetch))
        assert first(next(iterator)) == 0
        daemon.wait_for(lambda: connection.stats()["batches"] >= turn + ahead)
        time.sleep(0.3)  # it takes no more than that, and perhaps a slab that it has opened for the last batch
        assert connection.stats()["batches"] <= turn + ahead + turn
        assert [first(batch) for batch in iterator] == list(range(1, 60))


@both
def test_an_error_reaches_the_user_whole_and_stays(tf: Any, transport: str) -> None:
    info, epoch = numbers(3, batches=5)
    text = "KeyError: 'x'\n" + "\n".join(f"  line {i}" for i in range(100))
    failed = Fail(penstock.GeneratorError("boom", worker=1, split="'a.h5'", remote_traceback=text))
    with (
        FakeDaemon(info, lambda e: [*epoch(e), failed]) as daemon,
        penstock.connect(daemon.url, transport=transport) as connection,
    ):
        dataset = connection.dataset()
        for wanted in ([0, 1, 2], [], []):
            iterator = iter(dataset)
            assert [first(next(iterator)) for _ in wanted] == wanted
            with pytest.raises(tf.errors.UnknownError) as caught:
                next(iterator)
            assert "GeneratorError: boom\n  in worker 1, split 'a.h5'" in str(caught.value)
            assert text in str(caught.value)
        assert isinstance(connection.error, penstock.GeneratorError)
        assert connection.error.remote_traceback == text
        del dataset, iterator, caught
        gc.collect()


def test_closing_ends_an_iteration_with_an_error(tf: Any) -> None:
    info, epoch = numbers(3)
    with FakeDaemon(info, lambda e: [*epoch(e), Stall()]) as daemon, penstock.connect(daemon.url) as connection:
        threading.Timer(0.5, connection.close).start()
        with pytest.raises(tf.errors.UnknownError, match="was closed"):
            for _ in connection.dataset():
                pass


HOLDERS = {
    "itself": lambda tf, ds: ds,
    "a derived one": lambda tf, ds: ds.map(lambda x, y: x).shuffle(2).batch(2),
    "an iterator": lambda tf, ds: iter(ds),
    "a flat_map": lambda tf, ds: tf.data.Dataset.range(1).flat_map(lambda _: ds),
    "a traced function": lambda tf, ds: traced(tf, ds),
}


def traced(tf: Any, ds: Any) -> Any:
    def total() -> Any:
        seen = 0.0
        for x, _ in ds:
            seen += x[0, 0]
        return seen

    return tf.function(total).get_concrete_function()


@both
@pytest.mark.parametrize("holder", HOLDERS)
def test_the_connection_closes_when_the_dataset_and_all_made_from_it_are_gone(
    tf: Any, transport: str, holder: str
) -> None:
    info, epoch = numbers(3)
    with FakeDaemon(info, epoch) as daemon:
        held = HOLDERS[holder](tf, penstock.dataset(daemon.url, transport=transport))
        gc.collect()
        time.sleep(0.3)
        assert daemon.ended_sessions == 0
        if callable(held):
            assert held().numpy() == 0 + 1 + 2
        else:
            next(iter(held))
        del held
        gc.collect()
        daemon.wait_for(lambda: daemon.ended_sessions == 1)


def test_a_dataset_keeps_the_connection_that_made_it(tf: Any) -> None:
    info, epoch = numbers(3)
    with FakeDaemon(info, epoch) as daemon:
        dataset = penstock.connect(daemon.url).dataset(prefetch=0)
        gc.collect()
        assert [first(batch) for batch in dataset] == [0, 1, 2]
        del dataset
        gc.collect()
        daemon.wait_for(lambda: daemon.ended_sessions == 1)


def test_a_connection_builds_its_dataset_once(tf: Any) -> None:
    info, epoch = numbers(3)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        assert connection.dataset(0) is connection.dataset(0)
        with pytest.raises(ValueError, match="prefetch=-1"):
            connection.dataset(-1)


def test_a_dataset_made_within_interleave_is_refused_with_what_to_do_and_one_made_before_is_read(tf: Any) -> None:
    info, epoch = numbers(3)
    elements = tf.data.Dataset.range(2)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:

        def connected(_: Any) -> Any:
            return penstock.dataset(daemon.url)

        def made(_: Any) -> Any:
            return connection.dataset()

        for call in (connected, made):
            with pytest.raises(RuntimeError, match=r"Call it outside of the function.*tf\.data\.Dataset\.sample_from"):
                elements.interleave(tf.autograph.experimental.do_not_convert(call))
        assert daemon.count(Begin) == 0
        dataset = connection.dataset()
        found = [first(batch) for batch in elements.flat_map(lambda _: dataset)]
        assert found == [0, 1, 2, 100, 101, 102]


def test_keras_fits_and_validates(tf: Any) -> None:
    import keras

    info, epoch = numbers(6, batches=6)
    with FakeDaemon(info, epoch) as train, FakeDaemon(info, epoch) as val:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        history = model.fit(
            penstock.dataset(train.url), epochs=3, validation_data=penstock.dataset(val.url), verbose=0, shuffle=False
        )
        assert len(history.history["val_loss"]) == 3
        assert train.count(Begin) == 3
        del model, history
        keras.backend.clear_session()
        gc.collect()
        train.wait_for(lambda: train.ended_sessions == 1)
        val.wait_for(lambda: val.ended_sessions == 1)


SCRIPT = """
import sys
import penstock
dataset = penstock.dataset(sys.argv[1], transport=sys.argv[2])
iterator = iter(dataset)
kept = [next(iterator) for _ in range(3)]
how = sys.argv[3]
print("ready", flush=True)
if how == "exception":
    raise RuntimeError("the step failed")
if how == "SIGINT":
    for _ in range(9):
        next(iterator)
"""


@pytest.mark.parametrize("how", ["exit", "exception", "SIGINT", "SIGKILL", "SIGTERM"])
def test_a_trainer_ends_without_hanging_and_its_session_with_it(start_trainer: StartTrainer, how: str) -> None:
    info, epoch = numbers(3)
    with contextlib.ExitStack() as stack:
        running = []
        for transport in ("local", "tcp"):
            daemon = stack.enter_context(FakeDaemon(info, lambda e: [*epoch(e), Stall()]))
            trainer = start_trainer(SCRIPT, daemon.url, transport, how if how != "SIGKILL" else "SIGINT")
            running.append((transport, daemon, trainer))
        for _, _, trainer in running:
            assert trainer.stdout.readline() == "ready\n"
        if how.startswith("SIG"):
            time.sleep(0.5)
            for _, _, trainer in running:
                trainer.send_signal(getattr(signal, how))
        for transport, daemon, trainer in running:
            _, stderr = trainer.communicate(timeout=60)
            if how in ("exit", "exception"):
                assert trainer.returncode == (how == "exception"), stderr
            if how == "SIGINT":
                assert trainer.returncode != 0
                assert "KeyboardInterrupt" in stderr
            if transport == "local" or how not in ("SIGKILL", "SIGTERM"):
                daemon.wait_for(lambda daemon=daemon: daemon.ended_sessions == 1)
