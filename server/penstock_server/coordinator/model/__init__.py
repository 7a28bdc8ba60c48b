"""The coordinator's model: the events that it is told, the commands that it gives, and what both are made of.

No decision is made here. Begin with `events.py`, `commands.py` and `turn.py`.
"""
