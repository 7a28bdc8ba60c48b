"""`penstock check`: looks for mistakes in one feed, without a daemon.

User code runs in processes of its own (process.py), each as a worker's: its environment, its imports, its reading of
lanes. They report facts. Two of them read the same samples, and where these differ, further ones find out why
(culprit.py). This process imports no user code: it starts the others (runs.py), judges the facts (judging.py) and
prints them (report.py).
"""
