"""What gpu.py needs of PyTorch: a training step, and the ways to feed it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

LABELS = {
    "tensor": "a tensor on the GPU",
    "penstock": "Penstock, shared memory",
    "pinned": "Penstock, pinned by a DataLoader",
    "loader": "DataLoader with as many workers, pinned",
    "generator": "DataLoader without workers, pinned",
}
NEEDS = "the driver, and PyTorch and torchvision for CUDA"


def sees_gpu() -> bool:
    return torch.cuda.is_available()


def step_of(side: int, device: str, *, tiny: bool) -> Callable[[Any], Any]:
    """Return a training step. It takes a batch of images and labels, and returns the loss."""
    place = _place(device)
    if tiny:
        layers = [torch.nn.Conv2d(3, 4, 3, stride=4), torch.nn.Flatten(), torch.nn.LazyLinear(1000)]
        model = torch.nn.Sequential(*layers)
        model(torch.zeros(1, 3, side, side))
    else:
        import torchvision

        torch.backends.cudnn.benchmark = True
        model = torchvision.models.resnet50()
    model = model.to(place, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(batch: Any) -> Any:
        images, labels = (part.to(place, non_blocking=True) for part in batch)
        with torch.autocast(place.type, torch.bfloat16):
            logits = model(images.permute(0, 3, 1, 2).to(torch.bfloat16) / 255)
            loss = torch.nn.functional.cross_entropy(logits, labels.long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def sources(
    connect: Callable[[], Any], side: int, batch_size: int, workers: int, device: str
) -> dict[str, Iterator[Any]]:
    """Return the ways to feed, by their names in LABELS."""
    batches, others = iter(connect().torch()), connect().torch()
    pinned = device == "gpu"
    return {
        "tensor": _on_device(device, next(batches)),
        "penstock": batches,
        "pinned": iter(DataLoader(others, batch_size=None, pin_memory=pinned)),
        "loader": iter(DataLoader(_Samples(), batch_size, num_workers=workers, pin_memory=pinned)),
        "generator": iter(DataLoader(_Samples(), batch_size, pin_memory=pinned)),
    }


def _place(device: str) -> torch.device:
    return torch.device("cuda" if device == "gpu" else "cpu")


def _on_device(device: str, first: tuple[Any, Any]) -> Iterator[Any]:
    """Repeat one batch on the device."""
    batch = tuple(part.to(_place(device)) for part in first)
    while True:
        yield batch


class _Samples(IterableDataset[Any]):
    """The generator's samples; each worker of a DataLoader makes those of every n-th split."""

    def __iter__(self) -> Iterator[Any]:
        import gpu_feed

        worker = get_worker_info()
        return gpu_feed.stream() if worker is None else gpu_feed.stream(worker.id, worker.num_workers)
