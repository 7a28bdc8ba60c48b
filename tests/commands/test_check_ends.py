"""`penstock check` that is told to end leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def test_sigterm_ends_a_check_like_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "feeds.py").write_text(
        "import time\nfrom penstock_server import Feed\n\n\ndef rows():\n    while True:\n        time.sleep(0.1)\n"
        "        yield 1\n\n\nfeed = Feed(rows, batch_size=2)\n"
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code = "from penstock_command import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "check", "feeds.py:feed", "--seconds", "60"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as checking:
        while not list(temporary.glob("penstock-check-*")):
            assert checking.poll() is None
            time.sleep(0.05)
        checking.terminate()
        assert checking.wait() == 130
    assert not list(temporary.iterdir())
