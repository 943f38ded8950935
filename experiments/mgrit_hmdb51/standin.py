"""Clips in HMDB51's layout, drawn here: moving shapes, six classes, with split files; and a net to look at them.

Two pairs of classes show the same pictures in the opposite order, so that no single frame tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy
import torch

from timeloom.app.video.clips import SPLITS

CLASSES = ("approach", "leave", "brighten", "fade", "blink", "cross")
WIDTH, HEIGHT = 96, 72


def frames(kind: str, count: int, random: numpy.random.Generator) -> Iterator[numpy.ndarray]:
    """A disc on a dark, noisy ground, `(HEIGHT, WIDTH, 3)` uint8 each: it grows, shrinks, dims or moves."""
    colour = random.uniform(0.6, 1.0, 3)
    x, y = random.uniform(0.4, 0.6, 2) * (WIDTH, HEIGHT)
    rows, columns = numpy.mgrid[:HEIGHT, :WIDTH]
    period = random.integers(5, 8)
    for step in range(count):
        done = step / max(count - 1, 1)
        back = 1 - done if kind in ("leave", "fade") else done
        radius = 4 + 26 * back if kind in ("approach", "leave") else 16
        light = {"brighten": 0.15 + 0.85 * back, "fade": 0.15 + 0.85 * back}.get(kind, 1.0)
        if kind == "blink" and step // period % 2:
            light = 0.0
        centre = (-20 + done * (WIDTH + 40), y) if kind == "cross" else (x, y)
        disc = numpy.hypot(columns - centre[0], rows - centre[1]) < radius
        ground = random.uniform(0, 0.25, (HEIGHT, WIDTH, 1))
        picture = numpy.where(disc[:, :, None], light * colour, ground)
        yield (255 * picture.clip(0, 1)).astype(numpy.uint8)


def write_clip(path: Path, kind: str, count: int, seed: int) -> None:
    """One clip of `count` frames, encoded as HMDB51's are."""
    random = numpy.random.default_rng(seed)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(30))
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = WIDTH, HEIGHT, "yuv420p", 400_000
        for picture in frames(kind, count, random):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def write_clips(folder: Path, each: int, count: int, classes: tuple[str, ...] = CLASSES) -> Path:
    """`each` clips of every class, some shorter than `count` frames, and split files; where the clips are."""
    clips = folder / "clips"
    (folder / SPLITS).mkdir(parents=True, exist_ok=True)
    for label, kind in enumerate(classes):
        (clips / kind).mkdir(parents=True, exist_ok=True)
        lines = []
        for number in range(each):
            length = count - (number % 4) * count // 10
            write_clip(clips / kind / f"{kind}_{number}.avi", kind, length, 1000 * label + number)
            lines.append(f"{kind}_{number}.avi {2 if number % 10 >= 7 else 1}")
        (folder / SPLITS / f"{kind}_test_split1.txt").write_text("\n".join(lines) + "\n")
    return clips


def write_net(
    folder: Path, features: int = 1000, width: int = 16, stages: int = 3, shape: dict[str, Any] | None = None
) -> Path:
    """A ResNet with random weights, in transformers' format: a few basic blocks, or of a shape such as ResNet-34's."""
    from transformers import ResNetConfig, ResNetForImageClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    small = {"hidden_sizes": [width * 2**i for i in range(stages)], "depths": [1] * stages, "layer_type": "basic"}
    more = {"embedding_size": width, **small} if shape is None else shape
    net = ResNetForImageClassification(ResNetConfig(**more, num_labels=features))
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, torch.nn.Conv2d):  # keeps the spread of what it is given, whatever the default does
                fan = math.prod(module.weight.shape[1:])
                module.weight.normal_(0, math.sqrt(2 / fan))
        net.classifier[-1].weight.normal_(0, 1)
        if shape is not None:
            _measure_norms(net)
    net.save_pretrained(folder)
    return folder


def _measure_norms(net: torch.nn.Module) -> None:
    """Give the norms the means and spreads of noise: else every block of a deep net doubles what it is given."""
    norms = [module for module in net.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    net.train()(torch.rand(8, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    net.eval()
    for norm in norms:
        norm.momentum = 0.1
