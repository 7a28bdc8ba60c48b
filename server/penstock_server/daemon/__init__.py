"""The daemon: makes all parts and connects them, and carries out the coordinator's commands.

Begin with `config.py`, `serving.py` and `daemon.py`, then `parts.py` and `dispatch.py`.
"""
