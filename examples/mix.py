"""Samples of two kinds of files, mixed by weights: recorded rows, and as many made up as it takes.

    python mix.py

Two samples of three are recorded. `rows` is a zip: each recorded row beside the name of its file. The epoch ends
when the recorded rows have all been read, as the feed of made up rows never does.
"""

import numpy as np

from penstock_server import Feed

FILES = [f"row-{number}" for number in range(8)]  # stand for files


def recorded(file, rng):
    """Yield the rows of a file."""
    for _ in range(50):
        yield rng.normal(size=4)


def names(file):
    """Yield the number of the file, once for each row."""
    while True:
        yield FILES.index(file)


def made_up(rng):
    """Yield rows that were never recorded, for ever."""
    while True:
        yield {"row": rng.uniform(size=4), "file": -1}


rows = Feed.zip(
    {"row": Feed(recorded, splits=FILES, batch_size=32), "file": Feed(names, splits=FILES, batch_size=32)},
    uneven="allow",  # `names` never ends
)
feed = Feed.mix(
    {"recorded": rows, "made up": Feed(made_up, segment=100, batch_size=32)},
    weights={"recorded": 2, "made up": 1},
    shuffle=200,
    lanes=4,
)


def main():
    import penstock

    with penstock.connect("mix.py:feed", workers=2) as connection:
        files = np.concatenate([batch["file"] for batch in connection.batches()])
    print(f"{len(files)} samples, {(files >= 0).mean():.0%} of them recorded, from {len(set(files) - {-1})} files")


if __name__ == "__main__":
    main()
