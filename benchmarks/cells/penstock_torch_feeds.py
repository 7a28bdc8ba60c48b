"""Feeds of torch datasets, as `penstock_feeds.py`."""

from sources import BATCH
from torch_sources import Rows

from penstock_server import Feed

torch_map = Feed(Rows(), batch_size=BATCH)
