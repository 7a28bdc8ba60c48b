"""The web page of `penstock serve --http` in a real browser, and its requests to the daemon."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto import GeneratorError
from penstock_server.http.files import files
from tests.conftest import Daemon, Serve
from tests.http.test_http import address, get, wait_until
from tests.http.test_preview import reader
from tests.processes.browser import CHROMIUM, Page, browser

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)")

HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"

FEEDS = f"""
    import time
    import numpy as np
    from penstock_server import DROP, Feed

    HOSTILE = {HOSTILE!r}

    def pictures(split):
        for number in range(50):
            time.sleep(0.005)
            image = np.zeros((20, 30, 3), np.uint8)
            image[number % 20, :, 0] = 250
            image[:, number % 30, 1] = 100 + number
            image[..., 2] = number
            yield {{"image": image, "number": number, "text": HOSTILE, HOSTILE: number}}

    def failing(split):
        yield 1.5
        raise RuntimeError(HOSTILE)

    pictures = Feed(pictures, splits=[f"{{HOSTILE}} {{number}}" for number in range(100)], batch_size=4)
    hostile = Feed(failing, splits=[HOSTILE], batch_size=1)
    dropping = Feed(
        lambda split: iter(range(6)), splits=[0, 1], batch_size=4, epochs=1, transform=lambda x: DROP if x > 3 else x
    )
"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A tab of a new browser."""
    with browser(tmp_path / "browser") as found:
        yield Page(found)


def show(page: Page, daemon: Daemon, rows: int = 2) -> str:
    """Open the daemon's page, in a window that shows all of it, and wait until the table of workers has its rows."""
    host, port = address(daemon)
    page.screen(1280, 2000)
    page.open(f"http://{host}:{port}/")
    page.until(f"document.querySelectorAll('#worker-rows tr').length === {rows}")
    return f"http://{host}:{port}/"


@needs_chromium
def test_the_page_shows_what_happens_and_asks_no_other_host(serve: Serve, page: Page) -> None:
    daemon = serve(FEEDS, "pictures", http=0)
    with reader(daemon.url):
        here = show(page, daemon)
        rate = "Number(document.querySelectorAll('#tiles strong')[1].textContent)"
        first = page.until(rate)
        page.until(f"{rate} !== {first}")  # the figures change
        page.until(
            "[...document.querySelectorAll('#worker-rows tr')].every((row) => /MiB/.test(row.children[3].textContent))"
        )
        page.until("/workers' memory\\s+[0-9.]+ MiB/.test(document.getElementById('tiles').innerText)")

        verdict = page.until(
            "document.querySelector('.consumer p:last-child')?.textContent.match(/^The generator is.*/)?.[0]"
        )
        top = [sys.executable, "-m", "penstock_command", "top", daemon.url, "--json", "--every", "0.5"]
        (consumer,) = json.loads(subprocess.run(top, capture_output=True, check=True, timeout=60).stdout)["consumers"]
        assert re.sub(r"[0-9.,]+", "N", verdict) == re.sub(r"[0-9.,]+", "N", consumer["verdict"])

        page.until("document.querySelectorAll('#preview figure img').length >= 4")
        samples = page.run(PIXELS)
        assert len(samples) >= 4
        for sample in samples:
            assert np.array_equal(np.array(sample["pixels"], np.uint8), picture(int(sample["number"])))

        blue = page.until(f"({TIMELINE})('generating')")
        page.move_to(blue["x"], blue["y"])
        tip = page.until("!document.getElementById('tip').hidden && document.getElementById('tip').innerText")
        assert re.search(r"worker \d+: .* \d+'\n\d\d:\d\d:\d\d\.\d, (at least )?[0-9.]+ s\ngenerating \d+ %", tip), tip

        daemon.workers()[0].kill()
        page.until(
            "[...document.querySelectorAll('#worker-rows tr')].some((row) => row.children[4].textContent === '1')"
        )
        page.until("document.getElementById('notice-list').innerText.includes('was killed by SIGKILL')")
        page.until(f"({TIMELINE})('down')")
    assert not page.said
    assert page.requests
    for url in page.requests:
        assert url.startswith((here, "data:image/png;base64,")), url


