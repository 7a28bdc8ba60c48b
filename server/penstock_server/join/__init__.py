"""The process of `penstock join`: a host whose workers make batches for a daemon elsewhere. `hosts/` is the daemon's
side.

It has no coordinator: the head decides. `config.py` has the options. Begin with `agent.py`, then `membership.py`, which
handles one connection to the head from Joined to its end.
"""
