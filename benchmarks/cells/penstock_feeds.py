"""The feeds that Penstock's workers import: the code that a user writes around each source."""

from typing import Any

import numpy as np
import sources
from sources import BATCH, PATHS

from penstock_server import Feed, FixedLen, Pad

by_file = [[path] for path in PATHS]  # `of_files` takes a list of files
files = Feed(sources.of_files, splits=by_file, batch_size=BATCH)
scenes = Feed(sources.Scenes, method="generate_data", args=(sources.scene_files(),), segment=4, batch_size=None)
undivided = Feed(sources.readings, transform=sources.spectrum, batch_size=BATCH)
indexed = Feed(sources.Table(), batch_size=BATCH)
hdf5 = Feed(sources.OpenTable(), batch_size=BATCH)
tfrecord = Feed.from_tfrecord(
    sources.parts("*.tfrecord.gz"),
    {"image": FixedLen((4, 4), "float32"), "label": FixedLen((), "int64")},
    transform=sources.seen,
    batch_size=BATCH,
)
parquet = Feed.from_parquet(sources.parts("*.parquet"), transform=sources.seen, batch_size=BATCH)


def tar_label(data: bytes) -> np.int64:
    import json

    return np.int64(json.loads(data)["label"])


tar = Feed.from_webdataset(
    sources.parts("*.tar"),
    {"image": "npy", "label": "json"},
    decode={"json": tar_label},
    transform=sources.seen,
    batch_size=BATCH,
)


def structure(name: str) -> Any:
    return sources.Table(item=sources.STRUCTURES[name])


nested = Feed(structure("nested"), batch_size=BATCH)
text = Feed(structure("text"), batch_size=BATCH)
rare = Feed(structure("rare"), batch_size=BATCH)
weights = Feed(structure("weights"), batch_size=BATCH)
ragged = Feed(structure("ragged"), batch_size=BATCH, batching="ragged")


def rows_of_lengths(first: int) -> Any:
    return map(sources.ragged, range(first, first + 24))


buckets = Feed(
    rows_of_lengths,
    splits=range(0, sources.SAMPLES, 24),
    lanes=2,
    shuffle=sources.SAMPLES,
    batch_size=BATCH,
    batching=Pad(buckets=sources.BUCKETS),
)
rebatch = Feed(sources.of_batches, splits=by_file, batch_size=None, rebatch=BATCH)
same_random = Feed(sources.Table(item=int), transform=sources.augmented, batch_size=BATCH)
long = Feed(sources.Table(sources.LONG), batch_size=BATCH)
