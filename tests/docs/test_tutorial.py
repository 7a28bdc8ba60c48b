"""The tutorial works: the test writes every file in it, and runs every command, in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

from tests.conftest import Daemon, StartTrainer, command, stop_all
from tests.docs.pages import DOCS, ROOT, commands, write_files
from tests.processes.forked import Forked
from tests.processes.free_ports import free_port

RUN = """
import os, pathlib, runpy, sys, time
os.chdir(sys.argv[1])
sys.path.insert(0, "")
if len(sys.argv) > 3:
    import keras

    class Hook(keras.callbacks.Callback):
        steps = 0
        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == 10:
                pathlib.Path("training").touch()
                while not os.path.exists("scaled"):
                    time.sleep(0.01)
            if self.steps == 27:
                raise KeyboardInterrupt  # as Ctrl-C
    fit = keras.Model.fit
    keras.Model.fit = lambda self, *data, callbacks=None, **options: fit(
        self, *data, callbacks=callbacks and [*callbacks, Hook()], **options
    )
for script in sys.argv[2:]:
    runpy.run_path(script, run_name="__main__")
"""
FEWER = {"steps_per_epoch=100": "steps_per_epoch=20", "epochs=20": "epochs=3", "every=20": "every=5"}


def wait_for(path: Path, trainer: Forked) -> None:
    while not path.exists():
        assert trainer.poll() is None, trainer.communicate(60)


def test_the_tutorial_runs_as_it_is_written(tmp_path: Path, start_trainer: StartTrainer) -> None:
    port = str(free_port())
    page = (DOCS / "tutorial.md").read_text().replace("5555", port).replace("8090", str(free_port()))
    write_files(page, tmp_path)
    train = tmp_path / "train.py"
    for many, few in FEWER.items():
        assert many in train.read_text()
        train.write_text(train.read_text().replace(many, few))
    before = tmp_path / "before.py"
    before.write_text(before.read_text().replace("steps_per_epoch=100", "steps_per_epoch=3"))
    typed = [line.split() for line in commands(page)]
    names = "pip|python before.py|check|serve|python train.py|status|scale|python train.py|stop"
    kinds = [" ".join(line) if line[0] == "python" else line[0 if line[0] == "pip" else 1] for line in typed]
    assert kinds == names.split("|")

    def runs(words: list[str]) -> str:
        ran = subprocess.run(
            [*command({}), *words[1:]],
            cwd=tmp_path,
            env={**os.environ, "PENSTOCK_CHECK_SECONDS": "0.3"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\[(.*)\]", typed[0][2])[0].split(",")) <= set(extras)

    runs(typed[2])
    bound = {**os.environ, "PENSTOCK_SERVE_BIND": f"tcp://127.0.0.1:{port}"}
    daemon = Daemon([*command({}), *typed[3][1:]], tmp_path, tmp_path / "log", bound)
    try:
        daemon.wait_ready(1)
        assert f"ready {daemon.url}\n" in page
        trainer = start_trainer(RUN, str(tmp_path), "before.py", "train.py")
        wait_for(tmp_path / "training", trainer)
        assert "stream   train to " in runs(typed[5])
        assert runs(typed[6]) == "workers: 2 -> 16\n"
        (tmp_path / "scaled").touch()
        said, errors = trainer.communicate(120)
        assert "KeyboardInterrupt" in errors
        before, _, begun = said.partition("begins at step 0\n")
        assert "3/3 - " in before
        assert "data_ready: " in begun

        said, errors = start_trainer(RUN, str(tmp_path), "train.py").communicate(120)
        assert said.startswith("begins at step 25\nEpoch 2/3\n"), said + errors
        assert "Epoch 3/3\n20/20 - " in said
        assert "penstock: the trainer waited " in said + errors
        runs(typed[8])
        assert daemon.process.wait(60) == 0
    finally:
        stop_all([daemon])
