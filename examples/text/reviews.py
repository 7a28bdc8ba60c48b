"""Reviews of different lengths, as text and as padded rows of token ids. See train.py."""

import numpy as np

from penstock_server import Feed, Pad

WORDS = ["", "the", "film", "was", "fine", "good", "great", "dull", "bad", "awful"]  # 0 is the padding
GOOD, BAD = (4, 5, 6), (7, 8, 9)


def reviews(part, rng):
    """Yield {"text": str, "tokens": int32 (length,), "good": float32 ()}, 500 for each part."""
    for _ in range(500):
        good = bool(rng.integers(2))
        tokens = rng.choice([*range(1, 4), *(GOOD if good else BAD)], rng.integers(3, 40)).astype(np.int32)
        tokens[rng.integers(len(tokens))] = rng.choice(GOOD if good else BAD)
        yield {"text": " ".join(WORDS[token] for token in tokens), "tokens": tokens, "good": np.float32(good)}


feed = Feed(
    reviews,
    splits=range(8),
    batch_size=32,
    batching=Pad(buckets=[8, 16, 32, 40]),  # pads "tokens" with 0 to the shortest bucket that is long enough
    shuffle=4000,
    samples=4000,
)
