"""Features on disk, by the content of the clip and all settings: `<settings>/<content>.npy`.

A file is whole or not there, so a run that was killed loses the clips it was at and no others.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from timeloom.app.errors import InputError
from timeloom.app.files import write_text, write_whole

FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """What features depend on, beside the clip itself."""

    net: str
    """Fingerprint of the net."""
    frames: int
    size: int
    pad: bool


class FeatureCache:
    """The features of clips under one setting."""

    def __init__(self, root: Path, settings: Settings) -> None:
        about = json.dumps({"format": FORMAT, **asdict(settings)}, sort_keys=True)
        self.folder = root / hashlib.blake2b(about.encode(), digest_size=8).hexdigest()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the folder {self.folder}: {error.strerror}; choose another cache=") from None
        if not (self.folder / "settings.json").is_file():
            write_text(self.folder / "settings.json", about + "\n")

    def place(self, clip: Path) -> Path:
        """Where the features of a clip are or will be."""
        try:
            with clip.open("rb") as file:
                return self.folder / f"{hashlib.file_digest(file, _content_hash).hexdigest()}.npy"
        except OSError as error:
            raise InputError(f"{clip}: cannot be read ({error.strerror})") from None

    @staticmethod
    def save(place: Path, features: Tensor) -> None:
        """Keep `(T, features)`."""
        data = io.BytesIO()
        numpy.save(data, features.numpy())
        write_whole(place, data.getvalue())

    @staticmethod
    def load(place: Path) -> Tensor | None:
        """The features, read from disk when they are used; None where they are not there or not whole."""
        try:
            values = numpy.load(place, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return torch.from_numpy(values)


def _content_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def default_root() -> Path:
    """Where systems keep what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "timeloom" / "video"
