"""Train on the digits that three hosts make together, kill one of them, and compare the stream with that of one host.

    python demo_hosts.py

If this user may create network namespaces (root may), each host is one, with its own address. Otherwise the hosts are
plain processes. The head, which the trainer reads from, has no workers of its own. Exits with 0 only if the trainer
received exactly the bytes that a single host serves. Leaves nothing behind, even if it fails or is interrupted.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prepare import prepare

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))  # for tests/processes/namespaces.py

FEEDS = [f"{HERE}/slow_digits.py:train", f"{HERE}/slow_digits.py:val"]
HOSTS = ("a", "b", "c")
PENSTOCK = [sys.executable, "-m", "penstock_server"]
KILLED, AGAIN = 4, 6  # host b is killed in the middle of epoch 4, and starts again after epoch 6


class Hosts:
    """Penstock's processes on several hosts. They end when `stack` closes, the head first."""

    def __init__(self, network, data, stack):
        self.network = network
        self.logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        self.environment = {**os.environ, "DIGITS_DIR": str(data), "TF_CPP_MIN_LOG_LEVEL": "2"}
        self.processes = {}
        stack.callback(self.end)

    def start(self, name, words, at=None):
        """Run a command on the host `name`, or on the host `at`, with its log in a file."""
        within = self.network[at or name].within if self.network else ()
        with (self.logs / name).open("a") as log:
            process = subprocess.Popen(
                [*within, *words], env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.processes[name] = process
        return process

    def serve(self, workers):
        """Start the head, and return its URL without a feed's name."""
        bind = f"tcp://{self.network['head'].address if self.network else '127.0.0.1'}:0"  # port 0: any free one
        options = ["--workers", str(workers), "--bind", bind]
        if self.network:
            options.append("--insecure")  # other hosts reach it, and there are no keys
        head = self.start("head", [*PENSTOCK, "serve", *FEEDS, *options])
        ready = [head.stdout.readline().split() for _ in FEEDS]
        if not all(ready):
            raise SystemExit("the head did not start:\n" + (self.logs / "head").read_text())
        return ready[0][1].rsplit("/", 1)[0]

    def join(self, name, url):
        """Start a host that joins the head."""
        self.start(name, [*PENSTOCK, "join", url, *FEEDS, "--workers", "2", "--memory", "64M", "--host-name", name])

    def status(self, url):
        """Return, for each joined host, its state and the bytes that the head has received from it."""
        within = self.network["head"].within if self.network else ()
        done = subprocess.run([*within, *PENSTOCK, "status", url, "--json"], capture_output=True, text=True, check=True)
        return {host["name"]: (host["state"], host["received_bytes"]) for host in json.loads(done.stdout)["hosts"]}

    def wait_for(self, names, url):
        """Wait until these hosts work."""
        deadline = time.monotonic() + 60
        while any(self.status(url).get(name, [""])[0] != "working" for name in names):
            if time.monotonic() > deadline:
                raise SystemExit("\n".join((self.logs / name).read_text() for name in ("head", *names)))

    def end(self):
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def read(url, epochs, batch_done=lambda images, labels: None, epoch_done=lambda epoch: None):
    """Read `epochs` epochs of the stream, and return the number of batches and the SHA-256 of their bytes."""
    import penstock

    found, count = hashlib.sha256(), 0
    with penstock.connect(f"{url}/train") as connection:
        for epoch in range(1, epochs + 1):
            for images, labels in connection.batches():
                found.update(images.tobytes() + labels.tobytes())
                count += 1
                batch_done(images, labels)
            epoch_done(epoch)
    return count, found.hexdigest()


def train(url, epochs):
    """Train on the feeds. Print a line of JSON in the middle and at the end of each epoch, and one at the end."""
    import keras
    from train import network

    import penstock

    keras.utils.set_random_seed(0)
    model = network()
    steps = []

    def step(images, labels):
        steps.append(model.train_on_batch(images, labels))
        if len(steps) == 20:
            print(json.dumps({"middle": True}), flush=True)

    def end(epoch):
        loss, accuracy = (sum(values) / len(steps) for values in zip(*steps, strict=True))
        print(json.dumps({"epoch": epoch, "loss": float(loss), "accuracy": float(accuracy)}), flush=True)
        model.optimizer.learning_rate = 2e-3 * (1 - epoch / epochs)
        steps.clear()

    count, found = read(url, epochs, step, end)
    accuracy = model.evaluate(penstock.dataset(f"{url}/val"), verbose=0, return_dict=True)["accuracy"]
    print(json.dumps({"batches": count, "sha256": found, "test": accuracy}), flush=True)


def show(text, color=0):
    print(f"\033[{color}m{text}\033[0m" if color and sys.stdout.isatty() else text, flush=True)


def made(before, after):
    """Return as text the share of the bytes that each host made between two calls of `Hosts.status`."""
    parts = {
        name: received - before.get(name, ("", 0))[1] for name, (state, received) in after.items() if state == "working"
    }
    whole = max(1, sum(parts.values()))
    return "   ".join(
        f"{name} {100 * parts[name] / whole:3.0f} %" if name in parts else f"{name}   -  " for name in HOSTS
    )


def with_hosts(data, network, epochs):
    """Train while three hosts work and one is killed. Return the trainer's final results."""
    with contextlib.ExitStack() as stack:
        hosts = Hosts(network, data, stack)
        url = hosts.serve(workers=0)
        show(f"  head   {url}, no workers of its own")
        for name in HOSTS:
            hosts.join(name, url)
        hosts.wait_for(HOSTS, url)
        for name in HOSTS:
            address = f"{network[name].address}, " if network else ""
            show(f"  {name}      {address}2 workers, joined")
        show("\n  epoch     loss   accuracy   made meanwhile by")
        trainer = hosts.start("trainer", [sys.executable, __file__, "--train", url, "--epochs", str(epochs)], at="head")
        last = hosts.status(url)
        epoch = 1
        for line in trainer.stdout:
            found = json.loads(line)
            if "sha256" in found:
                return found
            if "middle" in found:
                if epoch == KILLED:
                    hosts.processes["b"].kill()
                    show("            host b is killed (SIGKILL), in the middle of an epoch", 31)
                continue
            now = hosts.status(url)
            show(f"  {epoch:5}  {found['loss']:7.3f}    {found['accuracy']:.3f}     {made(last, now)}")
            last = now
            if epoch == AGAIN:
                hosts.processes["b"].wait()
                hosts.join("b", url)
                show("            host b starts again", 33)
            epoch += 1
        raise SystemExit("the trainer failed:\n" + (hosts.logs / "trainer").read_text())


def alone(data, epochs):
    """Read the stream of a single host. Return the number of batches and their SHA-256."""
    with contextlib.ExitStack() as stack:
        host = Hosts(None, data, stack)
        return read(host.serve(workers=6), epochs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.epochs)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `kill` cleans up as well
    with contextlib.ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="digits-")))
        prepare(data)
        network = laid(stack)
        show("\nThree hosts, each a network namespace" if network else "\nThree hosts, as processes of this one", 1)
        found = with_hosts(data, network, options.epochs)
        show(f"\n  {found['batches']} batches, SHA-256 {found['sha256'][:16]}..., test accuracy {found['test']:.3f}")
        show("\nOne host with six workers", 1)
        count, sha256 = alone(data, options.epochs)
        show(f"  {count} batches, SHA-256 {sha256[:16]}...")
    same = (count, sha256) == (found["batches"], found["sha256"])
    show("\nThe stream is the same, byte for byte." if same else "\nThe streams DIFFER.", 32 if same else 31)
    return 0 if same else 1


def laid(stack):
    """Return a network of namespaces for the hosts, or None if this user cannot create any."""
    from tests.processes.namespaces import Network

    try:
        return stack.enter_context(Network("head", *HOSTS))
    except OSError as error:
        show(f"no network namespaces: {error}")
        return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
