"""A feed may be what a function returns: `penstock serve scenes.py:make --param size=128`, and `params=`."""

from __future__ import annotations

import enum
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

import penstock
from penstock_proto import StartError, StateMismatch
from penstock_proto.params import shown_call, split_params, with_params
from penstock_server import Feed
from penstock_server.hosts.agreement import plan_differences
from penstock_server.targets.factory import make
from penstock_server.to_daemon import control
from penstock_server.worker.process.start import load_feeds
from tests.conftest import Serve

SCENES = """
    from pathlib import Path
    from penstock_server import Feed

    def make(root: Path, size: int = 64, names: list[str] = []):
        '''Return the scenes below a folder.'''
        def rows(split):
            yield f"{root} {size} {names} {split}"
        return Feed(rows, splits=range(4), batch_size=1{more})

    def rows(split):
        yield split

    def nothing(size=1):
        return size

    def breaks():
        return Feed(rows, splits=range(4), batch_size=open("/no/such/file"))

    plain = Feed(rows, splits=range(4), batch_size=1)
"""


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


@pytest.fixture
def scenes(tmp_path: Path) -> str:
    """The path of the module."""
    path = tmp_path / "scenes.py"
    path.write_text(SCENES.replace("{more}", "").replace("\n    ", "\n"))
    return str(path)


def first(target: str, params: dict[str, Any] | None, workers: int = 0) -> str:
    with penstock.connect(target, params=params, workers=workers) as connection:
        return str(next(iter(connection.batches()))[0], "utf-8")


@pytest.mark.parametrize("workers", [0, 1])
def test_the_trainer_gives_a_factory_its_parameters(scenes: str, workers: int) -> None:
    params = {"root": Path("/da ta"), "size": 128, "names": ["a:b", "c?{d}"]}
    assert first(f"{scenes}:make", params, workers) == "/da ta 128 ['a:b', 'c?{d}'] 0"
    assert first(f"{scenes}:make", {"root": "/data"}, workers) == "/data 64 [] 0"


