"""Two sources of people who use PyTorch. Neither knows about workers of another loader."""

from collections.abc import Iterator
from typing import Any

import torch
from sources import PATHS, SAMPLES, of_files, sample
from torch.utils.data import Dataset, IterableDataset


def tensors(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {"image": torch.from_numpy(row["image"]), "label": torch.tensor(int(row["label"]))}


class Rows(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return tensors(sample(int(number)))


class Stream(IterableDataset):
    """Does not ask for `get_worker_info()`."""

    def __iter__(self) -> Iterator[Any]:
        return map(tensors, of_files(PATHS))
