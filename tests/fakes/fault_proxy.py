"""A TCP proxy with faults, between a client and a daemon: it delays, throttles, stalls and cuts what passes through.

It runs on its own thread, and does not interpret what passes. Each fault begins with a call from any thread, and ends
after its time or with `mend`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

PIECE = 16 * 1024
"""The most bytes that move at once."""
ROOM = 64
"""The most pieces that wait in each direction. While there are that many, the proxy does not read the sender."""

T = TypeVar("T")

UP, DOWN = "up", "down"
"""From the client to the daemon, and back."""


class _Pipe:
    """One direction of one connection."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.reader, self.writer = reader, writer
        self.frozen = False
        self.queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(ROOM)


class FaultProxy:
    """A context manager that listens on a free port of this host and connects to `port`.

    Attributes:
        port: its port, which stays the same while it refuses connections.
        tried: the number of connections that clients have made.
        accepted: the number of those for which the daemon was there.
        carried: bytes that passed, by direction.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._to = (host, port)
        self._delay = 0.0
        self._rate: float | None = None
        self._stalled: set[str] = set()
        self._pipes: set[_Pipe] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._mends: list[asyncio.TimerHandle] = []
        self.tried = self.accepted = 0
        self.carried = {UP: 0, DOWN: 0}
        self._kept = socket.socket()  # bound but not listening: nobody else gets the port
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port: int = self._kept.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    # --- faults, from any thread ---

    def delay(self, seconds: float, lasting: float) -> None:
        """Forward bytes only after `seconds`, in both directions."""
        self._fault(lambda: setattr(self, "_delay", seconds), lambda: setattr(self, "_delay", 0.0), lasting)

    def throttle(self, rate: float, lasting: float) -> None:
        """Move at most `rate` bytes a second in each direction of each connection."""
        self._fault(lambda: setattr(self, "_rate", rate), lambda: setattr(self, "_rate", None), lasting)

    def stall(self, lasting: float, *directions: str) -> None:
        """Accept connections and keep them open, but move no bytes: in both directions, or in those that are given."""
        those = set(directions or (UP, DOWN))
        self._fault(lambda: self._stalled.update(those), lambda: self._stalled.difference_update(those), lasting)

    def freeze(self) -> None:
        """Never move a byte again on the connections that are open now. Neither side learns when the other closes."""

        def freeze() -> None:
            for pipe in self._pipes:
                pipe.frozen = True

        self._call(freeze)

    def cut(self, refusing: float = 0.0) -> None:
        """Break all connections, with a reset on both sides, and refuse new ones for a while."""

        async def cut() -> None:
            for pipe in self._pipes:
                _reset(pipe.writer)
            if refusing and self._server is not None:
                await self._stop_listening()
                self._mends.append(self._loop.call_later(refusing, self._listen_again))

        self._run(cut())

    def mend(self) -> None:
        """End all faults except `freeze`."""

        def mend() -> None:
            mends, self._mends = self._mends, []
            for handle in mends:
                handle.cancel()
            self._delay, self._rate = 0.0, None
            self._stalled.clear()
            self._listen_again()

        self._call(mend)

    # --- the loop ---

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._kept.close()

    def _run(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30)

    def _call(self, do: Callable[[], None]) -> None:
        async def call() -> None:
            do()

        self._run(call())

    def _fault(self, begin: Callable[[], None], end: Callable[[], None], lasting: float) -> None:
        def fault() -> None:
            begin()
            self._mends.append(self._loop.call_later(lasting, end))

        self._call(fault)

    async def _listen(self) -> None:
        if self._server is None:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            self._server = await asyncio.start_server(self._accepted, sock=listener, limit=4 * PIECE)

    async def _stop_listening(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        for listener in server.sockets:
            self._loop.remove_reader(listener.fileno())
        # A connection that was just accepted reaches `_accepted` after several iterations of the loop. If the server is
        # closed before, it forgets the connection, which stays open.
        for _ in range(10):
            await asyncio.sleep(0)
        server.close()

    def _listen_again(self) -> None:
        self._spawn(self._listen())

    def _spawn(self, what: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        for handle in self._mends:
            handle.cancel()
        await self._stop_listening()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:  # of connections that were just accepted
            writer.transport.abort()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next iteration

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tried += 1
        self._writers.add(writer)
        self._spawn(self._connection(reader, writer))

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            others_reader, others_writer = await asyncio.open_connection(*self._to, limit=4 * PIECE)
        except OSError:  # no daemon is there
            self._writers.discard(writer)
            _reset(writer)
            return
        pipes = {_Pipe(UP, reader, others_writer), _Pipe(DOWN, others_reader, writer)}
        self._pipes |= pipes
        self.accepted += 1
        work = [self._loop.create_task(one) for pipe in pipes for one in (self._read(pipe), self._write(pipe))]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self._pipes -= pipes
            self._writers.discard(writer)
            writer.transport.abort()
            others_writer.transport.abort()

    async def _read(self, pipe: _Pipe) -> None:
        with contextlib.suppress(OSError):
            while data := await pipe.reader.read(PIECE):
                await pipe.queue.put((time.monotonic() + self._delay, data))
        await pipe.queue.put((0.0, b""))
        await asyncio.Event().wait()  # the writer still sends what was read before the end, then ends

    async def _write(self, pipe: _Pipe) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = await pipe.queue.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                while pipe.frozen or pipe.name in self._stalled:
                    await asyncio.sleep(0.01)
                if not data:
                    return
                if self._rate is not None:
                    await asyncio.sleep(len(data) / self._rate)
                pipe.writer.write(data)
                await pipe.writer.drain()
                self.carried[pipe.name] += len(data)


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
