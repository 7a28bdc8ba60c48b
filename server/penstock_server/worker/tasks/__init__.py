"""What a worker is told to do: runs that fill slots, lists of splits, pools, and samples to make again.

It knows no socket and no process. Begin with `tasks.py`.
"""
