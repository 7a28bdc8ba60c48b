"""The documentation is true: its examples run, and the messages that it quotes are those that users get."""

from __future__ import annotations

import ast
import contextlib
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import penstock
from penstock._transport import waiting
from penstock_server.to_daemon import control
from tests.conftest import wait_until
from tests.processes.free_ports import free_address, free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = ["proto", "server", "client"]
PLACE = r"^(penstock|[A-Z]\w+): |\n  in .*|\n\nTraceback .*| \.\.\.$"
"""The parts of a quotation that do not belong to the message itself."""
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.stem)
def test_examples_are_python(page: Path) -> None:
    for example in examples(page):
        compile(example, str(page), "exec")


def quoted(mistake: str, number: int = 0) -> str:
    """Return message `number` that the page Troubleshooting quotes below the heading `mistake`."""
    _, _, rest = TROUBLESHOOTING.partition(f"\n### {mistake}\n")
    assert rest, f"Troubleshooting has no heading {mistake!r}"
    message: str = re.findall(r"^```text\n(.*?)\n```$", rest, re.DOTALL | re.MULTILINE)[number]
    return message


def assert_quoted(message: str, said: str) -> None:
    """Check that `said` contains the message, up to a final "...". Worker numbers, seconds and folders may differ."""
    for varies, plain in ((r"worker \d+", "worker N"), (r"for [0-9.]+ s", "for N s"), (r'File "[^"]*/', 'File "')):
        message, said = re.sub(varies, plain, message), re.sub(varies, plain, said)
    assert message.removesuffix(" ...") in said, f"the page quotes\n{message}\nand Penstock says\n{said}"


def said_by(tree: ast.AST) -> list[tuple[str, ...]]:
    """Return the words of each text in a module: its parts between `{...}` and `%s`."""
    found = []
    for node in ast.walk(tree):
        parts = [node] if isinstance(node, ast.Constant) else node.values if isinstance(node, ast.JoinedStr) else []
        texts = [part.value if isinstance(part, ast.Constant) else "%s" for part in parts]
        if all(isinstance(text, str) for text in texts) and sum(map(len, texts)) > 15:
            found.append(tuple(re.split(r"%(?:\.\d+)?[sdfgr]", "".join(map(str, texts)))))
    return found


