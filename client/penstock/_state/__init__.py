"""The state of a stream in the client, without locks, threads or sockets.

Begin with `consumer_state.py`.
"""
