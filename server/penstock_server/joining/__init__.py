"""Further hosts: workers on other machines that make batches for this daemon.

The *head* is the host of the daemon, `penstock serve`. A host joins it with `penstock join`, and gets work after a
check: its feeds, and the first samples that it makes, must be those of the head. The coordinator treats the host's
workers like the daemon's own, except that they only make batches. One connection carries all messages between the host
and the head (penstock_proto/messages/hosts.py).

All slots are at the head, and a worker builds batches in memory of its host. Then the host does one of two things:

- It sends the bytes straight into the slot, before the worker's message about them. So when the coordinator hears of
  such a batch, the batch is in its slot.
- If every consumer that may read a batch reaches the host, the host *keeps* the bytes. Consumers on its machine
  *borrow* the memory, and others *fetch* the bytes over the network. The slot at the head stays reserved. So the host
  can send the bytes there at any time: for a consumer that cannot fetch them after all, for a copy, because a worker
  needs the memory, or because the host leaves.

When a host is lost, other workers continue its lanes from their last restart records, and make the batches that it kept
again (coordinator/remaking.py).

At the head: hosts.py has all joined hosts, and joined_host.py is one of them; host_check.py checks it, open_tickets.py
knows which slots it may write to, kept.py which batches hosts keep, and host_view.py what users see of its workers.

At the host: command.py and agent.py are the process of `penstock join`, and sent_keys.py can read its keys from
standard input. membership.py handles one connection to the head (to_head.py), from Joined to its end. built_slots.py
has the slots that workers build, in memory from building.py. Consumers get kept batches through listeners.py: over the
network (serving.py) or as memory (lending.py). shown_workers.py and sampling.py report the workers' activity, memory
and stacks on demand.

At both: agreement.py compares the two sides' versions, files and feeds.
"""
