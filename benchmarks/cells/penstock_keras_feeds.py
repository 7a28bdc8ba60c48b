"""Feeds of Keras datasets, as `penstock_feeds.py`."""

from keras_sources import Endless, Shuffled

from penstock_server import Feed

keras_shuffled = Feed(Shuffled(), batch_size=None)
keras_endless = Feed(Endless(), batch_size=None)
