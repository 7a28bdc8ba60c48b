"""Lanes: the splits of one lane, one after another, as batches; and the restart record after each.

A split is anything that can be read here. Begin with `lane.py`.
"""
