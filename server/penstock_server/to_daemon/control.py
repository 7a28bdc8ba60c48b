"""Sends requests to a running daemon: for the status over ZeroMQ; to stop, scale and profile over its unix
connection."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from penstock_proto import KeyRefused, PenstockError, ProtocolError, UnknownFeed, Unreachable
from penstock_proto import messages as m
from penstock_proto.security import unix_address
from penstock_proto.security.keys import ClientKeys, needs_key
from penstock_proto.status import asking
from penstock_proto.status.readiness import Patience
from penstock_proto.status.status_shape import Status
from penstock_proto.transport import codec, libzmq, seqpacket, urls, zmtp, zmtp_dealer
from penstock_proto.transport.urls import Address
from penstock_proto.transport.zmtp_dealer import Dealer

_ANSWER = 5.0
"""Seconds that a daemon may take to answer."""

_EVERY = 1.0
"""Seconds between two questions to a daemon that starts."""

_SILENT = "something accepts connections but does not answer: is it a Penstock daemon?"

_AGAIN = 0.1
"""Seconds between two attempts to connect."""


def status(url: str, timeout: float, keys: ClientKeys | None = None) -> Status:
    """Return the daemon's status, whose texts are safe to print.

    Args:
        url: the daemon's or a feed's address.
        timeout: seconds that the daemon may take to answer.
        keys: a client's keys, for a daemon with keys.

    Raises:
        Unreachable: no answer within `timeout` seconds.
        KeyRefused: the daemon requires a key, does not know this one, or uses none.
        UnknownFeed: the URL names a feed that the daemon does not serve.
        ProtocolError: the answer is not a status.
        PenstockError: the daemon's answer, if it was an error.
    """
    address = urls.parse(url)
    deadline = time.monotonic() + timeout
    while (state := _asked(address, keys, deadline)) is None:
        if time.monotonic() + _AGAIN > deadline:
            raise Unreachable(f"no daemon answered at {address.endpoint} within {timeout:g} s: is it running?")
        time.sleep(_AGAIN)
    _check_feed(address, state)
    return state


def wait(url: str, patience: Patience, keys: ClientKeys | None, tell: Callable[[str], None]) -> Status:
    """Wait until the daemon's feeds can be read, or the feed of the URL can. Return its status.

    Args:
        url: the daemon's or a feed's address.
        patience: how long to wait; at least one answer is waited for.
        keys: as for `status`.
        tell: called about once a second with what the daemon waits for.

    Raises:
        Unreachable: it was not ready in time, or something else listens there.
        PenstockError: as `status`; or the daemon could not start, and this is why.
    """
    address = urls.parse(url)
    nobody = "no daemon answers"
    while True:
        deadline = time.monotonic() + (patience.left or _ANSWER)
        try:
            with _dealer(address, keys, deadline) as dealer:
                while (state := asking.status(dealer, max(deadline, time.monotonic() + _ANSWER))) is not None:
                    _check_feed(address, state)
                    patience.heard(state)
                    if not state.draining and (state.ready or address.feed in [feed.name for feed in state.feeds]):
                        return state
                    if not patience.left:
                        raise Unreachable(f"the daemon at {address.endpoint} is not ready: {state.phase}")
                    tell(state.phase)
                    dealer.wait(min(_EVERY, patience.left))  # ends early if the daemon says why it cannot start
            nobody = _SILENT
        except zmtp.Silent:
            nobody = _SILENT
        except OSError as error:
            nobody = f"no daemon answers ({error.strerror or error})"
        if not patience.left:
            what = f"{address.endpoint}, tried for {patience.seconds:.4g} s"
            if patience.state is not None:
                nobody = f"the daemon has ended before it was ready ({patience.state.phase}): see its log"
            raise Unreachable(f"{what}: {nobody}")
        tell(nobody)
        time.sleep(min(_AGAIN, patience.left))


def scale(
    url: str, workers: int, *, now: bool, timeout: float, keys: ClientKeys | None = None, host: str = ""
) -> m.Scaled:
    """Tell the daemon, or its joined host named `host`, to run `workers` workers. The daemon answers at once, before
    surplus workers have stopped. `keys`: as for `status`.

    Raises:
        Unreachable: the daemon is not on this host, belongs to another user, or does not answer in `timeout` seconds.
        PenstockError: the daemon's answer, if it was an error.
    """
    signals = "" if host else "SIGTTIN or SIGTTOU (add or remove one worker)"
    return _scaled(url, m.ScaleRequest(workers, now, host), signals, timeout, keys)


def scale_hosts(url: str, hosts: int, *, timeout: float, keys: ClientKeys | None = None) -> m.Scaled:
    """Tell the daemon's engine to run `hosts` hosts. The daemon answers at once, before hosts have started or stopped.
    `keys`: as for `status`.

    Raises:
        Unreachable: as for `scale`.
        PenstockError: the daemon's answer, if it was an error.
    """
    return _scaled(url, m.ScaleHostsRequest(hosts), "", timeout, keys)


def _scaled(url: str, request: m.Message, signals: str, timeout: float, keys: ClientKeys | None) -> m.Scaled:
    state = status(url, timeout, keys)
    with _beside(url, state, "scale", signals, timeout) as connection:
        seqpacket.send(connection, codec.encode(request))
        data, _ = seqpacket.receive(connection)
        if not data:
            raise ConnectionResetError("it has just stopped")
    reply = codec.from_server(data)
    if isinstance(reply, m.Scaled):
        return reply
    if isinstance(reply, m.Failed):
        raise reply.error.error()
    raise ProtocolError(f"the daemon answered {type(reply).__name__} to a scale request")


def stop(
    url: str,
    *,
    now: bool,
    timeout: float | None,
    still_waiting: Callable[[Status], None],
    every: float = 10.0,
    keys: ClientKeys | None = None,
) -> None:
    """Ask the daemon to stop, and wait until its process has ended.

    Args:
        url: the daemon's or a feed's address.
        now: whether to stop without waiting for the epochs that are being read.
        timeout: seconds to wait; None: no limit.
        still_waiting: called every `every` seconds with the daemon's status.
        every: seconds between two of these calls.
        keys: as for `status`.

    Raises:
        Unreachable: the daemon is not on this host, belongs to another user, or has not ended in time.
    """
    patience = _ANSWER if timeout is None else min(timeout, _ANSWER)
    state = status(url, patience, keys)
    with (
        _beside(url, state, "stop", "SIGTERM", patience) as connection,
        _process_behind(connection) as process,
    ):
        seqpacket.send(connection, codec.encode(m.StopRequest(now)))
        deadline = None if timeout is None else time.monotonic() + timeout
        while not _ended(process, connection, every if deadline is None else min(every, deadline - time.monotonic())):
            if deadline is not None and time.monotonic() >= deadline:
                hint = "" if now else ": it lets epochs that are being read finish, `penstock stop --now` does not wait"
                raise Unreachable(f"the daemon at {url} (pid {state.pid}) did not stop within {timeout:g} s{hint}")
            with contextlib.suppress(PenstockError):  # it may be stopping just now
                state = status(url, patience, keys)
            if not _ended(process, connection, 0):
                still_waiting(state)


def stacks(url: str, state: Status, timeout: float) -> list[tuple[int, int, int]]:
    """Return, for each worker of a daemon that is ready, its number, its process id and the fd of its stacks file.

    Args:
        url: the daemon's or a feed's address.
        state: the daemon's status.
        timeout: seconds that the daemon may take to answer.

    Raises:
        Unreachable: the daemon is not on this host, belongs to another user, or does not answer in time.
        PenstockError: the daemon's answer, if it was an error.
    """
    found: list[tuple[int, int, int]] = []
    with contextlib.ExitStack() as undo:
        with _beside(url, state, "profile", "", timeout) as connection:
            _check_processes(url, state, connection)
            seqpacket.send(connection, codec.encode(m.StacksRequest()))
            user = unix_address.user(connection)
            for _ in range(m.MAX_WORKERS + 1):
                data, fd = seqpacket.receive(connection)
                if fd is not None:
                    undo.callback(os.close, fd)
                if not data:
                    raise ConnectionResetError("it has just stopped")
                reply = codec.from_server(data)
                if isinstance(reply, m.WorkerStacks) and fd is not None:
                    if not _is_of(reply.pid, user):
                        raise ProtocolError(f"the daemon named process {reply.pid}, which is not of its user {user}")
                    found.append((reply.worker, reply.pid, fd))
                elif isinstance(reply, m.StacksSent):
                    break
                elif isinstance(reply, m.Failed):
                    raise reply.error.error()
                else:
                    raise ProtocolError(f"the daemon answered {type(reply).__name__} to a request for stacks")
            else:
                raise ProtocolError(f"the daemon named more than {m.MAX_WORKERS} workers")
        undo.pop_all()
    return found


@contextlib.contextmanager
def profile_hosts(url: str, state: Status, seconds: float, rate: float, timeout: float) -> Iterator[socket.socket]:
    """Tell joined hosts to sample the stacks of their workers until the context ends. Yield a non-blocking connection
    that delivers the samples (see ProfileHosts).

    Args:
        url: the daemon's or a feed's address.
        state: the daemon's status.
        seconds: seconds for which they sample.
        rate: samples of each worker per second.
        timeout: seconds that the daemon may take to answer.

    Raises:
        Unreachable: the daemon is not on this host, or belongs to another user.
    """
    with _beside(url, state, "profile", "", timeout) as connection:
        seqpacket.send(connection, codec.encode(m.ProfileHosts(seconds, rate)))
        connection.setblocking(False)
        yield connection


def _is_of(pid: int, user: int) -> bool:
    """Return whether a process may be signalled for a daemon of this user. It is, if it has ended. Only root could
    signal one of another user."""
    try:
        return os.geteuid() != 0 or os.stat(f"/proc/{pid}").st_uid == user
    except OSError:
        return True


def _check_processes(url: str, state: Status, connection: socket.socket) -> None:
    """Refuse a daemon whose processes have other ids here: signals would go to other processes.

    Raises:
        Unreachable: the daemon is in another PID namespace.
    """
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid != state.pid:
        raise Unreachable(
            f"cannot profile the daemon at {url} from here: it runs in another container, whose processes cannot be "
            "signalled; run this there (docker exec)"
        )


def _check_feed(address: Address, state: Status) -> None:
    """Refuse an address with a feed that the daemon does not serve. Accept any name until the daemon is ready."""
    served = [one.name for one in state.feeds]
    if address.feed and state.ready and address.feed not in served:
        said = f"no feed {address.feed!r} is served at {address.endpoint}; there are: {', '.join(sorted(served))}"
        raise UnknownFeed(said)


def _ended(process: int, connection: socket.socket, timeout: float) -> bool:
    """Return whether the daemon's process ends within `timeout` seconds.

    Raises:
        PenstockError: the daemon refuses to stop; it gives the reason on the connection.
    """
    deadline = time.monotonic() + timeout
    heard: list[Any] = [connection]
    while True:
        ready, _, _ = select.select([process, *heard], [], [], max(0.0, deadline - time.monotonic()))
        if process in ready:
            return True
        if not ready:
            return False
        data, _ = seqpacket.receive(connection)
        if not data:  # the daemon closes its connections before it ends
            heard = []
        elif isinstance(reply := codec.from_server(data), m.Failed):
            raise reply.error.error()
        if time.monotonic() > deadline:  # although messages come
            return False


@contextlib.contextmanager
def _beside(url: str, state: Status, verb: str, signals: str, timeout: float) -> Iterator[socket.socket]:
    """Connect to a daemon on this host, read its greeting, and yield the unix connection."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout)
            unix_address.connect(connection, state.unix, None if os.geteuid() == 0 else {0, os.geteuid()})
            greeting, ledger = seqpacket.receive(connection)
            if ledger is not None:
                os.close(ledger)
            if not greeting:
                raise PermissionError("it belongs to another user")
            yield connection
    except OSError as error:
        or_signals = f", or send {signals} to its process {state.pid}" if signals else ""
        raise Unreachable(
            f"cannot {verb} the daemon at {url} from here ({error}): run this on the daemon's host, as root or as the "
            f"user who started the daemon{or_signals}"
        ) from None


