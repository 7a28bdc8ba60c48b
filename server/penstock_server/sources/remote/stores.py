"""Object stores and web servers through obstore: what a file is, which files there are, and ranges of their bytes.

obstore reads credentials, regions and endpoints from the environment variables of each cloud, and from the instance on
which it runs. Its threads do not survive a fork: a process that was forked later would wait for ever.

A request that fails for a reason that may pass is repeated: a broken connection, a server that is too busy (429, 5xx),
or a body that ends early. A body goes on where it ended.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from penstock_proto import distribution

from . import urls

ATTEMPTS = 8
"""How often a request is made, at most."""

FIRST_ATTEMPTS = 3
"""How often this process tries to connect at first, when the name of the host may be wrong."""

SECONDS = 120.0
"""After this time no request is repeated."""

ONE_REQUEST = 30.0
"""Seconds after which one request has failed, however fast its bytes come. It goes on where it ended."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 8.0
"""Seconds before the first repetition, and before any. The pause doubles each time, and is chosen at random below."""

STALLED = 15.0
"""Seconds without a byte after which a request has failed."""

_CONNECTING = 5.0
_FRESH = 5.0
"""Seconds for which the facts about a file are believed, but not at the start of an epoch. Each answer to a later
request is compared with them."""

_AT_ONCE = 16
"""Files that are looked at together."""

_PIECE = 1 << 20

_PATIENT_FROM = 64 << 20
"""Bytes of an answer that may take longer than `ONE_REQUEST`: that of a server that sends only whole files."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_PASSING = (408, 425, 429, 500, 502, 503, 504)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Facts:
    """What tells a file from its earlier contents.

    Attributes:
        size: in bytes.
        stamp: its ETag or, if it has none, the time of its last change.
        is_etag: whether it has an ETag.
    """

    size: int
    stamp: str
    is_etag: bool

    @property
    def is_stamped(self) -> bool:
        """Whether they tell a file from earlier contents of the same size."""
        return self.stamp != _NEVER


class NoRanges(Exception):
    """The web server sends only whole files."""


class Changed(OSError):
    """A file is no longer the one that was looked at."""


class UnusableStore(OSError):
    """The environment does not say how to reach a store. The message names no URL."""


_NEVER = datetime.fromtimestamp(0, UTC).isoformat()
"""The time of the last change, of a server that does not say it."""

_known: dict[str, tuple[Facts, float]] = {}
_stores: dict[tuple[str, bool], Any] = {}
_reached = [False]
"""Whether this process has ever reached a store."""

_user: list[int] = []
"""The process that has begun to use obstore."""


def facts_of(url: str) -> Facts:
    """Return the facts about a file, which may be some seconds old.

    Raises:
        ImportError: obstore is not installed.
        OSError: there is no such file, or it cannot be reached; the message names it, and says what to do.
        ValueError: it is no URL that can be served.
    """
    found, when = _known.get(url, (None, 0.0))
    if found is None or time.monotonic() - when > _FRESH:
        found = _repeated(url, lambda: _looked_at(url))
        _known[url] = found, time.monotonic()
        _reached[:] = [True]
    return found


def look_at(files: list[str]) -> None:
    """Look at files again, several at a time. Errors come when `facts_of` is called for one."""
    for url in files:
        _known.pop(url, None)
    if len(files) > 1:
        _obstore(files[0])
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(_try_to_look, files))


def matching(pattern: str) -> list[str]:
    """Return the URLs of the files that match a pattern, sorted, and know the facts about them.

    Raises:
        OSError: the store cannot be reached; the message says what to do.
        ValueError: it is a web server, which has no list of files.
    """
    base, path = urls.base_and_path(pattern)
    if base.startswith(urls.WEB):
        raise ValueError(f"{pattern}: a web server has no list of its files: name them one by one")
    obstore, wanted = _obstore(pattern), urls.matcher(path)
    found: list[Any] = []

    folder, store = urls.fixed_part(path), _store(base)

    def listed() -> None:
        found.clear()
        if "**" not in path and "*" not in path.rpartition("/")[0]:  # pass over the folders in it
            parts = [obstore.list_with_delimiter(store, prefix=folder or None)["objects"]]
        else:
            parts = obstore.list(store, prefix=folder or None)
        for some in parts:
            found.extend(meta for meta in some if wanted.fullmatch(meta["path"]) and not meta["path"].endswith("/"))

    _repeated(pattern, listed)
    for meta in found:
        _known[f"{base}/{meta['path']}"] = _facts(meta), time.monotonic()
    return sorted(f"{base}/{meta['path']}" for meta in found)


def read(url: str, facts: Facts, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of a file from `start` to `stop`, in pieces of any size.

    Raises:
        Changed: the file has changed.
        NoRanges: the server cannot send a part of a file.
        OSError: they cannot be fetched; the message names the file, and says what to do.
    """
    obstore = _obstore(url)
    base, path = urls.base_and_path(urls.whole(url))
    at, attempts = start, Attempts(url)
    of_whole = not start and stop == facts.size
    in_parts, is_refused = not of_whole, False
    while at < stop:
        try:
            store = _store(base, patient=not in_parts and stop - start > _PATIENT_FROM)
            answer = obstore.get(store, path, options={"range": (at, stop)} if in_parts else {})
            if _facts(answer.meta) != facts:
                _known.pop(url, None)
                raise Changed(
                    f"{url} has changed: it had {facts.size} bytes and the stamp {facts.stamp} when it was listed, and "
                    f"now has {_facts(answer.meta).size} and {_facts(answer.meta).stamp}. A file must stay the same "
                    "while it is served: write new data to a new file, and start the daemon again"
                )
            passed = 0 if in_parts else at
            for piece in answer.stream(min_chunk_size=_PIECE):
                left_out = min(passed, len(piece))
                passed -= left_out
                at += len(piece) - left_out
                yield memoryview(piece)[left_out:]
            if at < stop:
                raise ConnectionError(f"the answer ended after {at - start} of {stop - start} bytes")
        except (Changed, GeneratorExit):
            raise
        except obstore.exceptions.NotSupportedError:
            if at == start or not of_whole:
                raise NoRanges(url) from None
            in_parts, is_refused = False, True  # the whole again, without what has been read
        except Exception as error:
            attempts.on_failed(error)
            in_parts = not is_refused


