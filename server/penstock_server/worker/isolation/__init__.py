"""Keeps generators apart that take turns in one process: random states, settings, context variables, and the processes
that they start.

It knows neither samples nor batches. Begin with `randomness.py`.
"""
