"""One stream: its production and its delivery, its share of memory, and what must always hold.

Begin with `stream.py`.
"""
