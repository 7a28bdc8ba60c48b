"""The parts of `penstock serve --on ray` that need no Ray: options, which code the hosts get, and where their keys
are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from penstock_proto import StartError, distribution
from penstock_server.cli import keygen
from penstock_server.cli.main import main
from penstock_server.on_ray import shipping
from penstock_server.on_ray.orders import Plan
from penstock_server.targets.file_target import make_target
from tests.conftest import Serve, wait_until

FEED = "from penstock_server import Feed\nfeed = Feed(lambda: iter([1]), batch_size=1)\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "2"], "--hosts and --workers-per-host need --on ray"),
        (["--hosts", "2:4"], "--hosts and --workers-per-host need --on ray"),
        (["--on", "ray", "--hosts", "2"], "--on ray needs --hosts N (or MIN:MAX) and --workers-per-host N"),
        (["--on", "ray", "--hosts", "5:2"], "MIN must not be more than MAX, got '5:2'"),
        (["--on", "ray", "--hosts", "0:0"], "must be from 1 to 4096, got '0:0'"),
        (["--on", "ray", "--hosts", "0"], "must be from 1 to 4096, got '0'"),
        (["--on", "ray", "--hosts", "2-4"], "must be a number, or MIN:MAX such as 2:8, got '2-4'"),
        (["--on", "ray", "--hosts", "2:"], "must be a number, or MIN:MAX such as 2:8, got '2:'"),
        (
            ["--on", "ray", "--hosts", "1:4", "--workers-per-host", "2", "--workers", "auto"],
            "--workers auto and --hosts MIN:MAX would both follow the load: give a number for one of them",
        ),
        (["--on", "ray", "--hosts", "2", "--workers-per-host", "2", "--reload"], "--reload is for one host"),
        (["--on", "slurm"], "'slurm' is not 'ray'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words: list[str], message: str) -> None:
    ran = CliRunner().invoke(main, ["serve", "feeds:feed", *words])
    assert ran.exit_code == 2
    assert message in ran.output


def refused(folder: Path, *words: str, ray: bool = True) -> str:
    """Return the message of a `penstock serve --on ray` that ends before it asks Ray, with a package `ray` or
    without."""
    (folder / "feeds.py").write_text(FEED)
    (folder / "python" / "ray").mkdir(parents=True)
    (folder / "python" / "ray" / "__init__.py").touch()
    hide = "" if ray else "sys.modules['ray'] = None; "
    code = f"import sys; {hide}from penstock_server.cli.main import main; main(prog_name='penstock')"
    path = os.pathsep.join([str(folder / "python"), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", code, "serve", "feeds.py:feed", "--on=ray", "--hosts=1", "--workers-per-host=1", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ran.returncode == 1, ran.stderr
    return ran.stderr


def test_hosts_on_other_machines_need_keys_or_insecure(tmp_path: Path) -> None:
    assert "--bind tcp://0.0.0.0:5555 can be reached from other hosts. Give --keys" in refused(tmp_path)


def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    assert distribution.pip_install("ray") in refused(tmp_path, "--insecure", ray=False)


def test_the_hosts_need_a_key_of_their_own(tmp_path: Path) -> None:
    keygen = [sys.executable, "-m", "penstock_server", "keygen", "keys"]
    subprocess.run([*keygen, "--client", "me"], cwd=tmp_path, check=True, capture_output=True)
    said = refused(tmp_path, "--keys", "keys")
    assert "the hosts need a key in keys/hosts/ray. To make it: penstock keygen keys --host ray" in said
    subprocess.run([*keygen, "--host", "ray"], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "keys/server/hosts/ray.key").unlink()
    (tmp_path / "python/ray/__init__.py").unlink()
    (tmp_path / "python/ray").rmdir()
    (tmp_path / "python").rmdir()
    assert "keys/hosts/ray is not a key that keys/server/hosts admits" in refused(tmp_path, "--keys", "keys")


# --- the code of the feeds ---


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a current directory with code and data, and code beside it."""
    files = ("here/feeds.py", "here/lib/tools.py", "here/lib/data.h5", "here/.venv/x.py", "here/env/pyvenv.cfg")
    for name in (*files, "here/env/y.py", "here/lib/__pycache__/z.py", "here/images.py", "beside/other.py", "into/"):
        path = tmp_path / name
        if name.endswith("/"):
            path.mkdir()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"NAME = {name!r}\n")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def collected(here: Path, *feeds: str) -> tuple[list[str], set[str]]:
    """Return the feeds as the hosts name them, and the files that the hosts get."""
    named = shipping.collect([*feeds], here / "into")
    return named, {str(file.relative_to(here / "into")) for file in (here / "into").rglob("*") if file.is_file()}


