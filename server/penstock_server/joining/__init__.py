"""Further hosts: workers on other machines that fill the slots of this one.

The *head* is the host of the daemon, `penstock serve`. A host joins it with `penstock join`. Its workers are workers of
the coordinator like all others. Their messages cross one connection (messages/hosts.py), and what they make is built in
memory of their host and sent into the slot at the head before the message about it. So a batch that was reported is at
the head, and a host that is lost takes nothing along: others go on from the last restart records.

At the head: hosts.py, joined_host.py, host_view.py. At the host: command.py, agent.py, membership.py, to_head.py,
building.py, shown_workers.py, sampling.py. Both: agreement.py.
"""
