"""CIFAR-10: the binary or the pickled files where they are given, and images of the same shape made here where not."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CLASSES, SHAPE = 10, (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
"""Bytes of an image in the binary files: its class, then red, green and blue."""
TRAIN, TEST = [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]
MEAN, SPREAD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the set's colours."""
NAME, STAND_IN = "CIFAR-10", "generated stand-in for CIFAR-10"


def load(folder: Path, part: str = "train", most: int | None = None) -> tuple[Tensor, Tensor]:
    """Images `(N, 3, 32, 32)`, scaled by the set's mean and spread, and classes `(N,)`.

    folder: cifar-10-batches-bin (data_batch_1.bin …) or cifar-10-batches-py (data_batch_1 …).
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give cifar-10-batches-bin or cifar-10-batches-py")
    wanted = TRAIN if part == "train" else TEST
    files = [file for name in wanted for file in (folder / f"{name}.bin", folder / name) if file.is_file()]
    if not files:
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise ValueError(f"{folder} has none of {', '.join(wanted)} (with .bin or without); it holds {held}")
    pictures, labels = zip(*(_binary(file) if file.suffix == ".bin" else _pickled(file) for file in files), strict=True)
    images, classes = torch.cat(pictures)[:most], torch.cat(labels)[:most]
    mean, spread = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, SPREAD))
    return (images.float() / 255 - mean) / spread, classes.long()


def _binary(file: Path) -> tuple[Tensor, Tensor]:
    data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    if data.numel() == 0 or data.numel() % RECORD:
        raise ValueError(
            f"{file} has {data.numel()} bytes, and an image of CIFAR-10 {RECORD}: it was cut short, or is another file"
        )
    records = data.view(-1, RECORD)
    return _checked(file, records[:, 1:].view(-1, *SHAPE), records[:, 0])


class _Plain(pickle.Unpickler):
    """Arrays and plain values only: a pickle may name any function, and would call it."""

    ALLOWED = ("numpy", "_codecs")

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _pickled(file: Path) -> tuple[Tensor, Tensor]:
    try:
        with file.open("rb") as opened:
            held = _Plain(opened, encoding="bytes").load()
        images, labels = torch.as_tensor(held[b"data"]), torch.as_tensor(held[b"labels"])
    except (pickle.UnpicklingError, KeyError, TypeError, EOFError) as error:
        raise ValueError(
            f"{file} is no file of CIFAR-10's pickles ({error}); fetch cifar-10-python.tar.gz again"
        ) from None
    return _checked(file, images.view(-1, *SHAPE), labels)


def _checked(file: Path, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if len(images) != len(labels) or int(labels.max()) >= CLASSES:
        raise ValueError(
            f"{file} has {len(images)} images and {len(labels)} classes up to {int(labels.max())}; expected 10 classes"
        )
    return images, labels


def generated(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ten classes of smooth patterns, shifted and noisy: `(N, 3, 32, 32)` and `(N,)`."""
    patterns = F.interpolate(
        torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(1)), size=(32, 32), mode="bicubic"
    )
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, CLASSES, (count,), generator=generator)
    shifts = torch.randint(-4, 5, (count, 2), generator=generator).tolist()
    images = torch.stack([patterns[k].roll(shift, (-2, -1)) for k, shift in zip(classes.tolist(), shifts, strict=True)])
    return images + 0.5 * torch.randn(images.shape, generator=generator), classes


def given(folder: Path | None, train: int, test: int) -> tuple[str, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What the images are, those to train on, and those to test on: at most so many."""
    if folder is None:
        return STAND_IN, generated(train, 2), generated(test, 3)
    return f"{NAME} ({folder.name})", load(folder, "train", train), load(folder, "test", test)
