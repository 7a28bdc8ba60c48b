"""What the daemon does for `penstock profile`: it hands out the stacks files of its own workers. Hosts that have joined
sample theirs themselves; it asks them, and passes on what they send.

A profile of hosts lasts as long as the connection of the user who asked for it, or until all hosts have ended.
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

from .host.local import LocalPeer
from .joining.joined_host import JoinedHost


@dataclass(slots=True)
class _Profile:
    """One profile of hosts: who asked, what for, until when, and the hosts that have not ended."""

    peer: LocalPeer
    rate: float
    until: float
    hosts: set[JoinedHost] = field(default_factory=set)


class Profiles:
    """See the file's head.

    Args:
        stacks: returns the daemon's own workers that are ready: their numbers, their processes, and the fds of their
            stacks files.
        hosts: returns the hosts that have joined.
        folder: that of the first feed's file, or empty.
    """

    def __init__(
        self,
        stacks: Callable[[], Iterable[tuple[int, int, int]]],
        hosts: Callable[[], Iterable[JoinedHost]],
        folder: str,
    ) -> None:
        self._stacks = stacks
        self._hosts = hosts
        self._folder = folder
        self._numbers = itertools.count()
        self._profiles: dict[int, _Profile] = {}

    def send_stacks(self, peer: LocalPeer) -> None:
        """Send the fds of the workers' stacks files, unless the connection has not read earlier ones: those count
        against the open files of the daemon's user until they are read.

        Raises:
            ProtocolError: it has not.
        """
        if peer.unread:
            raise ProtocolError("a StacksRequest before the answers to earlier messages were read")
        for worker, pid, fd in self._stacks():
            peer.send(m.WorkerStacks(worker, pid), fd)
        peer.send(m.StacksSent())

    def begin(self, peer: LocalPeer, message: m.ProfileHosts) -> None:
        """Have all hosts sample their workers.

        Raises:
            ProtocolError: this connection has asked for that already.
        """
        if any(profile.peer is peer for profile in self._profiles.values()):
            raise ProtocolError("a second ProfileHosts on one connection")
        peer.opened()  # it may stay open for as long as the profile lasts
        number = next(self._numbers)
        profile = self._profiles[number] = _Profile(peer, message.rate, time.monotonic() + message.seconds)
        for host in self._hosts():
            if host.working:
                self._ask(number, profile, host)

    def host_works(self, host: JoinedHost) -> None:
        """A host gets work from now on."""
        for number, profile in self._profiles.items():
            self._ask(number, profile, host)

    def host_lost(self, host: JoinedHost, how: str) -> None:
        """A host is gone."""
        for profile in self._profiles.values():
            self._end(profile, host, how)

    def peer_ended(self, peer: LocalPeer) -> None:
        """A connection of this host has ended, and the profile with it."""
        for number, profile in list(self._profiles.items()):
            if profile.peer is peer:
                del self._profiles[number]
                for host in profile.hosts:
                    host.sample(m.SampleStacks(number, 0, profile.rate))

    def sampled(self, host: JoinedHost, message: m.StacksSampled | m.SamplingEnded) -> None:
        """A host has sampled its workers. What comes for a profile that has ended is dropped."""
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
        """Return the frame with the path that its file has on this host."""
        if not frame.beside:
            return frame
        return structs.replace(frame, file=os.path.join(self._folder, frame.file)[-1024:], beside=False)
