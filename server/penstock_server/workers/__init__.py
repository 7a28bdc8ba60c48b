"""The worker processes of this machine: starts and watches them, sends them messages, and looks at what they do.

It decides nothing about streams. Begin with `supervisor.py`.
"""
