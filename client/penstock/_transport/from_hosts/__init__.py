"""Fetches slabs from the joined hosts that made them: over the network, or as memory of the same machine.

It knows nothing of the daemon's connection. Begin with `fetching.py`.
"""
