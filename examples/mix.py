"""Recorded rows and made-up rows, mixed by weights.

    python mix.py

Two of three samples are recorded. `rows` is a zip: it pairs each recorded row with the number of its file. The epoch
ends when all recorded rows have been read, since the feed of made-up rows never ends.
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
    """Yield made-up rows without end."""
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
