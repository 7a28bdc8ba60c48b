"""An S3 server, and a proxy in front of it whose answers go wrong as a test wants."""

from __future__ import annotations

import http.client
import http.server
import os
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

BUCKET = "bucket"
SECRET = "ohsosecret"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
}


SIGNED = {"authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"}
"""moto wants a signature, and does not look at it."""

HEADERS = {**SIGNED, "Content-Type": "application/octet-stream"}


class Bucket:
    """A bucket of moto's server, by way of the proxy.

    Attributes:
        endpoint: the proxy's URL.
        faults: what happens to the next requests for a file, in order.
        sent: the method, the path and the number of bytes of the body of each answer.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self.endpoint = ""
        self.faults: list[str] = []
        self.sent: list[tuple[str, str, int]] = []
        self._send("POST", "moto-api/reset", b"")
        self._send("PUT", BUCKET, b"")

    def put(self, name: str, data: bytes) -> str:
        """Write a file, and return its URL."""
        self._send("PUT", f"{BUCKET}/{quote(name)}", data)
        return f"s3://{BUCKET}/{name}"

    def _send(self, method: str, path: str, data: bytes) -> None:
        request = urllib.request.Request(f"{self.server}/{path}", data, HEADERS, method=method)
        urllib.request.urlopen(request).close()

    def put_folder(self, folder: Path, below: str = "") -> None:
        """Write all files of a folder."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.put(below + str(file.relative_to(folder)), file.read_bytes())

    def fetched(self) -> int:
        """Return how many bytes of files were sent."""
        return sum(nbytes for method, path, nbytes in self.sent if method == "GET" and "?" not in path)


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    """Run a web server, and yield its URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def bucket_of(server: str) -> Iterator[Bucket]:
    """Make the bucket anew, and yield it behind a proxy."""
    bucket = Bucket(server)

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5  # then the thread of an idle connection ends, though the client keeps it for longer

        def do_GET(self) -> None:
            fault = bucket.faults.pop(0) if bucket.faults and "?" not in self.path else ""
            if fault == "late":
                time.sleep(0.3)
            if fault.isdecimal():
                body = b"<Error><Code>SlowDown</Code></Error>"
                self.answer(int(fault), [], len(body), body)
                return
            upstream = http.client.HTTPConnection(server.removeprefix("http://"))
            given = {name.lower(): value for name, value in self.headers.items() if name.lower() != "host"}
            upstream.request(self.command, self.path, headers={**SIGNED, **given})
            answer = upstream.getresponse()
            body = answer.read()
            upstream.close()
            size = int(answer.headers.get("Content-Length", len(body)))
            headers = [(k, v) for k, v in answer.headers.items() if k not in ("Content-Length", "Connection", "Date")]
            half = body[: len(body) // 2]
            self.answer(answer.status, headers, size, half if fault in ("reset", "truncated") else body, fault)
            if fault in ("reset", "truncated"):
                if fault == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    os.close(self.connection.detach())
                self.close_connection = True

        do_HEAD = do_GET

        def answer(self, status: int, headers: list[tuple[str, str]], size: int, body: bytes, fault: str = "") -> None:
            self.send_response_only(status)
            for name, value in [*headers, ("Content-Length", str(size))]:
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            bucket.sent.append((self.command, self.path, len(body)))
            try:
                if fault == "drip":
                    for at in range(0, len(body), 100):
                        self.wfile.write(body[at : at + 100])
                        time.sleep(0.05)
                else:
                    self.wfile.write(body)
            except OSError:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Proxy) as bucket.endpoint:
        yield bucket
