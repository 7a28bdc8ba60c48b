"""Joined hosts, as the head sees them. `join/` is the other side.

*The picture.* Workers on other machines make batches for this daemon. The *head* is the host of the daemon. A host
joins it with `penstock join`, and gets work after a check: its feeds, and the first samples that it makes, must be
those of the head. The coordinator treats the host's workers like the daemon's own, except that they only make batches.
One connection carries all messages between the host and the head (penstock_proto/messages/hosts.py).

All slots are at the head, and a worker builds batches in memory of its host. Then the host does one of two things:

- It sends the bytes straight into the slot, before the worker's message about them. So when the coordinator hears of
  such a batch, the batch is in its slot.
- If every consumer that may read a batch reaches the host, the host *keeps* the bytes. Consumers on its machine
  *borrow* the memory, and others *fetch* the bytes over the network. The slot at the head stays reserved. So the host
  can send the bytes there at any time: for a consumer that cannot fetch them after all, for a copy, because a worker
  needs the memory, or because the host leaves.

When a host is lost, other workers continue its lanes from their last restart records, and make the batches that it kept
again (coordinator/production/remaking.py).

Other rooms see a `HostTable`, and reach workers through the hosts in it. `Hosts` admits hosts, and takes their
messages. How a host is reached is behind `joined_host.Channel`. Begin with `hosts.py`.
"""
