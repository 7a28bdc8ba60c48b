"""Train with PyTorch on a feed, save the position in the stream with the model, and resume.

python train_torch.py
"""

import io
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import penstock

FEED = f"{Path(__file__).parent}/line.py:feed"


def train(model, batches, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in islice(DataLoader(batches, batch_size=None), steps):
        loss = torch.nn.functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    model, checkpoint = torch.nn.Linear(1, 1), io.BytesIO()
    with penstock.connect(FEED, workers=2) as connection:
        batches = connection.torch()
        train(model, batches, steps=50)
        torch.save({"model": model.state_dict(), "data": batches.state_dict()}, checkpoint)

    checkpoint.seek(0)  # as in another process, after a crash
    saved = torch.load(checkpoint)
    with penstock.connect(FEED, workers=2) as connection:
        batches = connection.torch()
        model.load_state_dict(saved["model"])
        batches.load_state_dict(saved["data"])
        print("resumed at step", saved["data"]["consumed"])
        error = train(model, batches, steps=50)
    print("the error is", "below" if error < 0.01 else "above", 0.01)


if __name__ == "__main__":
    main()
