"""Feeds made of feeds: mixes, which draw from one feed after another, and zips, which read feeds in step.

It knows the options of feeds, not `Feed` itself. Begin with `mixed.py` and `zipped.py`.
"""
