"""Every block of every page of the documentation runs, or the page says why it does not.

A block that cannot run has a mark on the line before it, `<!-- not run: REASON -->`. Python blocks are executed, page
by page, and a batch of each feed that they declare is read. Blocks of data are parsed. Shell blocks have a mark, but
their syntax is checked, and the options of Penstock's commands. (Blocks of kind `text` are output.) Other tests run all
commands and files of the tutorial and of "Coming from another loader".
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from penstock_command import main
from penstock_server.cli import keygen
from tests.conftest import Serve, StartTrainer
from tests.docs.pages import DOCS, ROOT, Block, blocks_of

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "decisions").glob("*.md"))]
WORLD, SCENES = (Path(__file__).with_name(name).read_text() for name in ("world.py", "scenes.py"))
RUN_ELSEWHERE = ("tutorial", "coming-from")
QUICKER = {
    "epochs=10": "epochs=1",
    "range(10)": "range(2)",
    "workers=8": "workers=1",
    "workers=4": "workers=1",
    "/scratch/cache": "cache",
}
REASON = re.compile(r"[a-z].{9,99}")

RUN = """
import gc, json, os, sys, traceback
import psutil
folder, code, modules, page, url, blocks = sys.argv[1:]
os.chdir(folder)
sys.path.insert(0, folder)
os.environ["PENSTOCK_URL"] = url.rpartition("/")[0]
import penstock
from penstock_server import Feed
exec(compile(code, "world.py", "exec"), globals())
write_data(modules)
given = names(url) | OF_PAGE.get(page, {})
failed = {}
spaces = {}
for line, block in json.loads(blocks):
    spaces |= given
    before = dict(spaces)
    try:
        spaces["__name__"] = "block"
        exec(compile("\\n" * line + block, f"{page}.md", "exec"), spaces)
        for name, value in [*spaces.items()]:
            if isinstance(value, Feed) and value is not before.get(name):
                with penstock.connect(value, workers=0) as connection:
                    next(connection.batches())
    except BaseException:
        failed[line] = traceback.format_exc(limit=-2)
print(json.dumps(failed))
for space in (spaces, before, given):
    space.clear()
value = connection = None
gc.collect()
psutil.wait_procs(psutil.Process().children(), 20)  # private daemons
"""


def test_each_reason_why_a_block_does_not_run_is_given_in_words() -> None:
    reasons = {f"{block.page}:{block.line}": block.reason for page in PAGES for block in blocks_of(page)}
    given = {place: reason for place, reason in reasons.items() if reason is not None}
    for place, reason in given.items():
        print(f"{place} is not run: {reason}")
        assert REASON.fullmatch(reason), f"{place}: say why the block is not run"


def of_kind(page: Path, *kinds: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.kind in kinds]


def runnable(page: Path) -> bool:
    return any(block.reason is None for block in of_kind(page, "python"))


def test_blocks_have_a_kind_that_is_known() -> None:
    for page in PAGES:
        for block in blocks_of(page):
            assert block.kind in ("python", "sh", "console", "text", "yaml", "json", "toml"), f"{page}:{block.line}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if runnable(page) and page.stem not in RUN_ELSEWHERE],
    ids=lambda one: one.stem,
)
def test_python_blocks_run_as_printed(page: Path, serve: Serve, tmp_path: Path, start_trainer: StartTrainer) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    url = serve(SCENES, "feed", "val").urls["train"]
    blocks = [block for block in of_kind(page, "python") if block.reason is None]
    with_keys = ""
    if any("keys=" in block.text for block in blocks):
        keygen.generate(tmp_path / "keys", ["trainer"])
        (tmp_path / "keys/clients/trainer").rename(folder / "penstock-keys")
        with_keys = serve(SCENES, "feed", keys=tmp_path / "keys").urls["train"]
    texts = []
    for block in blocks:
        root = (with_keys if "keys=" in block.text else url).rpartition("/")[0]
        text = re.sub(r"tcp://[\w.]+:5555", root, block.text)
        for many, few in QUICKER.items():
            text = text.replace(many, few)
        texts.append((block.line, text))
    trainer = start_trainer(RUN, str(folder), WORLD, SCENES, page.stem, url, json.dumps(texts))
    said, errors = trainer.communicate(120)
    assert trainer.returncode == 0, errors
    failed = json.loads(said.splitlines()[-1])
    assert not failed, "\n".join(failed.values())


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yield the words of the commands in a shell block."""
    text = re.sub(r"<<END\n.*?\nEND\n", "\n", block.text.replace("\\\n", " "), flags=re.DOTALL)
    for line in text.splitlines():
        if block.kind == "sh" or line.startswith("$ "):
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                yield words


@pytest.mark.parametrize("page", [page for page in PAGES if of_kind(page, "sh", "console")], ids=lambda one: one.stem)
def test_shell_blocks_are_correct_and_their_commands_of_penstock_have_the_options_that_they_name(page: Path) -> None:
    for block in of_kind(page, "sh", "console"):
        if page.stem not in RUN_ELSEWHERE:
            assert block.reason is not None, f"{page.name}:{block.line}: no test runs this block: mark it, or run it"
        if block.kind == "sh":
            checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            assert checked.returncode == 0, f"{page.name}:{block.line}: {checked.stderr}"
        for words in commands_of(block):
            if words[0] == "penstock" and "MODULE:ATTR" not in block.text:
                assert_options_exist(words, f"{page.name}:{block.line}")


def assert_options_exist(words: list[str], place: str) -> None:
    stop = next((at for at, word in enumerate(words) if word in ("|", "&", "&&", ">", "2>&1")), len(words))
    name, *arguments = words[1:stop]
    command = main.commands.get(name)
    assert command is not None, f"{place}: penstock has no command {name}"
    try:
        command.make_context(name, arguments)
    except click.ClickException as error:
        pytest.fail(f"{place}: {shlex.join(words)}: {error.message}")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if of_kind(page, "yaml", "json", "toml")], ids=lambda one: one.stem
)
def test_blocks_of_data_can_be_parsed(page: Path) -> None:
    parsers = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}
    for block in of_kind(page, *parsers):
        assert parsers[block.kind](block.text), f"{page.name}:{block.line}"


@pytest.mark.parametrize("page", [page for page in PAGES if "--http" in page.read_text()], ids=lambda one: one.stem)
def test_a_page_with_the_option_http_installs_the_extra_that_it_needs(page: Path) -> None:
    for block in of_kind(page, "sh", "console"):
        for extras in re.findall(r"pip install '[\w.-]*\[(.*?)\]'", block.text):
            assert "http" in extras.split(",") or "server" not in extras.split(","), f"{page.name}:{block.line}"
