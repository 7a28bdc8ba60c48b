"""Notices, while a feed is read, that its stream would not be the same again: samples or batches that differ when they
are made once more, and files that have changed.

It decides what to compare. It knows nothing of generators and lanes. Begin with `spot_checks.py`.
"""
