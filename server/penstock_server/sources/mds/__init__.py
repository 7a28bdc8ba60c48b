"""MDS datasets: the folders of shards that mosaicml-streaming writes and reads."""
