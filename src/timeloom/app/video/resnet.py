"""Features of frames: the answers of a ResNet classifier, 1000 a frame for those trained on ImageNet."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from timeloom.app.errors import InputError

NETS = {f"resnet-{depth}": f"microsoft/resnet-{depth}" for depth in (18, 34, 50)}
"""Short names, and those on the hub."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the colours that the nets were trained on."""
FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
"""What of a net's repository is fetched."""
FRAMES_AT_ONCE = 32


class Extractor:
    """A ResNet that turns frames into features."""

    def __init__(self, folder: Path, device: str) -> None:
        """folder: as `fetched` gives it."""
        self.device = device
        self.net = _load(folder).eval().to(device)
        self._mean = torch.tensor(MEAN, device=device).reshape(3, 1, 1)
        self._deviation = torch.tensor(DEVIATION, device=device).reshape(3, 1, 1)

    @torch.no_grad()
    def __call__(self, frames: Tensor) -> Tensor:
        """`(N, 3, size, size)` uint8 to `(N, features)` float32."""
        parts = []
        for some in frames.split(FRAMES_AT_ONCE):
            scaled = (some.to(self.device).float() / 255 - self._mean) / self._deviation
            parts.append(self.net(scaled).logits.float().cpu())
        return torch.cat(parts)

    def padded(self, frames: Tensor, count: int) -> Tensor:
        """The features of the frames, then those of as many black frames as make `count`."""
        missing = count - len(frames)
        if missing <= 0:
            return self(frames)
        found = self(torch.cat([frames, torch.zeros_like(frames[:1])]))
        return torch.cat([found, found[-1:].expand(missing - 1, -1)])


def fingerprint(net: str) -> str:
    """What features depend on: the contents of a folder of weights, or a name on the hub."""
    folder = Path(net)
    if not folder.is_dir():
        return _hub_name(net)
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".bin")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _hub_name(net: str) -> str:
    if net in NETS:
        return NETS[net]
    if net.startswith((".", "/", "~")) or net.count("/") != 1:
        raise InputError(
            f"net={net}: no such folder; give one with a ResNet of transformers (config.json, model.safetensors), a "
            f"name on the hub, or one of {', '.join(NETS)}"
        )
    return net


def fetched(net: str) -> Path:
    """The folder with the weights of a net; those on the hub are fetched first, where they are not here already."""
    if Path(net).is_dir():
        return Path(net)
    name = _hub_name(net)
    with _library():
        from huggingface_hub import snapshot_download
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells every attempt
    for here in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=here))
        except Exception as error:  # whatever the network and the hub raise
            failure = error
            continue
        if any((folder / file).is_file() for file in FILES[1:]):
            return folder
        failure = FileNotFoundError(f"no weights in {folder}")
    raise InputError(
        f"net={net}: the weights are not on this machine, and {name} could not be fetched from the hub. Where there "
        f"is a network: hf download {name} --local-dir FOLDER; then give net=FOLDER"
    ) from failure


def _load(folder: Path) -> Any:
    with _library():
        from transformers import ResNetForImageClassification
        from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    try:
        return ResNetForImageClassification.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        said = str(error).strip().splitlines()[0]
        raise InputError(f"net={folder}: not a whole ResNet of transformers ({said}); save it there again") from error


@contextmanager
def _library() -> Iterator[None]:
    """Say what to install where an import fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(f"features of clips need {error.name}: pip install 'timeloom[video]'") from None