def test_the_python_files_of_a_feeds_folder_keep_their_places(here: Path) -> None:
    assert collected(here, "feeds.py:feed") == (["feeds.py:feed"], {"feeds.py", "images.py", "lib/tools.py"})
    assert (here / "into/lib/tools.py").read_text() == "NAME = 'here/lib/tools.py'\n"


def test_only_the_folder_of_the_feed_is_taken(here: Path) -> None:
    assert collected(here, "lib/tools.py:feed") == (["lib/tools.py:feed"], {"lib/tools.py"})


def test_a_module_takes_the_current_directory_with_it_and_an_installed_one_nothing(here: Path) -> None:
    assert collected(here, "penstock_server.feed.feed:Feed") == (["penstock_server.feed.feed:Feed"], set())
    assert collected(here, "lib.tools:feed") == (["lib.tools:feed"], {"feeds.py", "images.py", "lib/tools.py"})


def test_a_file_elsewhere_gets_a_folder_of_its_own(here: Path) -> None:
    named, files = collected(here, "feeds.py:feed", "../beside/other.py:feed")
    assert named == ["feeds.py:feed", "code1/other.py:feed"]
    assert files == {"feeds.py", "images.py", "lib/tools.py", "code1/other.py"}


def test_a_file_that_imports_relatively_takes_its_package_with_it(here: Path) -> None:
    for name in ("beside/pkg/__init__.py", "beside/pkg/sub/__init__.py", "beside/pkg/values.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    (here / "beside/pkg/sub/feeds.py").write_text("from ..values import VALUE\n")
    named, files = collected(here, "../beside/pkg/sub/feeds.py:feed")
    assert named == ["code0/pkg/sub/feeds.py:feed"]
    names = ("__init__.py", "values.py", "sub/__init__.py", "sub/feeds.py")
    assert files == {f"code0/pkg/{name}" for name in names}


def test_transforms_of_data_files_are_taken_from_here_alone(here: Path) -> None:
    def target(transform: str) -> str:
        return make_target(["/data/x.npy"], [], name=None, batch_size=2, transform=[transform])

    inside = target("images.py:augment")
    assert collected(here, inside) == ([inside], {"feeds.py", "images.py", "lib/tools.py"})
    with pytest.raises(StartError, match=r"--transform \.\./beside/other\.py:f is not in .*here or below"):
        collected(here, target("../beside/other.py:f"))


def test_data_files_need_paths_that_hosts_have_too(here: Path) -> None:
    with pytest.raises(StartError, match=r"^x\.npy is not below the hosts' current directory"):
        collected(here, make_target(["/data/x.npy", "x.npy"], [], name=None, batch_size=2))


def test_what_cannot_be_taken_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match="no such file"):
        collected(here, "missing.py:feed")
    with pytest.raises(StartError, match="there is no module missing"):
        collected(here, "missing:feed")
    monkeypatch.setattr(shipping, "MOST_BYTES", 10)
    with pytest.raises(StartError, match="put the feed into a folder of its own"):
        collected(here, "feeds.py:feed")
    monkeypatch.setattr(shipping, "MOST_ENTRIES", 2)
    with pytest.raises(StartError, match="it holds more than 2 files"):
        collected(here, "feeds.py:feed")


# --- the host on a node ---

ACTOR = """
import sys
from penstock_server.on_ray.host import RayHost
from penstock_server.on_ray.orders import Plan
import msgspec
print(RayHost().run(msgspec.json.decode(sys.stdin.readline(), type=Plan), sys.argv[1], "node").status, flush=True)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_the_keys_of_a_host_are_in_no_file_of_its_node(serve: Serve, tmp_path: Path, killed: bool) -> None:
    keygen.generate(tmp_path / "keys", ["me"], ["ray"])
    head = serve(FEED, keys=tmp_path / "keys", workers=0)
    files = {file.name: file.read_bytes() for file in (tmp_path / "keys/hosts/ray").iterdir()}
    plan = Plan("node", 1, 1, "", ["feeds.py:feed"], [], files)
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "log").open("wb") as log:
        actor = subprocess.Popen(
            [sys.executable, "-c", ACTOR, head.url.rpartition("/")[0]],
            cwd=head.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        )
    try:
        assert actor.stdin is not None
        actor.stdin.write(msgspec.json.encode(plan) + b"\n")
        actor.stdin.flush()
        wait_until(lambda: "host node works" in head.stderr(), 60)
        assert not list((tmp_path / "tmp").iterdir())
        if killed:
            actor.kill()
            wait_until(lambda: "host node has ended" in head.stderr(), 60)
        head.stop()
        said, _ = actor.communicate(timeout=60)
        assert said == (b"" if killed else b"0\n")
        assert not list((tmp_path / "tmp").iterdir())
    finally:
        actor.kill()
        actor.communicate()
