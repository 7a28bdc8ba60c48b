"""The environment variables of worker processes: from the defaults, the daemon, the feeds, and the command line.

Many workers run on one machine, so each gets one thread in every library, and no GPU, which is for the trainer. These
defaults override the daemon's own environment, because a batch system or a trainer sets such variables for itself.
`Feed(env=)` overrides the defaults, and `penstock serve --env` overrides both.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from penstock_proto import StartError
from penstock_proto.messages import Environment
from penstock_proto.text import is_unicode

DEFAULTS: dict[str, str | None] = {
    **dict.fromkeys(
        (
            "OMP_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "MKL_NUM_THREADS",
            "BLIS_NUM_THREADS",
            "VECLIB_MAXIMUM_THREADS",
            "NUMEXPR_NUM_THREADS",
            "NUMEXPR_MAX_THREADS",
            "NUMBA_NUM_THREADS",
            "OPENCV_FOR_THREADS_NUM",
            "POLARS_MAX_THREADS",
            "RAYON_NUM_THREADS",
            "BLOSC_NTHREADS",
            "TF_NUM_INTRAOP_THREADS",
            "TF_NUM_INTEROP_THREADS",
        ),
        "1",
    ),
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "JAX_PLATFORMS": "cpu",
    "OPENCV_OPENCL_RUNTIME": "disabled",
}
"""Variables that workers get unless a feed or the command line says otherwise."""

MOST_BYTES = 64 * 1024
"""Most bytes that the variables of all feeds may take."""

OPTIONS = "PENSTOCK_SERVE_"
"""Variables with this prefix set options of `penstock serve`. They are for this daemon, not for one that user code
starts."""

_STARTED_WITH = "PENSTOCK_ENVIRONMENT"
"""The variable that tells a worker about the environment it was started with: the names that the command line sets, and
a digest."""


def checked(environment: Any, option: str) -> Environment:
    """Return a checked copy of `environment`, which the user gave as `option`.

    Raises:
        TypeError: it is not a dict of text.
        ValueError: a name is impossible, or reserved for Penstock.
    """
    if environment is None:
        return {}
    if not isinstance(environment, Mapping):
        raise TypeError(f'{option} must be a dict such as {{"OMP_NUM_THREADS": "4"}}, got {environment!r}')
    for name, value in environment.items():
        if not isinstance(name, str) or not isinstance(value, str | None):
            raise TypeError(
                f"{option} must have text as names and values (None removes a variable), got {name!r}: {value!r}"
            )
        text = name + (value or "")
        if not name or "=" in name or "\0" in text or not is_unicode(text) or len(name) > 256:
            raise ValueError(f"{option} has a variable that no environment can hold: {name[:80]!r}")
        if name == "PYTHONHASHSEED" or name.startswith("PENSTOCK_"):
            raise ValueError(f"{option} cannot set {name}: Penstock needs its own value there")
    _check_size(environment, option)
    return dict(environment)


def merged(feeds: Iterable[tuple[str, Environment]]) -> Environment:
    """Return the combined variables of all feeds. `feeds` has the name and the variables of each.

    Raises:
        StartError: two feeds want different values of one variable.
    """
    result: Environment = {}
    owners: dict[str, str] = {}
    for feed, environment in feeds:
        for name, value in environment.items():
            if result.setdefault(name, value) != value:
                raise StartError(
                    f"feeds {owners[name]} and {feed} want different values of {name} in their workers, "
                    f"{_shown(result[name])} and {_shown(value)}, and the feeds of one daemon share its workers: give "
                    "both the same env=, serve them with two daemons, or set it for all with penstock serve --env"
                )
            owners.setdefault(name, feed)
    try:
        _check_size(result, "env= of all feeds together")
    except ValueError as error:
        raise StartError(str(error)) from None
    return result


def of_workers(feeds: Environment, serve: Environment) -> dict[str, str]:
    """Return the whole environment of workers, from the variables of their feeds and those of the command line
    (`serve`)."""
    wanted = {"PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"), **DEFAULTS, **feeds, **serve}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OPTIONS)}
    result = {name: value for name, value in {**inherited, **wanted}.items() if value is not None}
    result[_STARTED_WITH] = json.dumps([sorted(serve), _digest(feeds, serve)])
    return result


def missing(feeds: Iterable[tuple[str, Environment]]) -> Environment | None:
    """Return the combined variables of the feeds if this process, a worker, was not started with them. Return None
    otherwise.

    Raises:
        StartError: two feeds want different values of one variable that the command line does not set.
    """
    names, digest = json.loads(os.environ.get(_STARTED_WITH) or json.dumps([[], _digest({}, ())]))
    wanted = merged(
        (feed, {name: value for name, value in environment.items() if name not in names}) for feed, environment in feeds
    )
    return None if _digest(wanted, names) == digest else wanted


def _digest(feeds: Environment, serve: Iterable[str]) -> str:
    others = sorted((name, value) for name, value in feeds.items() if name not in set(serve))
    return hashlib.sha256(json.dumps(others).encode()).hexdigest()


def _check_size(environment: Mapping[str, str | None], option: str) -> None:
    nbytes = sum(len(f"{name}={value or ''}".encode()) for name, value in environment.items())
    if nbytes > MOST_BYTES or any(len((value or "").encode()) > 16384 for value in environment.values()):
        raise ValueError(
            f"{option} takes {nbytes} bytes; a variable can have 16384, and all together {MOST_BYTES}: put long values "
            "into a file, and its path into the variable"
        )


def _shown(value: str | None) -> str:
    return "no value" if value is None else repr(value[:80])
