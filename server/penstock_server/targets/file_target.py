"""Data files as arguments of `penstock serve`: a feed without a module.

The daemon names feeds to its workers by strings, MODULE:ATTR. A feed of data files becomes a string as well, "files:"
and JSON, which each worker turns into a `Feed`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from penstock_proto import StartError
from penstock_proto.params import shown_call

from .pickled import is_pickled_target, name_of

if TYPE_CHECKING:
    from ..feed.feed import Feed
    from ..sources.format import Format

_PREFIX = "files:"
_MOST = 100_000  # bytes of one argument: Linux allows 128 KiB


def is_file_target(target: str) -> bool:
    """Return whether `target` is a string from `make_target`."""
    return target.startswith(_PREFIX)


def make_target(files: Sequence[str], leaves: Sequence[str], *, name: str | None, **options: Any) -> str:
    """Return the string that describes a feed of these files.

    Args:
        files: paths, patterns or URLs for which `registry.format_of` finds a format.
        leaves: NAME=DATASET for each leaf of a dict, or DATASET for each leaf of a tuple. In other formats than HDF5,
            DATASET is an array, a column or an extension.
        name: the feed's name; by default that of the first file without its suffix.
        options: options of the constructor, such as `batch_size`; those that are None are left out.

    Raises:
        ValueError: the arguments contradict each other; the message says what to do.
    """
    from ..sources import registry  # it imports NumPy, which those who only show targets do not need
    from ..sources.remote import urls

    files = [urls.shown(file) for file in files]
    found = _format_of(files)
    if found.needs_module:
        raise ValueError(found.needs_module.replace("FILE", files[0]))
    if options.get("batch_size") is None:
        raise ValueError(f"{files[0]} is a data file, and needs --batch-size, such as --batch-size 32")
    if not leaves and found.needs_leaves():
        tar = found.constructor == "from_webdataset"
        what, example = ("EXTENSION", "image=jpg") if tar else ("DATASET", "image=images")
        raise ValueError(
            f"{files[0]} is {found.name}, and needs --leaf NAME={what} for each leaf of a sample, such as --leaf "
            f"{example}: penstock peek {files[0]} proposes them"
        )
    if options.get("rows") is not None and not found.takes("rows"):
        have = " and ".join(one.name for one in registry.BUILT_IN if one.takes("rows"))
        raise ValueError(f"--rows is for {have} files: divide {files[0]} and the others by file")
    for option, of in (("size", "folders of images, and CSV files that name images"), ("images", "CSV files")):
        if options.get(option) is not None and not found.takes(option):
            raise ValueError(f"--{option} is for {of}, and {files[0]} is {found.name}: leave it out")
    call = {
        "format": found.name,
        "library": found.library,
        "files": [urls.whole(file) for file in files],
        "leaves": _structure(leaves),
        "name": name or _name_of(files[0]),
        **{key: value for key, value in options.items() if value not in (None, ())},
    }
    target = _PREFIX + json.dumps(call)
    if len(target.encode()) > _MOST:
        raise ValueError(
            f"the names of these {len(files)} files are too long for one command: quote the pattern ('data/*.h5'), and "
            "the daemon finds the files itself"
        )
    return target


def _format_of(files: Sequence[str]) -> Format:
    from ..sources import registry

    formats: dict[Format, str] = {}
    for file in files:
        found = registry.format_of(file)
        assert found is not None
        formats.setdefault(found, file)
    if len(formats) > 1:
        have = " and ".join(f"{file} is {one.name}" for one, file in formats.items())
        raise ValueError(f"the files of a feed have one format, and {have}: serve each with a daemon of its own")
    return next(iter(formats))


def load_target(target: str, load_function: Callable[[str], Any]) -> Feed:
    """Make the feed that `target` describes. `load_function` loads its transforms from MODULE:FUNCTION.

    Raises:
        StartError: an option cannot work, or a transform cannot be loaded.
    """
    from ..feed.feed import Feed  # the daemon itself makes no feeds, only its workers do

    call = _call(target)
    if "transform" in call:
        call["transform"] = [load_function(name) for name in call["transform"]]
    files, leaves = call.pop("files"), call.pop("leaves")
    del call["library"]
    if isinstance(leaves, list):
        leaves = leaves[0] if len(leaves) == 1 else tuple(leaves)
    for name in ("rows", "size"):
        if name in call:
            call[name] = tuple(call[name])
    try:
        feed: Feed = Feed.from_files(files, leaves, **call)
    except (TypeError, ValueError) as error:
        raise StartError(f"cannot serve {shown_target(target)}: {error}") from error
    return feed


def shown_target(target: str) -> str:
    """Return a target as messages show it: the first file's name, or MODULE:ATTR, with the parameters if it has any."""
    if is_pickled_target(target):
        return f"the feed {name_of(target)} of the trainer"
    if not is_file_target(target):
        return shown_call(target)
    from ..sources.remote import urls

    return urls.shown(_call(target)["files"][0])


def library_of(target: str) -> str:
    """Return the name of the module that reads the files of `target` and can be imported before workers are forked."""
    return str(_call(target)["library"])


def files_of(target: str) -> list[str]:
    """Return the paths, patterns and URLs of `target`."""
    return list(_call(target)["files"])


def transforms_of(target: str) -> list[str]:
    """Return the transforms of `target`, as MODULE:FUNCTION."""
    return list(_call(target).get("transform", ()))


def _call(target: str) -> dict[str, Any]:
    return dict(json.loads(target.removeprefix(_PREFIX)))


def _structure(leaves: Sequence[str]) -> dict[str, str] | list[str] | None:
    if not leaves:
        return None
    pairs = [leaf.partition("=") for leaf in leaves]
    named = {bool(equals) for _, equals, _ in pairs}
    if len(named) > 1:
        raise ValueError("--leaf is either NAME=DATASET for all leaves (a dict) or DATASET for all (a tuple)")
    if named == {False}:
        return list(leaves)
    found: dict[str, str] = {}
    for name, _, dataset in pairs:
        if not name or not dataset:
            raise ValueError(f"--leaf must be NAME=DATASET, such as --leaf image=images, got {name}={dataset}")
        if name in found:
            raise ValueError(f"--leaf {name} is given twice: each leaf needs a name of its own")
        found[name] = dataset
    return found


def _name_of(file: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "", PurePosixPath(file).stem).strip("-_.")
    return name[:128] or "data"
