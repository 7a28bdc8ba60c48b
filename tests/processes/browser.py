"""A headless Chromium, driven by the DevTools protocol over a pipe. It needs no port and no other package.

The protocol: https://chromedevtools.github.io/devtools-protocol/. Messages are JSON, each followed by a NUL.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
"""The path of Chromium, or None if it is not installed."""

_OPTIONS = (
    "--headless=new --no-first-run --no-default-browser-check --disable-background-networking --disable-sync "
    "--disable-component-update --disable-default-apps --disable-extensions --disable-gpu --disable-dev-shm-usage "
    "--no-sandbox --mute-audio --metrics-recording-only --remote-debugging-pipe"
).split()

PATIENCE = 60.0


class Page:
    """One tab.

    Attributes:
        said: warnings and errors that scripts wrote to the console, exceptions, and violations of the CSP.
        requests: the URLs that the tab requested.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.said: list[str] = []
        self.requests: list[str] = []
        browser.pages[self._session] = self
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol for this tab."""
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        """Open a URL."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise. The value must be JSON."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        end = time.monotonic() + PATIENCE
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}\n{self.run('document.body.innerText')}\n{self.said}"
            time.sleep(0.1)
        return value

    def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and whether the system prefers dark colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=media)

    def move_to(self, x: float, y: float) -> None:
        """Move the pointer to these coordinates."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Write a PNG file of what the window shows."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def heard(self, method: str, params: Any) -> None:
        """Handle an event of the protocol."""
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.said.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.said.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.said.append(json.dumps(params["entry"]))


class Browser:
    """A Chromium process, which `browser` starts.

    Attributes:
        pages: its tabs by session.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", shell, "bash", *command],
                pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(folder)},
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self.pages: dict[str, Page] = {}
        self._log = folder / "log"
        self._ids = itertools.count(1)
        self._rest = b""

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Call a method, and return its result. Pass events that come meanwhile to their tabs."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        for answer in self._messages():
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if "method" in answer and answer.get("sessionId") in self.pages:
                self.pages[answer["sessionId"]].heard(answer["method"], answer["params"])
        raise AssertionError("never here")

    def _messages(self) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + PATIENCE
        while True:
            while b"\0" in self._rest:
                data, _, self._rest = self._rest.partition(b"\0")
                yield json.loads(data)
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, f"Chromium says nothing: {self._log.read_text(errors='replace')[-2000:]}"
            self._rest += data

    def close(self) -> None:
        """End Chromium with all its processes."""
        try:
            self.call("Browser.close")
        except (AssertionError, OSError):
            self.process.kill()
        finally:
            self.process.wait(30)
            os.close(self._in)
            os.close(self._out)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a Chromium that keeps its files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = Browser(folder)
    try:
        yield found
    finally:
        found.close()
