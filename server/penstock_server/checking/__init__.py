"""`penstock check`: looks for mistakes in one feed, without a daemon.

User code runs in separate processes (process.py), with a worker's environment and imports, and reads lanes as in a
worker. These processes report facts. Two of them read the same samples. If the samples differ, more processes find out
why (culprit.py). The command itself imports no user code: it starts the processes (runs.py), judges the facts
(judging.py) and prints them (report.py).
"""
