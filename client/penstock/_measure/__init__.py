"""Measures how long training waits for data, and says why.

Begin with `feeding.py`.
"""
