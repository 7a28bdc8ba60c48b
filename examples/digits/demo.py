"""A complete example on one machine: write data, serve it, train on it in another process, stop.

    python demo.py

Exits with 0 only if the daemon stopped cleanly and the test accuracy is above 0.97. Leaves nothing behind, even if it
fails or is interrupted.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from prepare import prepare

HERE = Path(__file__).resolve().parent


@contextmanager
def daemon(data):
    """Serve the two feeds with two workers, and yield the daemon's URL, without a feed's name."""
    command = [sys.executable, "-m", "penstock_server", "serve"]
    command += [f"{HERE}/digits.py:train", f"{HERE}/digits.py:val"]
    command += ["--workers", "2", "--bind", "tcp://127.0.0.1:0"]  # port 0: any free one
    process = subprocess.Popen(command, env={**os.environ, "DIGITS_DIR": str(data)}, stdout=subprocess.PIPE, text=True)
    try:
        ready = [process.stdout.readline().split() for _ in ("train", "val")]
        if not all(ready):  # end of its output: it exited, and said why on stderr
            raise SystemExit("the daemon did not start")
        print("serving", *(url for _, url in ready))
        yield ready[0][1].rsplit("/", 1)[0]
    finally:
        process.terminate()  # SIGTERM
        try:
            status = process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
    if status != 0:
        raise SystemExit(f"the daemon ended with status {status}")
    print("the daemon stopped cleanly")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `kill` cleans up as well
    with tempfile.TemporaryDirectory(prefix="digits-") as data:
        prepare(Path(data))
        with daemon(data) as url:
            trainer = subprocess.run([sys.executable, HERE / "train.py", url])
    return trainer.returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
