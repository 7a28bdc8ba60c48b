"""Trainers, as the daemon sees them: their sessions, from the greeting to the end, and the messages to them.

What they may read is decided elsewhere (`coordinator/admission/`). Begin with `sessions.py`.
"""
