"""LMDB stores: the values of keys, as bytes."""
