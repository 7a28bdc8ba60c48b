"""Trainers, as the daemon sees them: their sessions, from the greeting to the end, and the messages to them.

What they may read is decided elsewhere (`coordinator/admission/`). `Sessions` takes the messages of all connections,
and sends consumers what the coordinator says. Only a session's `Link` knows whether its client is reached over ZeroMQ
or on this host. The status reads the `SessionTable`. Begin with `sessions.py`.
"""
