"""The worker processes of this machine: starts and watches them, sends them messages, and looks at what they do.

It decides nothing about streams. Other rooms reach each worker through a `WayToWorkers` (`to_workers.py`): on this
machine through sockets and shared memory (`own_workers.py`), at a joined host through its connection
(`hosts/joined_host.py`). Another kind of workers needs one more such way. Begin with `supervisor.py`.
"""
