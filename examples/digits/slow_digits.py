"""The digits as if each took 3 ms to decode, so that one host is not enough. For demo_hosts.py."""

import time

import digits

from penstock_server import Feed


def slow_scenes(path, rng):
    """Yield the samples of `digits.scenes`, more slowly."""
    for sample in digits.scenes(path, rng):
        time.sleep(0.003)
        yield sample


train = Feed(
    slow_scenes,
    splits=digits.files("train"),
    samples=digits.count("train"),
    batch_size=32,
    shuffle=1024,
    seed=7,
)
val = digits.val
