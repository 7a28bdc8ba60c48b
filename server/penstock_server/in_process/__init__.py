"""Makes a stream in the trainer's own process (`workers=0`), without a daemon.

The client loads it by name. It has a coordinator and one worker, and no process or socket. Begin with `engine.py`.
"""
