"""Notices, while a feed is read, that its stream would not be the same again: samples or batches that differ when they
are made once more, and files that have changed.

It decides what is compared, and does not depend on generators or lanes. Begin with `spot_checks.py`.
"""
