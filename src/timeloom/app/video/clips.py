"""Clips in a folder: one sub-folder a class, or none of them where the classes are not known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from timeloom.app.data.records import Split
from timeloom.app.errors import InputError

SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv")
SUBSETS = {"hmdb6": ("chew", "eat", "jump", "run", "sit", "walk")}
"""Named choices of classes: those of the multigrid paper's small set."""
SPLITS = "testTrainMulti_7030_splits"
"""What the official archive calls the folder of split files; it may lie among the class folders."""


@dataclass(frozen=True)
class Clip:
    """A video file and what is known about it."""

    path: Path
    label: str | None
    """Its class; None where the folder has no class folders."""
    split: Split | None = None

    @property
    def name(self) -> str:
        return self.path.name if self.label is None else f"{self.label}/{self.path.name}"


def find_clips(folder: Path, classes: str) -> list[Clip]:
    """All clips of the chosen classes (`all`, `hmdb6`, or names joined by `+`), in the order of their names."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the one with a sub-folder of clips for each class")
    if own := _videos(folder):
        return [Clip(path, None) for path in own]
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and path.name != SPLITS)
    by_class = {path.name: _videos(path) for path in inner}
    if not any(by_class.values()):
        raise InputError(f"{folder}: no clips ({' '.join(SUFFIXES)}) in it or in its sub-folders")
    if classes != "all":
        by_class = {name: by_class.get(name, []) for name in SUBSETS.get(classes, classes.split("+"))}
    for name, files in by_class.items():
        if not (folder / name).is_dir():
            raise InputError(f"{folder}: no folder for the class {name!r}; add it, or choose others with classes=a+b")
        if not files:
            raise InputError(
                f"{folder / name}: a class folder without clips; fill or remove it, or choose others with classes=a+b"
            )
    return [Clip(path, name) for name, files in by_class.items() for path in files]


def holds_clips(folder: Path) -> bool:
    """Whether there are clips in a folder or in its sub-folders."""
    return any(_videos(path) for path in (folder, *(inner for inner in folder.iterdir() if inner.is_dir())))


def _videos(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
