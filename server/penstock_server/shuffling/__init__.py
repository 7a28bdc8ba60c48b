"""Permutations, of a split list, a block of samples, or a pool of lanes.

Each is a function of its seeds. Nothing here knows a feed or a worker. Begin with `permutation.py`.
"""