@needs_chromium
def test_the_page_says_what_was_left_out(serve: Serve, page: Page) -> None:
    daemon = serve(FEEDS, "pictures", "dropping", http=0)
    show(page, daemon)
    assert page.until("document.getElementById('left-out').hidden")
    with penstock.connect(daemon.urls["dropping"]) as connection:
        assert len(list(connection.batches())) == 2
    page.until("document.getElementById('left-out').textContent === 'Left out of dropping: 4 samples dropped'")


@needs_chromium
def test_text_of_user_code_is_shown_as_text(serve: Serve, page: Page) -> None:
    daemon = serve(FEEDS, "pictures", "hostile", http=0)
    with reader(daemon.urls["pictures"]):
        with penstock.connect(daemon.urls["hostile"]) as connection:
            with pytest.raises(GeneratorError):
                list(connection.batches())
        show(page, daemon)
        page.until(f"document.getElementById('notice-list').innerText.includes({json.dumps(HOSTILE)})")
        page.until(f"document.getElementById('samples').innerText.includes({json.dumps(HOSTILE)})")
        page.until(f"document.getElementById('leaves').innerText.includes({json.dumps(HOSTILE)})")
        page.until("document.getElementById('worker-rows').innerText.includes('<img src=x')")
        page.run("[...document.querySelectorAll('details')].forEach((one) => (one.open = true))")
        assert "raise RuntimeError(HOSTILE)" in page.run("document.querySelector('#notice-list pre').textContent")
    assert page.run("typeof window.hacked") == "undefined"
    assert page.run("document.querySelectorAll('script').length") == 2
    assert page.run("document.querySelectorAll('img[src=x]').length") == 0
    page.said.clear()
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hacked=1>'), 0")
    policy = "Content Security Policy"  # the second line of defence: it forbids the script
    wait_until(lambda: page.run("0") == 0 and policy in "".join(page.said))
    assert page.run("typeof window.hacked") == "undefined"


@needs_chromium
def test_the_page_fits_a_phone_and_errors_come_before_the_workers(serve: Serve, page: Page) -> None:
    daemon = serve(FEEDS, "pictures", http=0, workers=12)
    with reader(daemon.url):
        show(page, daemon, rows=12)
        page.until(f"({TIMELINE})('generating')")
        for width in (390, 1400):
            page.screen(width, 900)
            page.until(f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}")
            assert page.run(CUT_OFF) == []
    assert page.run("document.getElementById('notices').getBoundingClientRect().bottom") <= page.run(
        "document.getElementById('workers').getBoundingClientRect().top"
    )


CUT_OFF = """[...document.querySelectorAll("main *, header *")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => one.outerHTML.slice(0, 100))"""
"""JavaScript that finds what ends beyond the right border of the window."""


@needs_chromium
def test_readiness_is_that_of_feeds_that_somebody_reads(serve: Serve, page: Page) -> None:
    daemon = serve(FEEDS, "pictures", http=0)
    tile = "document.querySelector('#tiles strong').textContent"
    with reader(daemon.url):
        show(page, daemon)
        page.until(f"/%/.test({tile})")
    page.until(f"{tile} === '-'")
    assert page.run("document.getElementById('state').textContent") == "serving"
    assert page.run("document.querySelector('#tiles .tile').dataset.state") == ""


@needs_chromium
def test_the_page_begins_again_when_another_daemon_takes_over_in_the_same_process(serve: Serve, page: Page) -> None:
    daemon = serve(FEEDS, "pictures", http=0, words=("--reload",))
    show(page, daemon)
    page.run("window.drawn = 1")
    (module,) = daemon.folder.glob("*.py")
    module.write_text(module.read_text() + "\n")
    page.until("window.drawn === undefined && document.querySelectorAll('#worker-rows tr').length === 2")
    assert f"pid {daemon.process.pid}," in page.run("document.getElementById('about').textContent")


PIXELS = """[...document.querySelectorAll('#preview figure')].map((figure) => {
  const image = figure.querySelector("img");
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d", {willReadFrequently: true});
  context.drawImage(image, 0, 0);
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const pixels = [];
  for (let y = 0; y < canvas.height; y++) {
    const row = [];
    for (let x = 0; x < canvas.width; x++) {
      const at = 4 * (y * canvas.width + x);
      row.push([...data.slice(at, at + 3)]);
    }
    pixels.push(row);
  }
  return {pixels, number: figure.querySelector("figcaption code").textContent};
})"""