def directory_store(url: str) -> Any:
    """Return obstore's store for everything below a URL. It repeats no requests.

    Raises:
        ImportError, OSError, ValueError: as `facts_of`.
    """
    _obstore(url)
    urls.base_and_path(url)
    return _made(urls.whole(url).rstrip("/"))


def explained(url: str, error: Exception) -> OSError | None:
    """Return an error of obstore with what to do; None if it is not one of obstore, or of its store."""
    if isinstance(error, UnusableStore):
        return OSError(f"{url}: {error}")
    return _as_os_error(url, error, "") if type(error).__module__.partition(".")[0] == "obstore" else None


def _looked_at(url: str) -> Facts:
    obstore = _obstore(url)
    base, path = urls.base_and_path(urls.whole(url))
    store = _store(base)
    if base.startswith(urls.WEB):  # a signature is often good for GET, and not for HEAD
        try:
            return _facts(obstore.get(store, path, options={"range": (0, 1)}).meta)
        except obstore.exceptions.BaseError as error:  # no ranges, or no bytes
            if not isinstance(error, obstore.exceptions.NotSupportedError) and "status code: 416" not in str(error):
                raise
    return _facts(obstore.head(store, path))


def _try_to_look(url: str) -> None:
    with suppress(OSError, ValueError):
        facts_of(url)


def _facts(meta: Any) -> Facts:
    etag = meta["e_tag"]
    return Facts(int(meta["size"]), etag.strip('"') if etag else meta["last_modified"].isoformat(), bool(etag))


def _repeated(url: str, request: Callable[[], _T]) -> _T:
    attempts = Attempts(url)
    while True:
        try:
            return request()
        except (ImportError, ValueError):
            raise
        except Exception as error:
            attempts.on_failed(error)


