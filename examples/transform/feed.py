"""A generator that cannot be divided, with an expensive step that runs in parallel.

    python feed.py

`readings` follows a log from its first line to its last, as each window depends on all lines before it. That is cheap,
but computing the spectrum of a window is not. So the spectrum is a transform: every lane of the feed runs all of
`readings`, and transforms only its share.
"""

import numpy as np

from penstock_server import Feed


def readings():
    """Yield windows of a running mean: {"level": float64 (256,), "line": int}."""
    log = np.random.default_rng(0)  # stands for a file
    level = 0.0
    for line in range(400):
        window = level + np.cumsum(log.normal(size=256))
        level = window[-1]
        yield {"level": window, "line": line}


def spectrum(sample, rng):
    """Make ((image, line), target) from a window. The noise is the same on every worker."""
    window = sample["level"] + rng.normal(scale=0.1, size=256)
    pieces = np.lib.stride_tricks.sliding_window_view(window, 64)[::8]
    image = np.abs(np.fft.rfft(pieces * np.hanning(64))).astype(np.float32)
    return (image, sample["line"]), np.float32(window[-1])


feed = Feed(readings, transform=spectrum, batch_size=16, seed=7)


def main():
    import penstock

    with penstock.connect("feed.py:feed", workers=2) as connection:
        lines = np.concatenate([lines for (_, lines), _ in connection.batches()])
    print(f"{len(lines)} samples, in order: {bool((np.diff(lines) == 1).all())}")


if __name__ == "__main__":
    main()
