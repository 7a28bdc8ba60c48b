"""Zarr stores: folders of arrays in chunks."""
