"""Four trainings with different learning rates read one feed of one daemon, which makes each batch once for all.

    python sweep.py

The daemon and the four processes start here, first with sharing (the default) and then with `share=False`. Each
training gets exactly the stream that it would get alone. So the losses are the same, and only the time differs.
"""

import json
import subprocess
import sys
import time

import numpy as np

from penstock_server import Feed

RATES = [0.001, 0.003, 0.01, 0.03]
COST = 0.001  # CPU seconds of a sample: stands for decoding and augmentation


def samples(part, rng):
    """Yield points, and whether they are inside a ring."""
    for _ in range(200):
        done = time.thread_time() + COST
        while time.thread_time() < done:
            pass
        point = rng.uniform(-1, 1, 2).astype(np.float32)
        yield point, np.float32(0.4 < np.hypot(*point) < 0.8)


feed = Feed(samples, splits=range(8), samples=1600, batch_size=32, shuffle=256)


def train(url, share, rate):
    import keras
    import tensorflow as tf

    import penstock

    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.Adam(rate), "binary_crossentropy")
    dataset = penstock.dataset(url, share=share)
    began = time.monotonic()
    history = model.fit(dataset, epochs=3, shuffle=False, verbose=0)
    print(json.dumps([time.monotonic() - began, history.history["loss"][-1]]))


def sweep(url, share):
    """Run all trainings at once. Return the seconds of the slowest, and their last losses."""
    commands = [[sys.executable, __file__, url, json.dumps(share), str(rate)] for rate in RATES]
    trainings = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    found = [json.loads(training.communicate()[0]) for training in trainings]
    return max(seconds for seconds, _ in found), [loss for _, loss in found]


def main():
    serve = [sys.executable, "-m", "penstock_server", "serve", f"{__file__}:feed", "--bind", "tcp://127.0.0.1:0"]
    found = {}
    for share in (True, False):
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as daemon:
            url = daemon.stdout.readline().split()[1]
            seconds, found[share] = sweep(url, share)
            daemon.terminate()
        losses = ", ".join(f"{rate}: {loss:.6f}" for rate, loss in zip(RATES, found[share], strict=True))
        print(f"share={share}: {seconds:.1f} s, losses {losses}")
    assert found[True] == found[False], found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
