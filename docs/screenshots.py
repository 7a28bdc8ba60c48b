"""Makes the pictures of the web page and of `penstock top` in docs/images: `python docs/screenshots.py`.

It serves the feeds below, reads them for some minutes, kills a worker, and takes each picture in light and in dark. It
needs Chromium and Pillow.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock_server import Feed

IMAGES = Path(__file__).parent / "images"
SECONDS = 125
"""How long the feeds are read; the chart shows two minutes."""
LOOKS = 25
"""How many seconds `penstock top` looks."""

READ = """
import sys, time, penstock
with penstock.connect(sys.argv[1], transport=sys.argv[3]) as connection:
    while True:
        for number, batch in enumerate(connection.batches()):
            time.sleep(float(sys.argv[2]) * (3 if number // 150 % 2 else 1))
"""


def scenes(split: str, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield shapes on a plain ground, with a mask of their kinds."""
    y, x = np.mgrid[0:72, 0:72]
    for number in range(60):
        time.sleep(0.004 + 0.012 * rng.random())
        image = np.empty((72, 72, 3), np.uint8)
        image[:] = rng.integers(150, 240, 3)
        mask = np.zeros((72, 72), np.int32)
        for _ in range(rng.integers(1, 5)):
            cx, cy, size, kind = *rng.integers(8, 64, 2), rng.integers(5, 18), rng.integers(1, 4)
            apart = np.maximum(abs(x - cx), abs(y - cy)) if kind == 1 else abs(x - cx) + abs(y - cy)
            hit = apart < size if kind < 3 else (x - cx) ** 2 + (y - cy) ** 2 < size**2
            image[hit], mask[hit] = rng.integers(0, 200, 3), kind
        yield {"image": image, "mask": mask, "objects": len(np.unique(mask)) - 1, "file": f"{split}#{number}"}


def clicks(split: str, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield rows of a table; one split is damaged."""
    for _ in range(400):
        time.sleep(0.002)
        if split.endswith("17.parquet") and rng.random() < 0.02:
            raise OSError(f"{split}: row group 3 is damaged (bad checksum)")
        yield rng.normal(size=24).astype(np.float32), f"user-{rng.integers(10000)}", rng.integers(2)


train = Feed(scenes, splits=[f"scenes-{n:03d}.h5" for n in range(96)], batch_size=32, lanes=12, seed=1)
tables = [f"clicks-{n:03d}.parquet" for n in range(60)]
click = Feed(clicks, splits=tables, batch_size=64, lanes=12, on_error="skip", name="clicks")


def look(url: str) -> Any:
    """Look at the daemon as `penstock top` does, and return what it would show."""
    from penstock.commands.top_history import Looks
    from penstock_server.to_daemon import control

    looks = Looks()
    for _ in range(LOOKS):
        looks.add(control.status(url, 5.0, None))
        time.sleep(1)
    return looks


def draw_top(looks: Any) -> None:
    """Draw the screen of `penstock top` in light and in dark."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI

    from penstock.commands.top_screen import screen

    for kind, theme in (("light", DEFAULT_TERMINAL_THEME), ("dark", MONOKAI)):
        console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
        console.print(screen(looks))
        drawn = console.export_svg(title="penstock top", theme=theme)
        drawn = re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # fonts of another host
        (IMAGES / f"top-{kind}.svg").write_text(re.sub(r"terminal-\d+-", "top-", drawn))


def main() -> None:
    """Make the pictures."""
    sys.path.insert(0, str(IMAGES.parents[1]))
    from PIL import Image
    from tests.processes.browser import Page, browser

    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # a traceback shows it
        folder = Path(name)
        feeds = folder / "scenes.py"  # tracebacks name it
        shutil.copy(__file__, feeds)
        command = [sys.executable, "-m", "penstock_server", "serve", f"{feeds}:train", f"{feeds}:click"]
        command += ["--workers", "6", "--bind", "tcp://127.0.0.1:0", "--http", "0"]
        with (folder / "log").open("wb") as log:
            daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert daemon.stdout is not None
        urls = [daemon.stdout.readline().split()[1] for _ in range(2)]
        readers = [
            subprocess.Popen([sys.executable, "-c", READ, url, step, transport])
            for url, step, transport in ((urls[0], "0.01", "local"), (urls[1], "0.05", "tcp"))
        ]
        try:
            address = re.search(r"HTTP server: (\S+)", (folder / "log").read_text())
            assert address is not None
            with browser(folder / "browser") as found:
                page = Page(found)
                page.screen(1280, 720)
                page.open(address[1])
                time.sleep(SECONDS - 20)
                workers = page.until("fetch('/api/status').then((answer) => answer.json())")["workers"]
                subprocess.run(["kill", "-KILL", str(workers[2]["pid"])], check=True)
                time.sleep(20)
                page.screenshot(folder / "light.png")
                page.screen(1280, 720, dark=True)
                page.run("document.querySelector('#notices details summary')?.click()")
                page.run("document.getElementById('preview').scrollIntoView()")
                time.sleep(6)
                page.screenshot(folder / "dark.png")
            looks = look(urls[0])
        finally:
            for process in (*readers, daemon):
                process.kill()
                process.wait()
        IMAGES.mkdir(exist_ok=True)
        for kind in ("light", "dark"):
            picture = Image.open(folder / f"{kind}.png").convert("RGB").quantize(256, dither=Image.Dither.NONE)
            picture.save(IMAGES / f"page-{kind}.png", optimize=True)
        draw_top(looks)


if __name__ == "__main__":
    main()
