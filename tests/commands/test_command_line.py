"""The common parts of all commands: help, environment variables, exit codes, shell completion."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import penstock
import penstock_command
from penstock_server.cli import check_command
from penstock_server.cli.command_group import variables
from penstock_server.cli.wait_command import NOBODY, NOT_READY
from penstock_server.machine.environment import of_workers
from tests.conftest import Daemon

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = penstock_command.main.commands
Serve = Callable[..., Daemon]

FEED = """
    import os
    from penstock_server import Feed
    def numbers():
        yield "\\n".join(sorted(os.environ))
    feed = Feed(numbers, batch_size=1)
"""


def run(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock_command", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


# --- help ---


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_the_help_of_every_command_ends_in_examples(name: str) -> None:
    shown = CliRunner().invoke(penstock_command.main, [*name.split(), "--help"], prog_name="penstock").output
    _, _, examples = shown.partition("\n  Examples:\n")
    lines = [line.strip() for line in examples.splitlines()]
    assert lines, shown
    assert all(line.startswith(("penstock ", "kill ")) for line in lines), lines
    assert any(line.startswith(f"penstock {name}".strip()) for line in lines)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_says_what_it_does_and_what_its_value_is(name: str) -> None:
    for option, _ in variables(name, COMMANDS[name]):
        assert option.help, option.opts
        if not option.is_flag and not isinstance(option.type, click.Choice):
            assert option.metavar, option.opts


@pytest.mark.parametrize(
    ("flag", "metavars", "helps"),
    [
        ("--json", {None}, {"Print JSON.", "Likewise, but print JSON."}),
        ("--timeout", {"SECONDS"}, None),
        ("--workers", {"N", "N|auto"}, None),
        ("--memory", {"SIZE"}, None),
    ],
)
def test_an_option_is_written_the_same_way_in_all_commands(
    flag: str, metavars: set[str | None], helps: set[str] | None
) -> None:
    same = [option for name in COMMANDS for option, _ in variables(name, COMMANDS[name]) if flag in option.opts]
    assert len(same) > 1
    assert {option.metavar for option in same} <= metavars
    assert helps is None or {option.help for option in same} <= helps


def test_penstock_without_a_command_prints_its_help() -> None:
    said = run()
    assert said.returncode == 2
    assert said.stderr.startswith("Usage: ")
    assert all(re.search(rf"^  {name} ", said.stderr, re.MULTILINE) for name in COMMANDS)


def test_a_misspelt_command_or_option_is_answered_with_a_suggestion() -> None:
    assert "No such command 'statsu'. Did you mean 'status'?" in run("statsu").stderr
    assert "No such option '--hang-timeot'. Did you mean '--hang-timeout'?" in run("serve", "--hang-timeot", "3").stderr


# --- environment variables ---


def test_a_variable_stands_for_each_option_and_no_two_have_the_same() -> None:
    names = [variable for name, command in COMMANDS.items() for _, variable in variables(name, command)]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"PENSTOCK_[A-Z]+(_[A-Z]+)+", name) for name in names)
    source = "".join(path.read_text() for part in ("server", "client") for path in (ROOT / part).rglob("*.py"))
    others = set(re.findall(r"\"(PENSTOCK_[A-Z_]+[A-Z])\"", source))
    assert {"PENSTOCK_WORKER", "PENSTOCK_DEBUG"} <= others, "the expression must find Penstock's other variables"
    assert not others & set(names)


def test_the_page_on_the_command_line_lists_every_variable() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import variables as page
    finally:
        sys.path.pop(0)
    text = page.PAGE.read_text()
    assert page.page(text) == text, "run `python docs/variables.py`"


def received(command: str, *arguments: str, **environment: str) -> dict[str, object]:
    """Return the values with which a command is called, given these arguments and variables."""
    one = COMMANDS[command]
    got: dict[str, object] = {}
    before, one.callback = one.callback, got.update
    try:
        said = CliRunner().invoke(penstock_command.main, [command, *arguments], env=environment)
    finally:
        one.callback = before
    assert said.exit_code == 0, said.output
    return got


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_variable_sets_what_its_option_sets(name: str, tmp_path: Path) -> None:
    """Test every option of every command, with one or two values that it accepts."""
    samples = {
        "N": ["3"],
        "N|auto": ["3", "auto"],
        "N|MIN:MAX": ["2:3"],
        "SECONDS": ["7.5"],
        "UID": ["1000", "1001"],
        "SIZE": ["300M"],
        "NAME[=VALUE]": ["A=1", "B=2"],
        "NAME=VALUE": ["size=1", "root=/data"],
        "NAME=DATASET": ["image=images", "label=labels"],
        "MODULE:FUNCTION": ["a.py:f", "b.py:g"],
        "[HOST:]PORT": ["0.0.0.0:8090"],
        "PORT": ["5556"],
        "HOST[:PORT]": ["loader.lan:5"],
        "START:STOP": ["3:9"],
        "FILE": [str(tmp_path / "a.html"), str(tmp_path / "b:c.json")],
        "HEIGHTxWIDTH": ["3x9"],
        "tcp://HOST:PORT": ["tcp://0.0.0.0:1"],
    }
    needed = [
        "2" if argument.metavar in ("N", "[N]") else "tcp://a:1"
        for argument in COMMANDS[name].params
        if isinstance(argument, click.Argument)
    ]
    plain = received(name, *needed)
    for option, variable in variables(name, COMMANDS[name]):
        flag, values = option.opts[0], samples.get(option.metavar or "", [str(tmp_path / "some-file.png")])
        if option.is_flag:
            by_flag = received(name, *needed, flag)
            assert received(name, *needed, **{variable: "1"}) == by_flag != plain
            assert received(name, *needed, **{variable: "0"}) == plain
            continue
        if isinstance(option.type, click.Choice):
            values = [next(str(choice) for choice in option.type.choices if choice != option.default)]
        values = values if option.multiple else values[:1]
        by_flag = received(name, *needed, *(word for value in values for word in (flag, value)))
        assert received(name, *needed, **{variable: " ".join(values)}) == by_flag != plain, variable
        assert received(name, *needed, **{variable: ""}) == plain, variable


def test_the_command_line_goes_before_a_variable_and_errors_name_the_variable() -> None:
    assert received("serve", "a:b", "--workers", "2", PENSTOCK_SERVE_WORKERS="16")["workers"] == 2
    wrong = run("serve", "a:b", PENSTOCK_SERVE_WORKERS="many")
    assert wrong.returncode == 2
    assert "(from the environment variable PENSTOCK_SERVE_WORKERS)" in wrong.stderr


def test_a_variable_says_for_how_long_check_reads_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(
        check_command, "_check_connection", lambda url, read, *_, **__: seconds.append(read) or sys.exit()
    )
    for environment in ({}, {"PENSTOCK_CHECK_SECONDS": "3"}):
        CliRunner().invoke(penstock_command.main, ["check", "tcp://a:1"], env=environment)
    assert seconds == [1, 3]


def test_a_misspelt_variable_is_pointed_out_and_those_of_others_are_not() -> None:
    said = run("status", "x", PENSTOCK_STATUS_TIMOUT="1", PENSTOCK_STATUS_SERVICE_HOST="10.0.0.1", PENSTOCK_VERSION="1")
    assert "PENSTOCK_STATUS_TIMOUT sets nothing; did you mean PENSTOCK_STATUS_TIMEOUT?" in said.stderr
    assert "SERVICE_HOST" not in said.stderr
    assert "expected a daemon's address" in said.stderr, "PENSTOCK_VERSION, which images set, is not --version"


def test_variables_of_a_daemon_reach_neither_its_workers_nor_a_private_daemon(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVE_LOG_LEVEL", "error")
    monkeypatch.setenv("PENSTOCK_SERVE_STATE", str(tmp_path / "groups.sqlite"))
    assert not [name for name in of_workers({}, {}) if name.startswith("PENSTOCK_SERVE_")]
    (tmp_path / "module.py").write_text(textwrap.dedent(FEED))
    with penstock.connect(f"{tmp_path}/module.py:feed", workers=1) as connection:
        (batch,) = connection.batches()
    assert "PENSTOCK_WORKER" in batch[0].decode()
    assert "PENSTOCK_SERVE_" not in batch[0].decode()
    assert not (tmp_path / "groups.sqlite").exists()
    daemon = serve(FEED)
    with penstock.connect(daemon.url) as connection:
        (batch,) = connection.batches()
    assert "PENSTOCK_SERVE_" not in batch[0].decode()
    assert (tmp_path / "groups.sqlite").exists(), "the variables must work for the daemon itself"


# --- exit codes ---


def test_exit_codes_are_those_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert codes == {0, 1, 2, NOT_READY, NOBODY, 128 + signal.SIGINT, 128 + signal.SIGTERM}
    assert run("--version").returncode == 0
    assert run("status", "tcp://127.0.0.1:9", "--timeout", "0.2").returncode == 1
    assert run("wait", "tcp://127.0.0.1:9", "--timeout", "0.2").returncode == NOBODY  # tests/daemon has the others
    assert run("status").returncode == 2
    (tmp_path / "good.py").write_text(
        "from penstock_server import Feed\nfeed = Feed(lambda: iter([1]), batch_size=1)\n"
    )
    (tmp_path / "bad.py").write_text("import nothing_of_this_name\n")
    assert run("check", f"{tmp_path}/good.py:feed", "--seconds", "0.1").returncode == 0
    assert run("check", f"{tmp_path}/bad.py:feed").returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_interrupted_ends_with_the_code_that_shells_expect(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # it accepts connections, but never answers
        url = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        script = f'"{sys.executable}" -m penstock_command status {url} --timeout 600 & echo $!; wait $!; echo $?'
        # Otherwise a shell starts background processes with SIGINT ignored.
        script = f"set -m; {script}"
        with subprocess.Popen(
            ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as shell:
            assert shell.stdout is not None
            assert shell.stderr is not None
            pid = int(shell.stdout.readline())
            connection, _ = nobody.accept()  # now the command waits for the answer
            with connection:
                os.kill(pid, number)
                assert shell.stdout.readline() == f"{128 + number}\n"
            assert "Traceback" not in shell.stderr.read()


# --- completion ---

COMPLETED = {
    "penstock st": {"status", "stop"},
    "penstock serve --hang": {"--hang-timeout"},
    "penstock bench tcp://a:1 --transport ": {"auto", "local", "tcp"},
}


def in_path() -> dict[str, str]:
    """Return an environment whose PATH has `penstock`."""
    place = Path(sys.executable).parent
    assert (place / "penstock").exists()
    return os.environ | {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("line", COMPLETED)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_options_and_values(shell: str, line: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    page = (ROOT / "docs" / "commands.md").read_text()
    (setup,) = re.findall(rf"^\| {shell}.*?\| `([^`]*penstock.*)` \|$", page, re.MULTILINE)
    setup = setup.replace("\\|", "|")
    if shell == "zsh":  # zsh completes only typed text
        type_until_shown(setup, line, COMPLETED[line])
        return
    if shell == "bash":
        *_, last = words = line.split(" ")
        script = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _penstock_completion penstock '{last}'"
        script += '; printf "%s\\n" "${COMPREPLY[@]}"'
    else:
        script = f"complete --do-complete='{line}'"
    said = subprocess.run(
        [shell, "-c", f"{setup}\n{script}"], env=in_path(), capture_output=True, text=True, timeout=60
    )
    assert {word.partition("\t")[0] for word in said.stdout.split()} >= COMPLETED[line], said


def type_until_shown(setup: str, line: str, words: set[str]) -> None:
    """Type the line and Tab in zsh. Wait until it shows the words; if it never does, pytest's timeout ends the wait."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(["zsh", "-f", "-i"], env=in_path(), stdin=theirs, stdout=theirs, stderr=theirs) as zsh:
        os.close(theirs)

        def read_until(wanted: set[str]) -> None:
            seen = ""
            while not wanted <= set(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f]", " ", seen).split()):
                seen += os.read(ours, 4096).decode()

        os.write(ours, f"autoload -Uz compinit; compinit -u -D; {setup}; print rea''dy\n".encode())
        read_until({"ready"})
        os.write(ours, f"{line}\t\t".encode())
        read_until(words)
        zsh.kill()
    os.close(ours)


def test_completing_the_argument_of_serve_offers_files() -> None:
    asked = {"_PENSTOCK_COMPLETE": "bash_complete", "COMP_WORDS": "penstock serve sce", "COMP_CWORD": "2"}
    said = subprocess.run(["penstock"], env=in_path() | asked, capture_output=True, text=True, timeout=60)
    assert said.stdout == "file,sce\n"
