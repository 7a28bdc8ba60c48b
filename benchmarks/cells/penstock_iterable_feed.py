"""The feed of a torch `IterableDataset` that knows no workers. It has one lane, because it cannot be divided."""

from sources import BATCH
from torch_sources import Stream

from penstock_server import Feed

torch_iterable = Feed(Stream(), batch_size=BATCH, lanes=1)