TIMELINE = """(name) => {
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  probe.fillRect(0, 0, 1, 1);
  const [red, green, blue] = probe.getImageData(0, 0, 1, 1).data;
  for (const canvas of document.querySelectorAll("canvas.time")) {
    [probe.canvas.width, probe.canvas.height] = [canvas.width, canvas.height];
    probe.drawImage(canvas, 0, 0);
    const y = canvas.height - 3;
    const data = probe.getImageData(0, y, canvas.width, 1).data;
    for (let x = canvas.width - 3; x >= 0; x--) {
      if (data[4 * x] === red && data[4 * x + 1] === green && data[4 * x + 2] === blue) {
        const box = canvas.getBoundingClientRect();
        return {x: box.left + x + 0.5, y: box.top + y};
      }
    }
  }
  return null;
}"""
"""JavaScript that finds a place where a worker's timeline has the colour of this name."""


def picture(number: int) -> Any:
    """Return the image that the feed makes."""
    image = np.zeros((20, 30, 3), np.uint8)
    image[number % 20, :, 0] = 250
    image[:, number % 30, 1] = 100 + number
    image[..., 2] = number
    return image


def live(daemon: Daemon, **had: int) -> dict[str, Any]:
    """Return the daemon's answer to the page."""
    query = "&".join(f"{key}={value}" for key, value in had.items())
    status, _, text = get(daemon, f"/api/live?{query}")
    assert status == 200
    found: dict[str, Any] = json.loads(text)
    return found


def test_answers_have_only_what_is_new(serve: Serve) -> None:
    daemon = serve(FEEDS, "pictures", http=0)
    first = live(daemon)
    had = {
        "seconds": first["rates"]["seconds"]["count"],
        "minutes": 0,
        "looks": first["timeline"]["count"],
        "changes": first["notices"]["changes"],
    }
    later = wait_until(lambda: (found := live(daemon, **had))["timeline"]["looks"] and found)
    assert (later["notices"]["kept"] is None) == (later["notices"]["changes"] == had["changes"])
    count = later["timeline"]["count"] - had["looks"]
    assert len(later["timeline"]["looks"]) == count
    assert live(daemon, looks=10**9)["timeline"]["looks"] == []
    for rubbish in ("?looks=-1", "?looks=x", "?looks=" + "9" * 5000, "?seconds=%00", "?minutes=1.5"):
        assert get(daemon, f"/api/live{rubbish}")[0] in (200, 400)
    assert get(daemon, "/static/../service.py")[0] == 404
    assert get(daemon, "/static/%2e%2e/service.py")[0] == 404


def test_pages_that_ask_too_often_are_refused_for_the_rest_of_a_second(serve: Serve) -> None:
    daemon = serve(FEEDS, "pictures", http=0, patched={"http.service.MOST_ANSWERS": 1})
    wait_until(lambda: get(daemon, "/api/live")[0] == 429)
    wait_until(lambda: get(daemon, "/api/preview?feed=pictures")[0] == 200)
    assert get(daemon, "/api/status")[0] == 200


def test_the_daemon_looks_at_its_workers_only_while_a_page_asks(serve: Serve) -> None:
    daemon = serve(FEEDS, "pictures", http=0, patched={"http.live._IDLE": 0})
    for _ in range(2):
        assert len(live(daemon)["timeline"]["looks"]) == 1  # that of the request itself
        time.sleep(0.5)


# --- files ---


def test_the_page_names_no_other_host_and_its_library_has_its_licence() -> None:
    folder = Path(penstock.__file__).parents[2] / "server/penstock_server/http/static"
    for path in folder.glob("*"):
        if path.is_file():
            for url in re.findall(r"(?:https?:)?//[^\s\"'`)]+\.[a-z]{2,}[^\s\"'`)]*", path.read_text()):
                assert url.startswith("http://www.w3.org/2000/svg"), f"{path.name} names {url}"
            assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", path.read_text())
    assert "MIT" in (folder / "uplot/LICENSE").read_text()


def test_the_wheel_has_the_page_and_the_licence_of_its_library(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).resolve().parents[2], check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in files():
        assert f"penstock_server/http/static/{name}" in names
    assert "penstock_server/http/static/uplot/LICENSE" in names
