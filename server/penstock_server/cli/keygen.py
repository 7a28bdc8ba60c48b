"""Makes keys for a daemon, its clients, and the hosts that join it: `penstock keygen`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import click

from penstock_proto import StartError
from penstock_proto.security.key_files import KeyPair, read_pair
from penstock_proto.security.keys import KINDS, SERVER, SERVER_SECRET, Kind, require_zmq, secret_name

from ..net.keys import SUFFIX

FIRST = "trainer"
"""Name of the first client if the user names none."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--client",
    "clients",
    multiple=True,
    metavar="NAME",
    show_default="trainer, with the daemon's first keys",
    help="Make keys for a client of this name; may be repeated.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Make keys for a host of this name that joins the daemon with workers; may be repeated.",
)
def keygen(folder: Path, clients: tuple[str, ...], hosts: tuple[str, ...]) -> None:
    """Make keys for a daemon, its clients and the hosts that join it, or for further clients and hosts.

    Existing files are never overwritten. The log and the status call a client or host by the name of its key.

    \b
    Examples:
      penstock keygen keys                  # keys/server for the daemon, keys/clients/trainer for trainers
      penstock serve scenes:feed --bind tcp://0.0.0.0:5555 --keys keys
      penstock status tcp://loader:5555 --keys keys/clients/trainer
      penstock keygen keys --client alice   # then: kill -HUP PID
      penstock keygen keys --host loader2   # keys/hosts/loader2, for `penstock join` on that host
    """  # noqa: D301
    server, *made = generate(folder, clients, hosts)
    click.echo(f"{server}  for the daemon: penstock serve ... --keys {folder}")
    for one in made:
        if one.parent.name == "hosts":
            click.echo(f"{one}  for a host that joins, copy it there: penstock join URL ... --keys {one}")
        else:
            click.echo(f'{one}  for a client, copy it there: penstock.connect(url, keys="{one}")')
    if clients or hosts:
        click.echo("A daemon that runs already admits them after `kill -HUP PID`.")


def generate(folder: Path, clients: Iterable[str] = (), hosts: Iterable[str] = ()) -> list[Path]:
    """Make a daemon's keys, unless `folder` has them already, and the keys of clients and hosts.

    Args:
        folder: the folder of the keys, which need not exist.
        clients: names of new clients. If there are none, a new daemon gets the client `FIRST`.
        hosts: names of new hosts, which may join the daemon.

    Returns:
        The daemon's folder, which is new or has new entries, and then the new folder of each client and each host.

    Raises:
        StartError: one of them exists, a name is invalid, the daemon's secret key is not safe, or a file cannot be
            written, as on a full disk. Nothing was changed.
    """
    require_zmq("keygen")
    server = folder / "server"
    names: dict[Kind, list[str]] = {"client": list(dict.fromkeys(clients)), "host": list(dict.fromkeys(hosts))}
    try:
        if (folder / SERVER_SECRET).exists():
            raise StartError(f"{folder} is the daemon's own folder: give the one above, {folder.parent}")
        new = not (server / SERVER_SECRET).exists()
        if not new and not any(names.values()):
            raise StartError(
                f"{server} exists already. To add a client: penstock keygen {folder} --client NAME. "
                f"To add a host that joins: penstock keygen {folder} --host NAME"
            )
        if new and not names["client"]:
            names["client"] = [FIRST]
        _require_free(folder, names)
        with _AllOrNothing() as disk:
            if new:
                pair = _new_pair()
                disk.write(server / SERVER_SECRET, pair)
            else:
                pair = read_pair(server / SERVER_SECRET)
            return [server, *(_add(disk, folder, kind, name, pair.public) for kind in KINDS for name in names[kind])]
    except OSError as error:
        raise StartError(f"cannot write keys below {folder}: {error.strerror or error} ({error.filename})") from None


def _require_free(folder: Path, names: dict[Kind, list[str]]) -> None:
    """Raise StartError unless these names are valid, and neither a client nor a host has one of them."""
    for kind in KINDS:
        for name in names[kind]:
            if _NAME.fullmatch(name) is None:
                raise StartError(
                    f"--{kind} {name!r}: a name has 1 to 64 letters, digits, dots, dashes and underscores, and begins "
                    "with a letter or a digit"
                )
            if name in names["client"] and name in names["host"]:
                raise StartError(f"--client {name} and --host {name}: give each a name of its own, the log shows it")
            for taken in KINDS:
                places = folder / f"{taken}s" / name, folder / "server" / f"{taken}s" / f"{name}{SUFFIX}"
                for made in places:
                    if made.exists():
                        raise StartError(
                            f"{made} exists already: choose another name, or remove the old {taken}'s key first"
                        )


def _add(disk: _AllOrNothing, folder: Path, kind: Kind, name: str, server: bytes) -> Path:
    """Make the folder of a client or host, and then admit it. Return the folder."""
    pair, made = _new_pair(), folder / f"{kind}s" / name
    disk.write(made / secret_name(kind), pair)
    disk.write(made / SERVER, KeyPair(server, b""))
    disk.write(folder / "server" / f"{kind}s" / f"{name}{SUFFIX}", KeyPair(pair.public, b""))
    return made


def _new_pair() -> KeyPair:
    import zmq

    return KeyPair(*zmq.curve_keypair())


class _AllOrNothing:
    """Writes key files and their folders. If the `with` block fails, it removes everything that it made."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def __enter__(self) -> _AllOrNothing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for path in reversed(self._made) if kind is not None else ():
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()

    def write(self, path: Path, pair: KeyPair) -> None:
        """Write a ZeroMQ certificate that only this user can read, and make the folders above. Never overwrite one."""
        for place in reversed(path.parents):
            if not place.exists():
                place.mkdir(0o700)
                self._made.append(place)
        what = "secret: nobody else may read it" if pair.secret else "public"
        lines = [f"# A key of Penstock ({what}). See docs/security.md.", "metadata", "curve"]
        lines.append(f'    public-key = "{pair.public.decode()}"')
        if pair.secret:
            lines.append(f'    secret-key = "{pair.secret.decode()}"')
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._made.append(path)
        try:
            with open(fd, "w") as file:
                file.write("\n".join(lines) + "\n")
                file.flush()
                os.fsync(fd)  # some file systems notice only now that they are full
        except OSError as error:
            error.filename = path
            raise
