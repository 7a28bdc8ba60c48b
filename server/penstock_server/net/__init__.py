"""Connections to this process: listening, ZMTP over TCP, keys, and unix sockets.

It knows no messages besides the greeting. Begin with `network.py` and `local.py`.
"""
