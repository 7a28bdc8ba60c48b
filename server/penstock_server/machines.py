"""Which machine an address belongs to, as far as a daemon can see."""

from __future__ import annotations

import ipaddress


def machine_at(address: str) -> str:
    """Return the machine of a peer at HOST:PORT: its address, or "" for this machine, if that is a loopback address."""
    host = address.rpartition(":")[0]
    return "" if is_loopback(host) else host


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a peer that is gone has no address
        return False
