"""Trainers, as the daemon sees them: their sessions, from the greeting to the end, and the messages to them.

What they may read is decided elsewhere (`coordinator/admission/`). `Sessions` takes the messages of all connections,
and sends consumers what the coordinator says. Only `ToConsumers` knows how the bytes of a batch get to a consumer. The
status reads the `SessionTable`. Begin with `sessions.py`.
"""