def test_serve_takes_parameters_from_words_a_file_and_the_environment(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "params.toml").write_text('root = "/of/the/file"\nsize = 1\nnames = ["x"]\n')
    (tmp_path / "params.json").write_text(json.dumps({"root": "/of/the/file", "size": 1}))
    source = SCENES.replace("{more}", "")
    given: list[tuple[dict[str, Any], str, str]] = [
        ({"words": ("--param", "root=/a=b", "--param", "size=2")}, "/a=b 2 []", "root='/a=b', size=2"),
        ({"words": ("--params", f"{tmp_path}/params.toml", "--param", "size=2")}, "/of/the/file 2 ['x']", "size=2"),
        ({"words": ("--params", f"{tmp_path}/params.json")}, "/of/the/file 1 []", "size=1"),
        ({"env": {"PENSTOCK_SERVE_PARAM": "'root=/of the environment' size=3"}}, "/of the environment 3 []", "size=3"),
    ]
    for options, expected, params in given:
        daemon = serve(source, "make", **options)
        assert first(daemon.url, None, None) == f"{expected} 0"  # type: ignore[arg-type]
        state = control.status(daemon.url, 5.0)
        assert params in state.feeds[0].params
        daemon.stop()


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("make", {}, r"make needs a value of root, such as --param root=VALUE.* root: Path; size: int = 64"),
        ("make", {"root": "/", "sizes": 1}, r"make has no parameter 'sizes': its parameters are root: Path; size: int"),
        ("make", {"root": "/", "size": "big"}, r"size must be a whole number, got 'big' .*size: int = 64"),
        ("make", {"root": "/", "size": 1.5}, r"size must be a whole number, got 1.5"),
        ("nothing", {}, r"nothing must return a Feed, got 1\. If it yields samples itself, write feed = Feed\(nothing"),
        ("rows", {"x": 1}, r"rows must be a Feed, got <function"),
        ("plain", {"x": 1}, r"plain is a Feed, which has no parameters"),
        ("breaks", {}, r"breaks\(\) raised FileNotFoundError"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_made_is_an_error_that_says_what_to_do(
    scenes: str, name: str, params: dict[str, Any], message: str, workers: int
) -> None:
    with pytest.raises(StartError, match=message):
        first(f"{scenes}:{name}", params, workers)


def test_parameters_belong_to_a_state(scenes: str) -> None:
    with penstock.connect(f"{scenes}:make", params={"root": "/", "size": 2}, workers=0) as connection:
        next(connection.batches())
        state = json.loads(json.dumps(connection.state_dict()))
        assert connection.info.params == "root='/', size=2"
    same = {"size": "2", "root": "/", "names": []}  # the default does not count, nor does the order
    penstock.connect(f"{scenes}:make", params=same, workers=0, state=state).close()
    with pytest.raises(StateMismatch, match=r"params was root='/', size=2 and is root='/' now"):
        penstock.connect(f"{scenes}:make", params={"root": "/"}, workers=0, state=state)


def test_parameters_belong_to_a_group(serve: Serve, tmp_path: Path) -> None:
    source, state = SCENES.replace("{more}", ""), tmp_path / "state"
    daemon = serve(source, "make", words=("--param", "root=/", "--param", "size=2"), state=state)
    connection = penstock.connect(daemon.url, group="g", reconnect=0)
    next(connection.batches())
    daemon.stop(signal.SIGKILL)
    connection.close()
    daemon = serve(source, "make", words=("--param", "root=/", "--param", "size=3"), state=state)
    with pytest.raises(StateMismatch, match=r"params was root=.*size=2 and is root=.*size=3 now"):
        penstock.connect(daemon.url, group="g")


def test_a_host_with_other_parameters_is_refused(scenes: str) -> None:
    plans = []
    for size in (2, 3):
        with_size = with_params(f"{scenes}:make", {"root": "/", "size": size})
        plans.append(tuple(one.plan for one in load_feeds([with_size]).values()))
    assert plan_differences(plans[0], plans[0]) == ""
    message = plan_differences(plans[1], plans[0])
    assert message == (
        """its feed make has params "root='/', size=3", and the head's has "root='/', size=2": """
        "see that both get the same --param"
    )


def test_caches_of_other_parameters_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = """
from penstock_server import Feed
SIZE = 0
def rows(split):
    yield SIZE
def make(size: int):
    global SIZE
    SIZE = size
    return Feed(rows, splits=range(2), batch_size=2, cache="cache")
"""
    (tmp_path / "cached.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for size in (1, 2, 1):
        with penstock.connect("cached.py:make", params={"size": size}, workers=1) as connection:
            assert [batch.tolist() for batch in connection.batches()] == [[size, size]]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_params_are_for_factories_of_this_process(scenes: str) -> None:
    feed: Feed = Feed([1, 2], batch_size=1)
    with pytest.raises(ValueError, match="for MODULE:FUNCTION"):
        penstock.connect(feed, params={"a": 1}, workers=0)
    with pytest.raises(ValueError, match="whose daemon has its own"):
        penstock.connect("tcp://127.0.0.1:5555/make", params={"a": 1})
    with pytest.raises(TypeError, match=r"params=\{'root': \.\.\.\}: values are numbers, text, paths"):
        penstock.connect(f"{scenes}:make", params={"root": object()}, workers=0)


def one(a: Any) -> Any:
    return a


KINDS: list[tuple[Any, Any, Any]] = [
    (int, "12", 12),
    (int, -12, -12),
    (float, "1e-3", 1e-3),
    (float, 2, 2.0),
    (bool, "no", False),
    (bool, True, True),
    (str, "12", "12"),
    (Path, "/a", Path("/a")),
    (int | None, "none", None),
    (Optional[int], "3", 3),  # noqa: UP045
    (int | str, "x", "x"),
    (str | int, "3", 3),
    (Literal["train", 2], "2", 2),
    (Size, "LARGE", Size.LARGE),
    (list[int], "1,2", [1, 2]),
    (list[int], "[1, 2]", [1, 2]),
    (tuple[int, ...], [1, 2], (1, 2)),
    (tuple[int, str], "1,a", (1, "a")),
    (Sequence[float], "1", [1.0]),
    (dict[str, int], '{"a": 1}', {"a": 1}),
    (Annotated[int, "pixels"], "1", 1),
    (Any, "1", "1"),
]


@pytest.mark.parametrize(("kind", "given", "expected"), KINDS)
def test_the_annotation_says_what_a_value_becomes(kind: Any, given: Any, expected: Any) -> None:
    got = []

    def factory(value: Any) -> Feed:
        got.append(value)
        return Feed([1, 2], batch_size=1)

    factory.__annotations__["value"] = kind
    make(factory, "factory", {"value": given})
    assert got == [expected]
    assert type(got[0]) is type(expected)


@pytest.mark.parametrize(
    ("kind", "given"),
    [(int, "1.5"), (int, True), (bool, "maybe"), (Literal["a"], "b"), (Size, "MEDIUM"), (tuple[int, int], "1"),
     (list[int], "1,x"), (dict, "1"), (Path, 1), (None, "1"), (int | None, "x"), (str, 1)],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_refused(kind: Any, given: Any) -> None:
    def factory(value: Any) -> Feed:
        return Feed([1, 2], batch_size=1)

    factory.__annotations__["value"] = kind
    with pytest.raises(StartError, match="factory: value must be"):
        make(factory, "factory", {"value": given})


def test_without_an_annotation_the_default_says_it() -> None:
    def factory(a=1, b=0.5, c=True, d="x", e=None, **others):  # type: ignore[no-untyped-def]
        assert (a, b, c, d, e, others) == (2, 2.0, False, "2", "2", {"f": "2"})
        return Feed([1, 2], batch_size=1)

    made = make(factory, "factory", {"a": "2", "b": "2", "c": "no", "d": "2", "e": "2", "f": "2"})
    assert made.params == "a=2, b=2.0, c=False, d='2', e='2', f='2'"


def test_a_target_and_its_parameters_can_be_taken_apart() -> None:
    params = {"a": "x:y?{z}", "b": [1, None, True]}
    for target in ("scenes.py:make", "/a b?/c:d.py:make", "pkg.scenes:make"):
        whole = with_params(target, params)
        assert split_params(whole) == (target, params)
        assert shown_call(whole) == f"{target}(a='x:y?{{z}}', b=[1, None, True])"
        assert split_params(target) == (target, None)


@pytest.fixture
def penstock_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock_command", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


def test_the_parameters_of_a_factory_are_listed(scenes: str, penstock_command: Callable[..., Any]) -> None:
    said = penstock_command("params", f"{scenes}:make").stdout
    assert re.search(r"  root: Path  \(required\)\n  size: int = 64\n  names: list\[str\] = \[\]\n", said)
    assert "Return the scenes below a folder." in said


def test_what_has_no_parameters_is_named(scenes: str, penstock_command: Callable[..., Any]) -> None:
    assert f"which function in it? Write {scenes}:make" in penstock_command("params", scenes).stderr
    assert "plain must be a function, got Feed(" in penstock_command("params", f"{scenes}:plain").stderr


@pytest.mark.parametrize("name", ["check", "peek", "bench"])
def test_other_commands_take_parameters(scenes: str, penstock_command: Callable[..., Any], name: str) -> None:
    quick = {"check": ["--seconds", "0.1"], "bench": ["--seconds", "0.2", "--warmup", "0", "--workers", "1"]}
    ended = penstock_command(name, f"{scenes}:make", "--param", "root=/data", *quick.get(name, []))
    assert ended.returncode == 0, ended.stderr


def test_parameters_are_not_for_data_files(penstock_command: Callable[..., Any]) -> None:
    words = ("--leaf", "x=x", "--batch-size", "1", "--param", "size=1")
    assert "are for MODULE:FUNCTION" in penstock_command("check", "digits.h5", *words).stderr