class Attempts:
    """Counts the attempts of one request."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._count = 0
        self._began = time.monotonic()

    def on_failed(self, error: Exception) -> None:
        """Wait before the next attempt.

        Raises:
            OSError: there is none.
        """
        if isinstance(error, UnusableStore):
            raise OSError(f"{self._url}: {error}") from None
        self._count += 1
        passing = _may_pass(error)
        pause = random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**self._count))
        taken = time.monotonic() - self._began
        most = ATTEMPTS if _reached[0] or "kind: Connect" not in str(error) else min(ATTEMPTS, FIRST_ATTEMPTS)
        if not passing or self._count >= most or taken + pause > SECONDS:
            often = f" ({self._count} attempts in {taken:.0f} s)" if passing else ""
            raise _as_os_error(self._url, error, often) from None
        time.sleep(pause)


def _may_pass(error: Exception) -> bool:
    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return False
    if type(error).__name__ in _FINAL or _NO_CREDENTIALS.search(text):
        return False
    if "Content-Length Header missing" in text or _WRONG_REGION in text:
        return False
    status = _STATUS.search(text)
    return status is None or int(status[1]) in _PASSING


_FINAL = ("PermissionDeniedError", "UnauthenticatedError", "NotFoundError", "InvalidPathError", "PreconditionError")
_NO_CREDENTIALS = re.compile(
    r"Missing (AccessKeyId|SecretAccessKey)|//169\.254\.|//metadata\.google|TokenRequest|Unable to locate credentials"
)
_WRONG_REGION = "incorrectly configured region"


def _as_os_error(url: str, error: Exception, often: str) -> OSError:
    """Return an error that says what happened, and what to do."""
    text = str(error)
    found = _STATUS.search(text)
    status = int(found[1]) if found else 404 if isinstance(error, FileNotFoundError) else 0
    code = f" {name[1]}" if (name := _CODE.search(text)) else ""
    scheme = url.partition("://")[0]

    def said(what: str, advice: str) -> str:
        return f"{url}: {what}{f' ({status}{code})' if status else ''}{often}: {advice}"

    if _NO_CREDENTIALS.search(text):
        return PermissionError(f"{url}: no credentials were found: {_CREDENTIALS.get(scheme, _SIGNATURE)}")
    if status == 404:
        what = "no such file" if scheme in urls.WEB else "no such file, or no such bucket"
        return FileNotFoundError(said(what, f"correct the name{_or_endpoint(scheme)}"))
    if status in (401, 403):
        return PermissionError(said("access was denied", _CREDENTIALS.get(scheme, _SIGNATURE)))
    if scheme == "s3" and (_WRONG_REGION in text or status in (301, 307, 400)):
        return OSError(said("the request was refused", "is AWS_REGION the region of the bucket?"))
    if status in _PASSING:
        return OSError(said("the server is too busy, or fails", "use fewer workers, or try again later"))
    if status:
        return OSError(said("the request was refused", f"check the URL{_or_endpoint(scheme)}"))
    if "Content-Length Header missing" in text:
        return OSError(f"{url}: its server does not say how large it is: copy the file, or use another server")
    advice = f"is the network up, and the host{_name(scheme)} right?"
    return OSError(said(f"it cannot be read ({_reason(text)})", advice))


def _reason(text: str) -> str:
    """Return the innermost reason that obstore gives."""
    if "IncompleteBody" in text:
        return "the answer ended early"
    if "kind: Timeout" in text or "TimedOut" in text:
        return f"no answer for {STALLED:.0f} s, or not the whole in {ONE_REQUEST:.0f} s"
    if quoted := re.findall(r'(?:message|error): "([^"]+)"', text):
        return str(quoted[-1])
    return urls.without_secrets(text.partition("\n")[0])


_SIGNATURE = "has the URL's signature expired? Or does the server want a password, as in https://USER:PASSWORD@HOST/?"
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, or give the host a role) where the workers "
    "run, and AWS_REGION; for a public bucket AWS_SKIP_SIGNATURE=true",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS where the workers run, or give the host a service account that may read "
    "the bucket; for a public bucket GOOGLE_SKIP_SIGNATURE=true",
    **dict.fromkeys(
        ("az", "abfs", "abfss"), "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY where the workers run"
    ),
}


def _or_endpoint(scheme: str) -> str:
    return f", or AWS_ENDPOINT_URL ({endpoint})" if scheme == "s3" and (endpoint := _endpoint()) else ""


def _name(scheme: str) -> str:
    return " in AWS_ENDPOINT_URL" if scheme == "s3" and _endpoint() else ""


def _endpoint() -> str:
    return urls.without_secrets(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "")


def _obstore(url: str) -> Any:
    """Return the library.

    Raises:
        ImportError: it is not installed.
        OSError: this process was forked from one that had used it.
    """
    try:
        import obstore
        import obstore.exceptions
    except ImportError:
        raise ImportError(f"{url} is a URL, which needs obstore: {distribution.pip_install('urls')}") from None
    if not _user:
        _user.append(os.getpid())
    if _user[0] != os.getpid():
        raise OSError(
            f"{url}: the process from which this one was forked had read a URL, and connections do not survive that: "
            "read no URL before the fork, or start processes by spawn"
        )
    return obstore


def _store(base: str, *, patient: bool = False) -> Any:
    key = base, patient
    if key not in _stores:
        _stores[key] = _made(base, patient=patient)
    return _stores[key]


def _made(url: str, *, patient: bool = False) -> Any:
    from obstore import store

    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=_CONNECTING),
        "read_timeout": timedelta(seconds=STALLED),
        "timeout": timedelta(days=1) if patient else timedelta(seconds=ONE_REQUEST),
        "allow_http": not url.startswith("https://"),  # for an endpoint that is set so
        "user_agent": "penstock",
    }
    once: Any = {"max_retries": 0}
    scheme = url.partition("://")[0]
    if scheme in urls.WEB:
        return store.HTTPStore(url, client_options=client, retry_config=once)  # type: ignore[arg-type]
    more: dict[str, Any] = {}
    if scheme == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        if endpoint and not endpoint.startswith(tuple(f"{one}://" for one in urls.WEB)):
            raise UnusableStore(f"AWS_ENDPOINT_URL must be a URL, such as https://HOST:PORT, got {endpoint!r}")
        if endpoint:
            more["endpoint"] = endpoint
        if _has_profile():
            more["credential_provider"] = _of_profile()
    if scheme == "gs" and os.environ.get("GOOGLE_SKIP_SIGNATURE", "").lower() == "true":
        more["skip_signature"] = True
    make: Any = store.from_url  # its overloads know which store has which options
    try:
        return make(url, client_options=client, retry_config=once, **more)
    except Exception as error:
        why = urls.without_secrets(str(error).partition("\n")[0])
        what = "no credentials were found" if _NO_CREDENTIALS.search(why) else f"the store cannot be used ({why})"
        raise UnusableStore(f"{what}: {_CREDENTIALS.get(scheme, _SIGNATURE)}") from None


_OTHERS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")


def _has_profile() -> bool:
    """Return whether AWS credentials are those of a profile, which obstore does not read."""
    if any(os.environ.get(name) for name in _OTHERS) or any(name.startswith("AWS_CONTAINER_") for name in os.environ):
        return False
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials"
    return bool(os.environ.get("AWS_PROFILE")) or os.path.exists(file)


def _of_profile() -> Any:
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ImportError(
            "s3:// URLs: your credentials are those of an AWS profile, which only boto3 reads: pip install boto3, "
            "where the workers run, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    try:
        return Boto3CredentialProvider()
    except Exception as error:  # of botocore, such as ProfileNotFound
        raise UnusableStore(
            f"the AWS profile gives no credentials ({error}): correct AWS_PROFILE, or run aws configure or aws "
            "sso login where the workers run"
        ) from None
