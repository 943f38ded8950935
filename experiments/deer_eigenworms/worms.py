"""Series of the shape of EigenWorms, made here: 17,984 steps, 6 channels, 5 classes.

EigenWorms (UEA archive) holds the motion of 259 worms of five strains as amplitudes of six body shapes. These stand in
for it: waves run along the body, forwards and now and then backwards, and the strains differ in how often they turn
back and how fast their waves are, by less than one worm differs from the next.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import torch
from torch import Tensor

STEPS, CHANNELS, CLASSES = 17_984, 6, 5
SEGMENT = 64
"""Steps between two chances to turn back."""


def worm(strain: int, steps: int, generator: torch.Generator) -> Tensor:
    """One series `(T, 6)`."""
    segments = math.ceil(steps / SEGMENT)
    backwards = 0.1 + 0.1 * strain
    direction = torch.where(torch.rand(segments, generator=generator) < backwards, -1.0, 1.0)
    speed = (0.12 + 0.06 * strain) * (1 + 0.1 * torch.randn(1, generator=generator))
    drift = 0.05 * torch.randn(steps, generator=generator)
    phase = (direction.repeat_interleave(SEGMENT)[:steps] * speed + drift).cumsum(0)
    phase += 2 * math.pi * torch.rand(1, generator=generator)
    shapes = [torch.sin(phase), torch.cos(phase), torch.sin(2 * phase) / 2, torch.cos(2 * phase) / 2]
    posture = torch.randn(steps, 2, generator=generator).cumsum(0) / math.sqrt(steps)
    return torch.cat([torch.stack(shapes, 1), posture], 1) + 0.2 * torch.randn(steps, CHANNELS, generator=generator)


def write_worms(folder: Path, each: int, steps: int) -> Path:
    """A folder that `timeloom train` reads, `each` worms a strain; for others than STEPS, shorter ones."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    lines = ["file,label"]
    for strain in range(CLASSES):
        for number in range(each):
            name = f"strain{strain + 1}_{number}.npy"
            numpy.save(folder / name, worm(strain, steps, generator).numpy())
            lines.append(f"{name},strain {strain + 1}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder
