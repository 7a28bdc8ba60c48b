"""Requests to a running daemon, from short-lived processes: its status, its stacks, `stop` and `scale`.

It knows the messages, and nothing of a daemon's inside. Begin with `control.py`.
"""
