"""Asking a running daemon: its status over ZeroMQ, and to stop over its unix connection."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from urllib.parse import urlsplit

import zmq

from penstock_proto import ProtocolError, StartError, Unreachable, codec, seqpacket
from penstock_proto import messages as m


def endpoint_of(url: str) -> str:
    """The `tcp://host:port` of a daemon's or a feed's URL.

    Raises:
        StartError: `url` is not of the form tcp://HOST:PORT[/FEED].
    """
    parts = urlsplit(url)
    with contextlib.suppress(ValueError):
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            return f"tcp://{host}:{parts.port}"
    raise StartError(
        f"{url!r} is no daemon's address: it looks like tcp://127.0.0.1:5555 or tcp://127.0.0.1:5555/train"
    )


def status(url: str, timeout: float) -> str:
    """The daemon's status as JSON text.

    Raises:
        Unreachable: no answer within `timeout` seconds.
        PenstockError: what the daemon answered instead.
    """
    reply = _ask(url, m.StatusRequest(m.VERSION), timeout)
    if isinstance(reply, m.Status):
        return reply.json
    raise ProtocolError(f"the daemon answered {type(reply).__name__} to a status request")


def stop(url: str, unix: str, pid: int, timeout: float) -> None:
    """Ask the daemon to stop by its unix address `unix`, and wait until its process `pid` has ended.

    Raises:
        Unreachable: the daemon is not on this host, belongs to another user, or does not end within `timeout` seconds.
    """
    try:
        process = os.pidfd_open(pid)
        try:
            _say_stop(unix, timeout)
            ended, _, _ = select.select([process], [], [], timeout)
        finally:
            os.close(process)
    except OSError as error:
        raise Unreachable(
            f"the daemon at {url} cannot be stopped from here ({error}): `penstock stop` works on the daemon's host "
            "for the user who runs it, elsewhere send it SIGTERM"
        ) from None
    if not ended:
        raise Unreachable(f"the daemon at {url} (pid {pid}) has not ended within {timeout:g} s")


def _say_stop(unix: str, timeout: float) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout)
        connection.connect("\0" + unix)
        _, ledger = seqpacket.receive(connection)
        if ledger is not None:
            os.close(ledger)
        seqpacket.send(connection, codec.encode(m.StopRequest()))


def _ask(url: str, message: m.Message, timeout: float) -> m.ServerMessage:
    endpoint = endpoint_of(url)
    context = zmq.Context()
    connection = context.socket(zmq.DEALER)
    connection.setsockopt(zmq.LINGER, 0)
    try:
        connection.connect(endpoint)
        connection.send(codec.encode(message))
        if not connection.poll(int(timeout * 1000)):
            raise Unreachable(f"no daemon answered at {endpoint} within {timeout:g} s: is it running there?")
        reply = codec.from_server(connection.recv())
    except zmq.ZMQError as error:
        raise Unreachable(f"{endpoint}: {error}") from None
    finally:
        connection.close()
        context.term()
    if isinstance(reply, m.Failed):
        raise reply.error.error()
    return reply
