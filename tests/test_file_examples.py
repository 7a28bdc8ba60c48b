"""The examples of data files run as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "files"
NEEDS = {"image_folder": "PIL", "parquet": "pyarrow", "tar_shards": "PIL"}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(example.stem, "numpy"))
    found = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert "2000 samples of {'image': uint8[None, 8, 8], 'label': int64[None]}" in found.stdout
