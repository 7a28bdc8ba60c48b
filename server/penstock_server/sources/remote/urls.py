"""URLs of files: which are served, their patterns, and their secrets, which nobody is shown.

A URL may hold a password, or a signature in its query. Messages, splits and the status have the URL without these.
What was left out stays in this process, for the request.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

WEB = ("http", "https")
STORES = ("s3", "gs", "az", "abfs", "abfss")

BY_NAME = "local://"
"""Before the path of a local file whose cached splits are found by this name alone, whatever folder and time."""

_SECRET: dict[str, str] = {}
"""The whole URL, by the one that is shown."""

_SIGNING = re.compile(
    "(x-amz-|x-goog-).*|awsaccesskeyid|googleaccessid|key-pair-id|policy|expires|signature|(access_)?token"
    "|sig|s[a-z]|spr|srt|sk[a-z]|skoid|sktid",
    re.IGNORECASE,
)
"""The parameters with which clouds sign a URL. They do not say which file it is."""

_ELSEWHERE = re.compile(r"(\w[\w+.-]*://)(?:[^/\s@]*@)?([^\s?\"']*)(?:\?[^\s\"')]*)?")


class Shown(str):
    """A URL without its secrets. A copy in another process knows them, too."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the whole URL."""
        return shown, (whole(self),)


def is_url(file: str) -> bool:
    """Return whether a file is read as those of other hosts are: as a stream, and not mapped."""
    return "://" in file or "::" in file


def is_remote(file: str) -> bool:
    """Return whether a file is not on this host."""
    return is_url(file) and not file.startswith(BY_NAME)


def shown(file: str) -> str:
    """Return a URL without its password and its query, and keep the whole of it. Other names stay as they are.

    A query that may say which file it is (`?id=5`) is replaced by a digest, so that other files have other names.
    """
    if file in _SECRET:
        return Shown(file)
    if file.partition("://")[0].lower() not in WEB:
        return file
    parts = urlsplit(file)
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    if plain == file:
        return file
    if names := [pair for pair in parse_qsl(parts.query, keep_blank_values=True) if not _SIGNING.fullmatch(pair[0])]:
        plain += f"?{hashlib.sha256(repr(names).encode()).hexdigest()[:8]}"
    _SECRET[plain] = file
    return Shown(plain)


def without_query(name: str) -> str:
    """Return the URL of a file on a web server without its query; other names stay as they are."""
    return name.partition("?")[0] if name.lower().startswith(tuple(f"{scheme}://" for scheme in WEB)) else name


def whole(file: str) -> str:
    """Return a URL with its secrets."""
    return _SECRET.get(file, str(file))


def without_secrets(text: str) -> str:
    """Return a text with the URLs in it shortened to what may be shown."""
    return _ELSEWHERE.sub(r"\1\2", text)


def base_and_path(url: str) -> tuple[str, str]:
    """Return the URL of a store, with the query of a web server's URL, and the path of a file in it. It is "" if the
    URL is that of the file.

    Raises:
        ValueError: it is no URL that can be served; the message says what to write.
    """
    scheme, _, rest = url.partition("://")
    if "::" in scheme:
        chain = scheme.rpartition("::")[0]
        raise ValueError(f"{url}: write it without {chain}::, as Penstock keeps local copies itself (--file-cache)")
    scheme = scheme.lower()
    if scheme == "hf":
        raise ValueError(f"{url}: write https://huggingface.co/datasets/USER/NAME/resolve/main/FILE in its place")
    if scheme not in (*STORES, *WEB):
        raise ValueError(
            f"{url}: {scheme}:// is not served. These are: {', '.join(f'{one}://' for one in (*STORES, *WEB))}. Other "
            "storage has to be mounted, or copied"
        )
    if scheme in WEB:
        parts = urlsplit(url)
        folder, _, name = parts.path.rpartition("/")
        if "/" in unquote(name):  # obstore would ask for two names
            return parts._replace(fragment="").geturl(), ""
        return parts._replace(path=folder or "/", fragment="").geturl(), unquote(name)
    host, _, path = rest.partition("/")
    if not host:
        raise ValueError(f"{url}: the bucket is missing: {scheme}://BUCKET/PATH")
    return f"{scheme}://{host}", path


def has_pattern(file: str) -> bool:
    """Return whether a URL stands for several files."""
    return "*" in file


def fixed_part(path: str) -> str:
    """Return the folder in which the files of a pattern are, and those in folders below it."""
    return path.partition("*")[0].rpartition("/")[0]


def matcher(pattern: str) -> re.Pattern[str]:
    """Return what matches the paths that a pattern stands for: `*` within a folder, `**` in folders of any depth."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    parts = re.split(r"(\*\*/|\*\*|\*)", pattern)
    return re.compile("".join(words[part] if part in words else re.escape(part) for part in parts))
