"""Parameters of a feed's factory, as a part of the target that names it: `scenes.py:make?{"size": 128}`.

Users see them as `scenes.py:make(size=128)`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

_WITH_PARAMS = re.compile(r"(?P<target>.+?:[^\W\d]\w*)\?(?P<params>\{.*\})", re.DOTALL)

SENT = "<object>:"
"""What the target of a feed begins with that the trainer sends to its workers as a pickle."""

MOST = 64 * 1024
"""Most bytes of a target with its parameters. They are a word of command lines, and Linux allows 128 KiB."""


def with_params(target: str, params: Mapping[str, Any]) -> str:
    """Return the target of a factory with these parameters.

    Raises:
        TypeError: a name is no text, or JSON cannot hold a value.
        ValueError: they are too large.
    """
    for name, value in params.items():
        try:
            if not isinstance(name, str):
                raise TypeError(f"a name must be text, got {name!r:.80}")
            json.dumps(value, default=os.fspath, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"params={{{name!r:.80}: ...}}: values are numbers, text, paths, True, False, None, or lists and dicts "
                f"of them, as workers get them as JSON ({error}): pass a name or a path, and make the object in the "
                "factory"
            ) from None
    whole = f"{target}?{json.dumps(dict(params), default=os.fspath, sort_keys=True)}"
    if len(whole.encode(errors="surrogatepass")) > MOST:
        raise ValueError(f"params= may take {MOST} bytes: put what is larger into a file, and pass its path")
    return whole


def split_params(target: str) -> tuple[str, dict[str, Any] | None]:
    """Return the target without parameters, and the parameters, or None if it has none."""
    match = _WITH_PARAMS.fullmatch(target)
    return (target, None) if match is None else (match["target"], json.loads(match["params"]))


def shown_call(target: str) -> str:
    """Return a target as messages show it."""
    if target.startswith(SENT):
        return f"the feed {target.removeprefix(SENT)}"
    name, params = split_params(target)
    return name if params is None else f"{name}({', '.join(f'{key}={value!r}' for key, value in params.items())})"
