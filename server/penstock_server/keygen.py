"""Makes keys for a daemon and its clients: `penstock keygen`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import click

from penstock_proto import StartError
from penstock_proto.keys import SECRET as CLIENT_SECRET
from penstock_proto.keys import SERVER, KeyPair, read_pair, require_zmq

from .keys import SECRET, SUFFIX

FIRST = "trainer"
"""Name of the first client, if none is given."""

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
def keygen(folder: Path, clients: tuple[str, ...]) -> None:
    """Make keys for a daemon and its clients, or for further clients.

    Existing files are never overwritten. The log and the status call a client by the name of its key.

    \b
    Examples:
      penstock keygen keys                  # keys/server for the daemon, keys/clients/trainer for trainers
      penstock serve scenes:feed --bind tcp://0.0.0.0:5555 --keys keys
      penstock status tcp://loader:5555 --keys keys/clients/trainer
      penstock keygen keys --client alice   # then: kill -HUP PID
    """  # noqa: D301
    server, *made = generate(folder, clients)
    click.echo(f"{server}  for the daemon: penstock serve ... --keys {folder}")
    for client in made:
        click.echo(f'{client}  for a client, copy it there: penstock.connect(url, keys="{client}")')
    if clients:
        click.echo("A daemon that runs already admits new clients after `kill -HUP PID`.")


def generate(folder: Path, clients: Iterable[str] = ()) -> list[Path]:
    """Make a daemon's keys, unless `folder` has them already, and those of clients.

    Args:
        folder: where the keys are, or will be.
        clients: names of new clients; none: `FIRST`, with the daemon's keys.

    Returns:
        The folders that were made or, of the daemon, changed: the daemon's, then one for each client.

    Raises:
        StartError: one of them exists, a name is not possible, or a folder cannot be written. Nothing was changed.
    """
    require_zmq("keygen")
    server, names = folder / "server", list(dict.fromkeys(clients))
    new = not (server / SECRET).exists()
    if not new and not names:
        raise StartError(f"{server} exists already. To add a client: penstock keygen {folder} --client NAME")
    names = names or [FIRST]
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise StartError(
                f"--client {name!r}: a name has 1 to 64 letters, digits, dots, dashes and underscores, and begins with "
                "a letter or a digit"
            )
        for made in (folder / "clients" / name, server / "clients" / f"{name}{SUFFIX}"):
            if made.exists():
                raise StartError(f"{made} exists already: choose another name, or remove the old client's key first")
    try:
        if new:
            pair = _new_pair()
            _folder(server)
            _write(server / SECRET, pair)
        else:
            pair = read_pair(server / SECRET)
        return [server, *(_add_client(folder, name, pair.public) for name in names)]
    except OSError as error:
        raise StartError(f"cannot write keys below {folder}: {error.strerror or error} ({error.filename})") from None


def _add_client(folder: Path, name: str, server: bytes) -> Path:
    """Make a client's folder, and then admit it. Return the folder."""
    pair, made = _new_pair(), folder / "clients" / name
    _folder(made)
    try:
        _write(made / CLIENT_SECRET, pair)
        _write(made / SERVER, KeyPair(server, b""))
        _folder(folder / "server" / "clients")
        _write(folder / "server" / "clients" / f"{name}{SUFFIX}", KeyPair(pair.public, b""))
    except BaseException:
        shutil.rmtree(made)
        raise
    return made


def _new_pair() -> KeyPair:
    import zmq

    return KeyPair(*zmq.curve_keypair())


def _folder(path: Path) -> None:
    """Make a folder that only this user can use, and those above it."""
    for place in (*reversed(path.parents), path):
        if not place.exists():
            place.mkdir(0o700)


def _write(path: Path, pair: KeyPair) -> None:
    """Write a ZeroMQ certificate that only this user can read. Never overwrite one."""
    what = "secret: nobody else may read it" if pair.secret else "public"
    lines = [f"# A key of Penstock ({what}). See docs/security.md.", "metadata", "curve"]
    lines.append(f'    public-key = "{pair.public.decode()}"')
    if pair.secret:
        lines.append(f'    secret-key = "{pair.secret.decode()}"')
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write("\n".join(lines) + "\n")
