"""Requests to the daemon from programs on its own host: to stop, to scale, and to profile the workers."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from penstock_proto import ProtocolError
from penstock_proto import messages as m

from ..net.local import LocalPeer
from .profiles import Profiles
from .to_consumers import failed

Request: TypeAlias = m.StopRequest | m.ScaleRequest | m.ScaleHostsRequest | m.StacksRequest | m.ProfileHosts


class Stops(Protocol):
    """Stops at once if `now`, or else when the current epochs have ended (daemon/daemon.py)."""

    def stop_asked(self, now: bool) -> None: ...


class Scales(Protocol):
    """Returns the old and the new number of workers or hosts, or raises an error (scaling/scale_requests.py)."""

    def scale(self, request: m.ScaleRequest | m.ScaleHostsRequest) -> tuple[int, int]: ...


class LocalRequests:
    """Carries out such a request if the daemon's own user or root has sent it.

    Args:
        daemon: stops when its own user asks it to.
        scaling: changes the number of workers or hosts.
        profiles: profiles workers for users.
    """

    def __init__(
        self,
        daemon: Stops,
        scaling: Scales,
        profiles: Profiles,
    ) -> None:
        self._daemon = daemon
        self._scaling = scaling
        self._profiles = profiles

    def came(self, peer: LocalPeer, request: Request) -> None:
        """Answer a request that came over a connection on this host.

        Raises:
            PenstockError: it cannot be done. (A user without permission gets an answer that says so.)
        """
        match request:
            case _ if not peer.trusted:
                peer.send(failed(ProtocolError("only the daemon's own user and root may stop, scale and profile it")))
            case m.StopRequest():
                self._daemon.stop_asked(request.now)
            case m.ScaleRequest() | m.ScaleHostsRequest():
                peer.send(m.Scaled(*self._scaling.scale(request)))
            case m.StacksRequest():
                self._profiles.send_stacks(peer)
            case m.ProfileHosts():
                self._profiles.begin(peer, request)

    def peer_ended(self, peer: LocalPeer) -> None:
        """Handle the end of a connection on this host."""
        self._profiles.peer_ended(peer)


def refused() -> m.Failed:
    """Return the answer to such a request over the network."""
    return failed(ProtocolError("a daemon can be stopped, scaled and profiled only from its own host"))
