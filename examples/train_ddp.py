"""Train with PyTorch's DistributedDataParallel. Each rank reads its part of one stream, and resumes after a failure.

penstock serve line.py:feed
torchrun --standalone --nproc-per-node 2 --max-restarts 3 train_ddp.py tcp://localhost:5555/feed

If a rank fails, torchrun ends the others and starts all again, and they continue where the last checkpoint was saved.
"""

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import penstock

STEPS, SAVE_EVERY = 200, 50


def train(url, checkpoint):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    state, done = None, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        state, done = saved["data"], saved["data"]["consumed"]
        print(f"rank {dist.get_rank()} resumes at step {done}", flush=True)

    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    with penstock.connect(url, **ranks, state=state) as connection:
        for step, batch in enumerate(islice(connection.torch(), STEPS - done), done + 1):
            loss = torch.nn.functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
                save({"model": model.state_dict(), "data": connection.state_dict()}, checkpoint)
                print(f"saved at step {step}", flush=True)
    weight, bias = (parameter.item() for parameter in model.parameters())
    print(f"rank {dist.get_rank()} has learned y = {weight:.5f} x + {bias:.5f}", flush=True)


def save(saved, checkpoint):
    """Replace the checkpoint, so that it is never half written."""
    written = checkpoint.with_suffix(".new")
    torch.save(saved, written)
    os.replace(written, checkpoint)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    given = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(given.url, given.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
