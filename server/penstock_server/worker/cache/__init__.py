"""The cache of splits on disk: its files, and the samples that come from them.

Begin with `split_cache.py`.
"""
