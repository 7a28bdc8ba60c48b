"""The process of a worker, and the fork server that starts it: imports, signals, the end, and the loop over messages.

Begin with `start.py`.
"""
