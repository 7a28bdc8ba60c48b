"""How exactly does `penstock.keras.Feeding` measure the waits of training steps, compared with two other ways?

    python benchmarks/step_waits.py

Steps and generators sleep. Each step notes when its work begins and ends, so the pauses between steps are known. A
pause is the wait for a batch, and the work of Keras and TensorFlow between two steps. If the loader is faster, that
work is the whole pause.
"""

from __future__ import annotations

import time
from itertools import pairwise

from penstock_server import Feed

STEPS = 100


def made(seconds):
    def generator(split):
        import numpy as np

        random = np.random.default_rng(split)
        while True:
            time.sleep(seconds * random.uniform(0.2, 1.8))
            yield np.ones(4, np.float32)

    return generator


options = {"splits": range(4), "batch_size": 1, "turn": 1}
made10 = Feed(made(0.010), **options)
made20 = Feed(made(0.020), **options)
made40 = Feed(made(0.040), **options)


def measure(feed, step, per_call):
    import keras
    import tensorflow as tf

    import penstock
    from penstock.keras import Feeding

    times = []

    class Sleeps(keras.layers.Layer):
        def call(self, x):
            def slept(x):
                began = time.monotonic()
                time.sleep(step)
                times.append((began, time.monotonic()))
                return x

            y = tf.py_function(slept, [x], x.dtype)
            y.set_shape(x.shape)
            return y

    x = keras.Input((4,))
    model = keras.Model(x, keras.layers.Dense(1)(Sleeps()(x)))
    model.compile("sgd", "mse", steps_per_execution=per_call, jit_compile=False)
    with penstock.connect(f"{__file__}:{feed}", workers=1) as connection:
        dataset = connection.dataset().map(lambda x: (x, x[:, :1])).repeat()
        feeding = Feeding()
        model.fit(dataset, steps_per_epoch=STEPS, callbacks=[feeding], shuffle=False, verbose=0)
        thread = connection.stats()["wait_seconds"]
    steps = feeding.train.steps
    later = times[per_call - 1 :]
    pauses = sum(begun - ended for (_, ended), (begun, _) in pairwise(later))
    return tuple(1e3 * seconds / steps for seconds in (pauses, feeding.train.waited, thread))


def main():
    print("| a batch takes | a step takes | steps in a call | between steps | Feeding | TensorFlow's thread |")
    print("|---|---|---|---|---|---|")
    for feed, step, per_call in (
        ("made10", 0.010, 1),
        ("made20", 0.030, 1),
        ("made20", 0.010, 1),
        ("made20", 0.010, 4),
        ("made40", 0.010, 1),
        ("made40", 0.005, 4),
    ):
        pauses, waited, thread = measure(feed, step, per_call)
        measured = " | ".join(f"{one:.1f} ms" for one in (pauses, waited, thread))
        print(f"| {feed.removeprefix('made')} ms | {1e3 * step:.0f} ms | {per_call} | {measured} |")


if __name__ == "__main__":
    main()
