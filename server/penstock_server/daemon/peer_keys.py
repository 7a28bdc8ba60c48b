"""Decides who may connect over TCP: everybody on this host, clients and hosts with keys, or (`--insecure`)
everybody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from penstock_proto import StartError

from ..consumers.sessions import Sessions
from ..hosts.hosts import Hosts
from ..net.accepting import only_this_host
from ..net.keys import ClientKey, ServerKeys, admitted, revoked, server_keys
from ..net.network import Router

log = logging.getLogger(__name__)

_MOST_NAMES = 20
"""Most clients that one log line names."""
_LISTENING = {"event": "listening"}


class PeerKeys:
    """The rule by which the TCP listener admits peers, and the keys that it uses.

    Args:
        bind: the `tcp://address:port` on which the daemon will listen.
        folder: the folder with the daemon's keys and those of the clients and hosts that may connect; None: no keys.

    Attributes:
        keys: the daemon's keys, or None.

    Raises:
        StartError: the keys cannot be used.
    """

    def __init__(self, bind: str, folder: str | None) -> None:
        self.keys: ServerKeys | None = None if folder is None else server_keys(folder)
        self._reading: asyncio.Task[None] | None = None
        self._again = False
        """Whether another SIGHUP came while the keys were read."""
        self._exposed = not only_this_host(bind)

    def say(self, endpoint: str) -> None:
        """Log who may connect to `endpoint`."""
        if self.keys is not None:
            log.info("listening on %s with keys: %s", endpoint, _names(self.keys.admitted), extra=_LISTENING)
            if all(key.host for key in self.keys.admitted.values()):
                log.warning(
                    "no client may connect: there are no keys in %s", self.keys.folder / "clients", extra=_LISTENING
                )
        elif self._exposed:
            log.warning(
                "listening on %s without keys (--insecure): nothing is encrypted, and anyone who reaches the port can "
                "read the batches",
                endpoint,
                extra=_LISTENING,
            )

    def read_again(self, sessions: Sessions, router: Router, hosts: Hosts) -> None:
        """Read again which clients and hosts may connect, and disconnect those whose keys were removed. A thread reads
        the files, since a file system may be slow."""
        if self._reading is not None:
            self._again = True
            return
        self._reading = asyncio.get_running_loop().create_task(self._read_again(sessions, router, hosts))

    async def _read_again(self, sessions: Sessions, router: Router, hosts: Hosts) -> None:
        assert self.keys is not None
        before, self._again = self.keys.admitted, False
        try:
            now = await asyncio.to_thread(admitted, self.keys.folder, before)
            self.keys = self.keys._replace(admitted=now)
            log.info("read the keys again: %s", _names(now), extra={"event": "keys_read"})
            sessions.revoke([key.public for key in before.values() if revoked(key, now)])
            router.admit(now)
            hosts.admit(now)
        except StartError as error:
            text = "the keys were not read again, and those from before still count: %s"
            log.error(text, error, extra={"event": "keys_read"})
        finally:
            self._reading = None
        if self._again:  # a file may have changed after it was read
            self.read_again(sessions, router, hosts)


def _names(admitted: Mapping[bytes, ClientKey]) -> str:
    clients = _list([key.name for key in admitted.values() if not key.host])
    hosts = [key.name for key in admitted.values() if key.host]
    return f"{clients} may connect" + (f"; hosts: {_list(hosts)} may join" if hosts else "")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(sorted(names)[:_MOST_NAMES]) or 'nobody'}{more}"
