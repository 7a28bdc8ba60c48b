"""Slots: shared memory in which workers write batches, and from which consumers read them.

It knows neither workers nor consumers. Begin with `arena.py`.
"""
