"""A Zarr store at a URL, whose requests are repeated. Importing it imports zarr."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from zarr.storage import ObjectStore

from ..remote import stores, urls


class RemoteStore(ObjectStore[Any]):
    """A store at a URL."""

    def __init__(self, url: str) -> None:
        super().__init__(stores.directory_store(url), read_only=True)
        self._url = url

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return the bytes of a file of the store; None if there is none.

        Raises:
            OSError: it cannot be read; the message says what to do.
        """
        attempts = stores.Attempts(self._url)
        while True:
            try:
                return await super().get(key, prototype, byte_range)
            except Exception as error:
                attempts.on_failed(error)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:  # type: ignore[override]  # theirs is no coroutine
        """Yield the names in a folder of the store.

        Raises:
            OSError: they cannot be listed; the message says what to do.
        """
        try:
            async for name in super().list_dir(prefix):
                yield name
        except Exception as error:
            if self._url.startswith(urls.WEB):
                raise OSError(
                    f"{self._url}: its server does not list the arrays of the store: write them into one file with "
                    "zarr.consolidate_metadata(path)"
                ) from None
            raise stores.explained(self._url, error) or error from None
