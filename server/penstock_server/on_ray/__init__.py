"""Hosts on a Ray cluster: an actor on each node runs `penstock join`, and Ray restarts the actor if it dies.

    from penstock_server.on_ray import serve

    with serve("feed.py:train", hosts=4, workers_per_host=16, keys="keys") as service:
        train = penstock.dataset(service.url, keys="keys/clients/trainer")

The head is `penstock serve --on ray`, a child of this process. There, launch.py starts the Ray driver (driver.py),
which places the actors (host.py). Batches never enter Ray's object store.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from penstock_proto import StartError

__all__ = ["Service", "serve"]

_END = 25.0


class Service(NamedTuple):
    """A running head.

    Attributes:
        url: the URL of the first feed, for `penstock.dataset` and `penstock.connect`.
        urls: the URL of each feed, by its name.
    """

    url: str
    urls: dict[str, str]


@contextlib.contextmanager
def serve(
    *feeds: str,
    hosts: int | str | tuple[int, int],
    workers_per_host: int,
    workers: int = 0,
    bind: str = "tcp://0.0.0.0:0",
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    memory: int | None = None,
) -> Iterator[Service]:
    """Serve feeds from this machine inside the `with` statement. Hosts on a Ray cluster make their batches.

    The cluster is the one that this process is connected to (`ray.init`), or else that of RAY_ADDRESS or of this
    machine. Ray copies the feeds' code to the hosts: the .py files in the folder of a feed's file and below. At the
    end, and if this process dies, the head and the hosts end, and nothing is left on the cluster.

    Args:
        feeds: MODULE:ATTR of each feed, as for `penstock serve`.
        hosts: number of hosts, each on a machine of its own. With (fewest, most), or "2:8", as many as trainers need,
            measured while they read.
        workers_per_host: worker processes of each host, which reserve as many CPUs.
        workers: additional worker processes, on this machine.
        bind: address to listen on; port 0 picks one. The hosts must reach it.
        keys: the daemon's folder of keys, with a key for the hosts (`penstock keygen DIR --host ray`).
        insecure: let other machines connect without keys, in a network that you trust.
        memory: most memory for batches in bytes; None: a quarter of what is free, at most 8 GiB.

    Raises:
        StartError: the head or the hosts cannot be started; the message says why.
        PenstockError: a feed cannot be served.
    """
    from .orders import WILDCARDS

    bounds = ":".join(map(str, hosts)) if isinstance(hosts, tuple) else str(hosts)
    command = [sys.executable, "-m", "penstock_server", "serve", *feeds, "--on", "ray", "--hosts", bounds]
    command += ["--workers-per-host", str(workers_per_host), "--workers", str(workers), "--bind", bind]
    command += ["--until-stdin-closes", *(["--insecure"] if insecure else [])]
    command += [] if keys is None else ["--keys", os.fspath(keys)]
    command += [] if memory is None else ["--memory", str(memory)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_SERVE_")}
    address, node = _connection()
    if address:
        environment["RAY_ADDRESS"] = address
    if node and urlsplit(bind).hostname in WILDCARDS:
        command += ["--advertise", f"[{node}]" if ":" in node else node]
    # In its own process group: Ctrl-C is for this process, which ends the head when it leaves the `with` statement.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0, process_group=0
    )
    assert process.stdin is not None
    assert process.stdout is not None
    drain = threading.Thread(target=_drain, args=(process.stdout,), daemon=True)
    try:
        urls = _ready(process, len(feeds))
        drain.start()
        yield Service(next(iter(urls.values())), urls)
    finally:
        process.stdin.close()
        for end in (process.terminate, process.kill, None):
            try:
                process.wait(_END)
                break
            except subprocess.TimeoutExpired:
                if end is not None:
                    end()
        if drain.is_alive():
            drain.join(1)
        process.stdout.close()


def _connection() -> tuple[str, str]:
    """Return the address of the cluster that this process is connected to, and that of this node in it; "" if none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return "", ""
    return ray.get_runtime_context().gcs_address, ray.util.get_node_ip_address()


def _ready(process: subprocess.Popen[bytes], feeds: int) -> dict[str, str]:
    """Return the URL of each feed by its name, once all are ready."""
    import msgspec

    from penstock_proto.messages import ErrorReport

    assert process.stdout is not None
    urls: dict[str, str] = {}
    while len(urls) < feeds:
        line = _line(process.stdout)
        if not line:
            raise StartError(f"the daemon ended with status {process.wait()} before it was ready; see its messages")
        word, _, rest = line.strip().partition(" ")
        if word == "ready" and rest.startswith("tcp://"):
            urls[rest.rpartition("/")[2]] = rest
        elif word == "error":
            raise msgspec.json.decode(rest, type=ErrorReport).error()
        else:
            sys.stderr.write(line)
    return urls


def _line(stdout: IO[bytes]) -> str:
    return stdout.readline().decode(errors="replace")


def _drain(stdout: IO[bytes]) -> None:
    """Pass on what user code prints later."""
    with contextlib.suppress(ValueError, OSError):  # closed
        while line := _line(stdout):
            sys.stderr.write(line)
