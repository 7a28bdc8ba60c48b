"""Connects to a daemon over TCP, with or without keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock_proto import KeyRefused
from penstock_proto.security.keys import ClientKeys, needs_key
from penstock_proto.security.trusted_users import check_peer
from penstock_proto.transport.urls import Address
from penstock_proto.transport.zmtp_dealer import Dealer, connected

if TYPE_CHECKING:
    from penstock_proto.transport.libzmq import LibzmqDealer


def dealer_to(
    address: Address,
    keys: ClientKeys | None,
    trusted: frozenset[int] | None,
    timeout: float,
    watch: Callable[[], None],
) -> Dealer | LibzmqDealer:
    """Connect to a daemon once. For `trusted`, see TcpConnection; for `timeout`, `watch` and errors, `libzmq.dealer`.

    Raises:
        Unreachable: a user who is not trusted listens there.
    """
    host, port = address.hostname, address.port
    if keys is not None:
        from penstock_proto.transport import libzmq

        return libzmq.dealer(keys, host, port, timeout, watch)
    try:
        dealer = connected(host, port, timeout, watch)
    except KeyRefused:
        raise KeyRefused(needs_key("the daemon")) from None
    if trusted is not None:
        try:
            check_peer(dealer.socket, address.endpoint, trusted)
        except BaseException:
            dealer.forget()
            raise
    return dealer
