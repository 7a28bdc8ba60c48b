"""The examples of data files run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import StartTrainer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "files"
NEEDS = {"image_folder": "PIL", "parquet": "pyarrow", "tar_shards": "PIL"}


RUN = "import os, runpy, sys; os.chdir(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_example_runs(example: Path, tmp_path: Path, start_trainer: StartTrainer) -> None:
    pytest.importorskip(NEEDS.get(example.stem, "numpy"))
    running = start_trainer(RUN, str(tmp_path), str(example))
    said, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    image, label = ("[None, 8, 8, 1]", "int32") if example.stem == "image_folder" else ("[None, 8, 8]", "int64")
    assert f"2000 samples of {{'image': uint8{image}, 'label': {label}[None]}}" in said