def test_the_other_messages_of_troubleshooting_stand_in_the_code() -> None:
    """That is the messages that no test below provokes."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    texts = {words for path in files for words in said_by(ast.parse(path.read_text()))}
    provoked = Path(__file__).read_text()
    others = [part for part in TROUBLESHOOTING.split("\n### ") if f'"{part.partition(chr(10))[0]}"' not in provoked]
    messages = re.findall(r"^```text\n(.*?)\n```$", "\n".join(others), re.DOTALL | re.MULTILINE)
    assert len(messages) > 8
    for message in messages:
        said = re.sub(PLACE, "", message, flags=re.DOTALL)
        covered: set[int] = set()
        for words in texts:
            if max(words, key=len) in said:
                for found in re.finditer(".*?".join(map(re.escape, words)), said, re.DOTALL):
                    if sum(map(len, words)) > 0.3 * len(found[0]):
                        covered.update(range(*found.span()))
        missing = "".join("·" if place in covered else letter for place, letter in enumerate(said))
        assert len(covered) > 0.9 * len(said), f"not in the code: {missing}"


def feed(folder: Path, body: str, options: str = "splits=['a'], batch_size=32") -> Path:
    """Write scenes.py, whose generator has this body from line 5 on."""
    path = folder / "scenes.py"
    lines = ["import numpy as np", "from penstock_server import Feed", "def files(): return []", "def scenes(path):"]
    lines += [f"    {line}" for line in body.splitlines()]
    path.write_text("\n".join([*lines, f"feed = Feed(scenes, {options}, name='train')\n"]))
    return path


def serve(folder: Path, *options: str, feed: str = "scenes.py:feed") -> str:
    """Return the messages of a `penstock serve` in this folder that refuses to start."""
    command = [sys.executable, "-m", "penstock_server", "serve", feed, "--workers", "1"]
    bind = () if "--bind" in options else ("--bind", "tcp://127.0.0.1:0")
    found = subprocess.run([*command, *bind, *options], cwd=folder, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1, found.stderr
    return found.stderr


@pytest.mark.parametrize(
    ("mistake", "body", "options"),
    [
        ("The pattern matches nothing", "yield 1", "splits=files, batch_size=32"),
        ("A forgotten `yield`", "return None", "splits=['scenes/0.h5'], batch_size=32"),
        ("A list of arrays", "yield [np.zeros(3), np.zeros(4)], 1", "splits=['a'], batch_size=32"),
    ],
)
def test_a_feed_that_cannot_be_served_is_refused_as_the_page_says(
    tmp_path: Path, mistake: str, body: str, options: str
) -> None:
    feed(tmp_path, body, options)
    assert_quoted(quoted(mistake), serve(tmp_path))


def test_a_wrong_name_is_refused_as_the_page_says(tmp_path: Path) -> None:
    feed(tmp_path, "yield 1")
    assert_quoted(quoted("A wrong name"), serve(tmp_path, feed="scenes.py:nothing"))


def test_too_little_memory_is_refused_as_the_page_says(tmp_path: Path) -> None:
    feed(tmp_path, "yield np.zeros((4000, 1000), np.float32)")
    assert_quoted(quoted("Too little memory"), serve(tmp_path, "--memory", "500M"))


def test_a_port_in_use_is_refused_as_the_page_says(tmp_path: Path) -> None:
    feed(tmp_path, "yield 1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = serve(tmp_path, "--bind", f"tcp://127.0.0.1:{port}")
    assert_quoted(quoted("The port is in use").replace("5555", str(port)), said)


def test_warnings_are_those_that_the_page_quotes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "yield {'noise': np.random.default_rng().random((32, 3)), 'label': np.zeros(32)}"
    path = feed(tmp_path, body, "splits=['a.h5', 'b.h5'], batch_size=32")
    said = ""
    with penstock.connect(f"{path}:feed", workers=1):
        while "a different first sample" not in said:
            said += capfd.readouterr().err
    assert_quoted(quoted("A generator that yields batches"), said)
    assert_quoted(quoted("Unseeded random numbers"), said)


@pytest.mark.parametrize(
    ("mistake", "body", "options"),
    [
        (
            "Samples that differ",
            "for i in range(5):\n    yield np.zeros((3 + (path == 2 and i == 4), 2), np.float32)",
            "splits=[0, 1, 2], batch_size=1",
        ),
        (
            "An exception in the generator",
            "yield 1\n" + 4 * "#\n" + "if path == 'b.h5':\n" + '    raise OSError(f"cannot read {path}")',
            "splits=['a.h5', 'b.h5'], batch_size=1",
        ),
        ("A wrong `samples=`", "yield from range(50)", "splits=range(4), batch_size=1, samples=150"),
    ],
)
def test_an_epoch_that_fails_raises_what_the_page_quotes(tmp_path: Path, mistake: str, body: str, options: str) -> None:
    path = feed(tmp_path, body, options)
    with penstock.connect(f"{path}:feed", workers=1) as connection:
        with pytest.raises(penstock.PenstockError) as raised:
            list(connection.batches())
    assert_quoted(quoted(mistake), f"{raised.type.__name__}: {raised.value}")


def test_an_older_iterator_raises_what_the_page_quotes(tmp_path: Path) -> None:
    path = feed(tmp_path, "yield from range(50)", "splits=range(4), batch_size=1")
    with penstock.connect(f"{path}:feed", workers=1) as connection:
        older, newer = connection.batches(), connection.batches()
        next(older), next(newer)
        with pytest.raises(penstock.StreamClosed) as raised:
            list(older)
    assert_quoted(quoted("Two iterators on one connection"), f"{raised.type.__name__}: {raised.value}")


def test_a_wrong_url_raises_what_the_page_quotes() -> None:
    with pytest.raises(penstock.StartError) as raised:
        penstock.connect("tcp://127.0.0.1:5555")
    assert_quoted(quoted("A wrong feed name in the URL", 1), f"{raised.type.__name__}: {raised.value}")
    port = free_port()
    with pytest.raises(penstock.Unreachable) as unreached:
        penstock.connect(f"tcp://127.0.0.1:{port}/train", timeout=0.5)
    assert_quoted(quoted("No daemon").replace("5555", str(port)), f"{unreached.type.__name__}: {unreached.value}")


def test_a_trainer_says_of_a_daemon_that_starts_what_the_page_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def plain(text: str) -> str:
        text = re.sub(r", at \S+ in load|, tried for [0-9.]+ s", "", text)
        return re.sub(r"\(\d+ s\)", "(N s)", text).replace("5555", str(port))

    monkeypatch.setattr(waiting, "ASK_AFTER", 0.1)
    monkeypatch.setattr(waiting, "SAY_AFTER", 0.2)
    (tmp_path / "scenes.py").write_text("import time\ntime.sleep(600)\n")
    endpoint = free_address()
    port = int(endpoint.rpartition(":")[2])
    command = [sys.executable, "-m", "penstock_server", "serve", "scenes.py:train", "--workers", "1"]
    with subprocess.Popen([*command, "--bind", endpoint], cwd=tmp_path, stderr=subprocess.DEVNULL) as daemon:
        try:
            wait_until(lambda: "importing scenes.py" in phase_of(endpoint))
            with pytest.raises(penstock.Unreachable) as late:
                penstock.connect(f"{endpoint}/train", timeout=2)
            timer = threading.Timer(1, daemon.kill)
            timer.start()
            with pytest.raises(penstock.Unreachable) as gone:
                penstock.connect(f"{endpoint}/train", timeout=2)
            timer.join()
        finally:
            daemon.kill()
    heading = "The feeds are being started"
    assert plain(quoted(heading)) in [plain(line) for line in caplog.messages]
    for number, error in ((1, late), (2, gone)):
        assert plain(quoted(heading, number)) in plain(f"{error.type.__name__}: {error.value}")


def phase_of(endpoint: str) -> str:
    with contextlib.suppress(penstock.Unreachable):
        return control.status(endpoint, 5).phase
    return ""
