"""Log lines and bugs: how the daemon logs, how often, and how it reports an unexpected error.

It knows nothing of what is logged. Begin with `bugs.py`: an unexpected error is counted and logged, and the daemon goes
on.
"""
