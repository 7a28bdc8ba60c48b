"""Checks that only this user and root can change a file, as sshd does for a list of keys (StrictModes).

Somebody who can write to a folder can replace everything in it, with other modes. So the check follows the path as the
kernel does, from the root: every folder and every symbolic link on the way belongs to this user or to root, and nobody
else can write there. Two exceptions cost no safety:

- Folders above, such as /tmp, may have the sticky bit: others can add entries there, but not replace those that belong
  to this user or root.
- A group may write if it is the owner's private group: it has the owner's name and no other members. With the umask of
  many systems, all folders of a user are like that. Root has no such group.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path
from typing import TypeAlias

from ..errors import StartError

MOST_LINKS = 40
"""Maximum number of symbolic links in a path, as in Linux."""

_Path: TypeAlias = str | os.PathLike[str]


def check_file(path: _Path, *, secret: bool = False) -> None:
    """Check that only this user and root can change a file; if it is `secret`, that others cannot read it either. Its
    group may read it.

    Raises:
        StartError: others can. The text says who, where, and what to do.
        OSError: the file does not exist, or a folder on the way cannot be searched.
    """
    status = _check_way(path)
    mode = stat.S_IMODE(status.st_mode)
    if secret and mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise StartError(
            f"{path} holds a secret key, and other users can read or change it (mode {mode:o}): chmod 600 {path}. If "
            "they may have read it, make other keys"
        )
    if who := _other_writer(status):
        raise StartError(f"{who} can change {path} (mode {mode:o}): chmod go-w {path}")


def check_folder(path: _Path) -> None:
    """Check that only this user and root can add files to a folder or remove some.

    Raises:
        StartError, OSError: as `check_file`.
    """
    status = _check_way(path)
    if (who := _other_writer(status)) and not _is_mounted_secret(path, status):
        raise StartError(f"{who} can change {path}, and so admit others: chmod 700 {path}")


def _check_way(path: _Path) -> os.stat_result:
    """Check each owner on the way to a path, and the modes of the folders above it. Return its status."""
    *above, (place, status) = _way(path)
    owners = _owners_above()
    for folder, found in above:
        _check_owner(folder, found, owners)
        if stat.S_ISDIR(found.st_mode) and not found.st_mode & stat.S_ISVTX and (who := _other_writer(found)):
            mode = f"{stat.S_IMODE(found.st_mode):o}"
            raise StartError(f"{who} can change {folder} (mode {mode}), and so replace {path}: chmod go-w {folder}")
    _check_owner(place, status, {0, os.geteuid()})
    return status


def _way(path: _Path) -> list[tuple[str, os.stat_result]]:
    """Return everything that the kernel passes to find a path, from the root to the file itself."""
    at, links = "/", 0
    way = [(at, os.stat(at))]
    todo = _names(os.path.join(os.getcwd(), path))
    while todo:
        name = todo.pop()
        if name == "..":
            at = os.path.dirname(at)
            continue
        found = os.path.join(at, name)
        way.append((found, os.lstat(found)))
        if not stat.S_ISLNK(way[-1][1].st_mode):
            at = found
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        target = os.readlink(found)
        at = "/" if target.startswith("/") else at
        todo += _names(target)
    if way[-1][0] != at:  # the path ends in ".."
        way.append((at, os.stat(at)))
    return way


def _names(path: str) -> list[str]:
    """Return the names in a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _check_owner(place: str, status: os.stat_result, owners: set[int]) -> None:
    if status.st_uid not in owners:
        raise StartError(
            f"{place} belongs to {_user(status.st_uid)}, who can change it: keys and the folders above them must "
            f"belong to {_user(os.geteuid())}, who runs this, or to root"
        )


def _other_writer(status: os.stat_result) -> str:
    """Return who besides the owner and root can write there, by the mode; "" if nobody can."""
    if status.st_mode & stat.S_IWOTH:
        return "every user of this host"
    if status.st_mode & stat.S_IWGRP and not is_private_group(status.st_gid, status.st_uid):
        return f"the group {_group(status.st_gid)}"
    return ""


def is_private_group(group: int, owner: int) -> bool:
    """Return whether a group is the private group of a user other than root."""
    try:
        user, found = pwd.getpwuid(owner), grp.getgrgid(group)
    except KeyError:
        return False
    own = user.pw_gid == group and found.gr_name == user.pw_name
    return owner != 0 and own and {*found.gr_mem} <= {user.pw_name}


def _is_mounted_secret(path: _Path, status: os.stat_result) -> bool:
    """Return whether a folder is the mount point of a Kubernetes secret: mode 1777, but root's, and mounted
    read-only."""
    read_only = os.statvfs(path).f_flag & os.ST_RDONLY
    return bool(read_only and status.st_uid == 0 and status.st_mode & stat.S_ISVTX)


def _owners_above() -> set[int]:
    """Return the users to whom folders and links may belong: this user and root.

    In a user namespace without root, such as Apptainer's, the kernel shows root as nobody.
    """
    owners = {0, os.geteuid()}
    try:
        mapped = Path("/proc/self/uid_map").read_text().splitlines()
        if not any(int(line.split()[0]) == 0 for line in mapped):
            owners.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    except (OSError, ValueError, IndexError):  # without /proc: no user namespace is known
        pass
    return owners


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
