"""The daemon's part of `penstock profile`: it sends the stacks files of its own workers. Joined hosts sample their
workers themselves; the daemon asks them to, and passes on the samples.

A profile of hosts lasts until the connection of the user who asked for it ends, or until all hosts have finished.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec import structs

from penstock_proto import ProtocolError
from penstock_proto import messages as m

from ..hosts.joined_host import JoinedHost
from ..net.local import LocalPeer


@dataclass(slots=True)
class _Profile:
    """One profile of hosts: the user's connection, the rate, the time of its end, and the hosts that have not
    finished."""

    peer: LocalPeer
    rate: float
    until: float
    hosts: set[JoinedHost] = field(default_factory=set)


class Profiles:
    """The profiles that are going on, by the connection of the user who asked for them.

    Args:
        stacks: returns the number, the process id and the fd of the stacks file of each of the daemon's own workers
            that is ready.
        hosts: the joined hosts.
        folder: the folder of the first feed's file, or empty.
    """

    def __init__(
        self,
        stacks: Callable[[], Iterable[tuple[int, int, int]]],
        hosts: Iterable[JoinedHost],
        folder: str,
    ) -> None:
        self._stacks = stacks
        self._hosts = hosts
        self._folder = folder
        self._numbers = itertools.count()
        self._profiles: dict[int, _Profile] = {}

    def send_stacks(self, peer: LocalPeer) -> None:
        """Send the fds of the workers' stacks files. Refuse to if the connection has not read earlier ones, because
        those count against the open files of the daemon's user until they are read.

        Raises:
            ProtocolError: the connection has not read earlier ones.
        """
        if peer.unread:
            raise ProtocolError("a StacksRequest before the answers to earlier messages were read")
        for worker, pid, fd in self._stacks():
            peer.send(m.WorkerStacks(worker, pid), fd)
        peer.send(m.StacksSent())

    def begin(self, peer: LocalPeer, message: m.ProfileHosts) -> None:
        """Tell all hosts to sample their workers.

        Raises:
            ProtocolError: this connection has asked for that already.
        """
        if any(profile.peer is peer for profile in self._profiles.values()):
            raise ProtocolError("a second ProfileHosts on one connection")
        peer.opened()  # the connection may stay open while the profile lasts
        number = next(self._numbers)
        profile = self._profiles[number] = _Profile(peer, message.rate, time.monotonic() + message.seconds)
        for host in self._hosts:
            if host.working:
                self._ask(number, profile, host)

    def host_works(self, host: JoinedHost) -> None:
        """Handle a host that gets work from now on."""
        for number, profile in self._profiles.items():
            self._ask(number, profile, host)

    def host_lost(self, host: JoinedHost, how: str) -> None:
        """Handle a lost host."""
        for profile in self._profiles.values():
            self._end(profile, host, how)

    def peer_ended(self, peer: LocalPeer) -> None:
        """Handle the end of a connection on this host: end its profile."""
        for number, profile in list(self._profiles.items()):
            if profile.peer is peer:
                del self._profiles[number]
                for host in profile.hosts:
                    host.sample(m.SampleStacks(number, 0, profile.rate))

    def sampled(self, host: JoinedHost, message: m.StacksSampled | m.SamplingEnded) -> None:
        """Handle a host's samples of its workers. Drop those for a profile that has ended."""
        profile = self._profiles.get(message.profile)
        if profile is None or host not in profile.hosts:
            return
        if isinstance(message, m.SamplingEnded):
            self._end(profile, host, "")
        else:
            samples = structs.replace(message.samples, frames=tuple(map(self._here, message.samples.frames)))
            profile.peer.send(m.WorkerSampled(message.worker, host.name_of(message.worker), samples))

    def _ask(self, number: int, profile: _Profile, host: JoinedHost) -> None:
        seconds = profile.until - time.monotonic()
        if seconds > 0:
            profile.hosts.add(host)
            profile.peer.send(m.HostSampled(host.name))
            host.sample(m.SampleStacks(number, seconds, profile.rate))

    def _end(self, profile: _Profile, host: JoinedHost, how: str) -> None:
        if host in profile.hosts:
            profile.hosts.discard(host)
            profile.peer.send(m.HostSampled(host.name, True, how))

    def _here(self, frame: m.SampledFrame) -> m.SampledFrame:
        """Return the frame with the path of its file on this host."""
        if not frame.beside:
            return frame
        return structs.replace(frame, file=os.path.join(self._folder, frame.file)[-1024:], beside=False)