@contextlib.contextmanager
def _process_behind(connection: socket.socket) -> Iterator[int]:
    """Yield a pidfd of the process that listens at the other end. The kernel gives us its id in our PID namespace."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if not pid:
        raise ProcessLookupError("its process is in another container")
    process = os.pidfd_open(pid)
    try:
        yield process
    finally:
        os.close(process)


def _asked(address: Address, keys: ClientKeys | None, deadline: float) -> Status | None:
    """Return the daemon's status, or None if it cannot be reached now or closes the connection."""
    try:
        with _dealer(address, keys, deadline) as dealer:
            return asking.status(dealer, deadline)
    except socket.gaierror as error:
        raise Unreachable(f"{address.endpoint}: the host name is unknown ({error})") from None
    except OSError:
        return None


@contextlib.contextmanager
def _dealer(address: Address, keys: ClientKeys | None, deadline: float) -> Iterator[Dealer | libzmq.LibzmqDealer]:
    """Yield a connection to the daemon. Raises OSError if it cannot be reached now."""
    endpoint = address.endpoint
    # Without keys anybody may be there, and libzmq collects a message of many frames without limit.
    connect = zmtp_dealer.connected if keys is None else partial(libzmq.dealer, keys)
    try:
        dealer = connect(address.hostname, address.port, max(0.0, deadline - time.monotonic()), lambda: None)
    except KeyRefused as error:
        raise KeyRefused(f"{endpoint}: {needs_key('the daemon') if keys is None else error}") from None
    except ProtocolError as error:
        raise Unreachable(f"{endpoint} is not a Penstock daemon: {error}") from None
    try:
        yield dealer
    except KeyRefused as error:
        raise KeyRefused(f"{endpoint}: {error}") from None
    finally:
        dealer.close(0)
