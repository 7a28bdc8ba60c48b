"""Answers HTTP requests on the daemon's event loop.

It only reads. Without an open page it answers with figures that the daemon has anyway. It limits its connections, so
that they take no file descriptors from consumers. In a browser on this host, a page of another site must not read what
only this host may see. So a server on a loopback address answers only requests that name such an address.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from penstock_proto import StartError
from penstock_proto.status.status_shape import Status

from ..logs.rate_limited_log import RateLimitedLog
from ..net.addresses import is_loopback
from . import metrics
from .budget import Budget
from .connections import Connections
from .files import HEADERS, File, files
from .live import Live
from .previews import Previews
from .request_log import RequestLog
from .watched import Watched

log = logging.getLogger(__name__)

_BACKLOG = 1024
"""Connections that the kernel keeps until the daemon accepts them. A peer beyond that tries again after a second."""

MOST_ANSWERS = 40
"""Maximum number of answers to pages per second: 30 pages that show everything. Further requests are refused."""


class HttpService:
    """The HTTP server of one daemon.

    Args:
        host: name or address to listen on.
        port: 0 picks one.
        watched: what it may look at in the daemon.

    Attributes:
        address: host and port; after `start`, the port that was picked.
    """

    def __init__(self, host: str, port: int, watched: Watched) -> None:
        self.address = host, port
        self._host = host
        self._port = port
        self._watched = watched
        self._live = Live(watched)
        self._budget = Budget()
        self._previews = Previews(watched, self._budget)
        self._files = files()
        self._log = RateLimitedLog(log)
        self._answers = 0
        """How many answers were given to pages in this second."""
        self._read_text = ""
        self._status: Status | None = None
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._connections = Connections(self._answerer, self._budget.admits, HEADERS, self._refused, watched.bugs)

    async def start(self) -> str:
        """Listen, and return the URL.

        Raises:
            StartError: the address cannot be bound.
        """
        app = web.Application(middlewares=[self._check])
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/static/{path:.+}", self._file),
                web.get("/api/live", self._news),
                web.get("/api/preview", self._preview),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._alive),
                web.get("/readyz", self._ready),
                web.get("/api/status", self._state),
            ]
        )
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            auto_decompress=False,
            logger=RequestLog(self._log, self._watched.bugs),
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._server = await loop.create_server(
                self._connections.new, str(found[0][4][0]), self._port, backlog=_BACKLOG
            )
        except (OSError, UnicodeError) as error:
            await self._runner.cleanup()
            raise StartError(
                f"--http: cannot listen on {self._host}:{self._port} ({error}): use an address of this host and a free "
                "port; port 0 picks one"
            ) from None
        self._live.start()
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = self._host, port
        self._loopback = is_loopback(host)
        if not self._loopback:
            log.warning(
                "the HTTP server listens on %s: anyone who reaches it can read the names of feeds and splits, the "
                "addresses of consumers, the errors of user code, and samples of the data. Use it only in a trusted "
                "network",
                host,
                extra={"event": "listening"},
            )
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def stop(self) -> None:
        """Close all connections."""
        self._previews.stop()
        await self._live.stop()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def another_second(self, _: int) -> None:
        """Do the work of each second. The daemon's clock calls this."""
        self._answers = 0
        self._budget.another_second()
        self._live.another_second()
        self._log.look_at_the_clock(time.monotonic())
        self._previews.forget_old()

    def _answerer(self) -> asyncio.Protocol:
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        return server()

    def _refused(self, why: str) -> None:
        self._log.warning("refused a request over HTTP: %s", why, event="message_refused")

    @web.middleware
    async def _check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if self._loopback and not _is_local(request.host):
                said = f"the server is for this host alone, and was asked for as {request.host!r}\n"
                raise web.HTTPForbidden(text=said)
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            error.force_close()
            raise
        response.headers.update(HEADERS)
        response.force_close()  # a connection carries one request
        return response

    async def _page(self, request: web.Request) -> web.Response:
        return _answer(self._files["page.html"])

    async def _file(self, request: web.Request) -> web.Response:
        file = self._files.get(request.match_info["path"])
        if file is None:
            raise web.HTTPNotFound(text="no such file\n")
        return _answer(file)

    async def _news(self, request: web.Request) -> web.Response:
        self._count_answer()
        names = ("seconds", "minutes", "looks", "changes")
        seconds, minutes, looks, changes = (_number(request, name) for name in names)
        with self._budget:
            text = self._live.ask(seconds=seconds, minutes=minutes, looks=looks, changes=changes)
        return web.json_response(text=text)

    async def _preview(self, request: web.Request) -> web.Response:
        self._count_answer()
        feed = request.query.get("feed", "")
        if feed not in self._watched.feeds:
            raise web.HTTPNotFound(text="there is no such feed, or it is still being started\n")
        with self._budget:
            text = self._previews.ask(feed, _number(request, "number"))
        return web.json_response(text=text)

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._watched.memory.wait()
        with self._budget:
            body, content_type = metrics.render(self._read(), request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _alive(self, request: web.Request) -> web.Response:
        lost = self._no_worker
        return web.Response(status=503 if lost else 200, text=f"{lost or 'ok'}\n")

    async def _ready(self, request: web.Request) -> web.Response:
        why = self._read().phase or self._no_worker
        return web.Response(status=503 if why else 200, text=f"{why or 'ready'}\n")

    @property
    def _no_worker(self) -> str:
        """Why nothing can be read until the daemon is started again; "" if that is not so."""
        workers = list(self._watched.workers())
        if not workers or any(self._watched.hosts) or not all(worker.given_up for worker in workers):
            return ""
        return "no worker process is left, and none can start: see the daemon's log"

    def _count_answer(self) -> None:
        self._answers += 1
        if self._answers > MOST_ANSWERS:
            raise web.HTTPTooManyRequests(text="too many pages ask: close some\n")

    async def _state(self, request: web.Request) -> web.Response:
        await self._watched.memory.wait()
        with self._budget:
            text = self._watched.status_text()
        return web.json_response(text=text)

    def _read(self) -> Status:
        """Return the status. It is decoded only once for each text, since a text answers many requests."""
        text = self._watched.status_text()
        if text is not self._read_text:
            self._read_text, self._status = text, msgspec.json.decode(text, type=Status)
        assert self._status is not None
        return self._status


def _is_local(host: str) -> bool:
    """Return whether the Host header names this host by a loopback address or as localhost."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]")
    return name.lower() == "localhost" or is_loopback(name)


def _answer(file: File) -> web.Response:
    return web.Response(body=file.data, headers={"Content-Type": file.content_type})


def _number(request: web.Request, name: str) -> int:
    """Return the number of this name in the query; 0 if there is none."""
    text = request.query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
