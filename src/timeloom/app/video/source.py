"""`video:FOLDER,option=value,…`: clips in class folders as series of features, with the official splits of HMDB51."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from timeloom.app.data.records import Record, Table
from timeloom.app.device import device_of
from timeloom.app.errors import InputError
from timeloom.app.named_options import split_spec, with_options
from timeloom.app.video.cache import FeatureCache, Settings, default_root
from timeloom.app.video.clips import Clip, find_clips
from timeloom.app.video.extract import Work, extract
from timeloom.app.video.resnet import fetched, fingerprint
from timeloom.app.video.splits import assign, find_splits


@dataclass(frozen=True)
class Video:
    """Options of clips."""

    splits: str = ""
    """Folder of the split files; by default testTrainMulti_7030_splits in or beside the clips. random: no files."""
    split: int = 1
    """Which of the official splits."""
    classes: str = "all"
    """all, hmdb6 (the multigrid paper's six) or names joined by +."""
    net: str = "resnet-18"
    """resnet-18, resnet-34, resnet-50, a name on the hub, or a folder with a ResNet of transformers."""
    frames: int = 128
    """Steps of a series: later frames are left out."""
    size: int = 240
    """Height and width that frames are scaled to."""
    pad: bool = True
    """Black frames after the end of shorter clips; false keeps their lengths."""
    skip: bool = False
    """Leave out clips that cannot be decoded, in place of an error."""
    workers: int = 0
    """Processes that decode and compute; 0 for one a core."""
    device: str = "cpu"
    """Where they compute: cpu, cuda …"""
    cache: str = ""
    """Folder that keeps the features; by default timeloom/video in the user's cache."""

    def __post_init__(self) -> None:
        for name, least in (("split", 1), ("frames", 1), ("size", 32), ("workers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def load_video(spec: str) -> Table:
    """The clips of `FOLDER,option=value,…`."""
    return read_clips(*_parsed(spec))


def prepare_video(spec: str, index: int, count: int) -> None:
    """One of `count` processes' share of the features that are missing, into the cache. What cannot be computed is left
    for `load_video` to tell of.
    """
    with suppress(InputError):
        folder, options = _parsed(spec)
        _, places, missing = _cached(find_clips(folder, options.classes)[index::count], options)
        jobs = [(path, places[path]) for path in missing.values()]
        if jobs:
            _compute(jobs, replace(options, workers=options.workers or max(1, _cores() // count)), shown=index == 0)


def _parsed(spec: str) -> tuple[Path, Video]:
    name, _, rest = spec.partition(",")
    if not name or "=" in name:
        raise InputError(f"video:{spec}: expected video:FOLDER,option=value,option=value")
    folder = Path(name).expanduser()
    given = split_spec(f"video:{rest}")[1]
    for key in given.keys() & {"splits", "net", "cache"}:
        given[key] = os.path.expanduser(given[key])  # inside a word the shell leaves ~ alone
    return folder, with_options(Video(), given, "video")


def read_clips(folder: Path, options: Video) -> Table:
    """The clips in a folder as series; features that are not in the cache are computed first."""
    clips = find_clips(folder, options.classes)
    if clips[0].label is not None and options.splits != "random":
        clips = assign(clips, Path(options.splits) if options.splits else find_splits(folder), options.split)
    return Table(str(folder), None if clips[0].label is None else "classification", _records(clips, options))


def _cached(clips: list[Clip], options: Video) -> tuple[FeatureCache, dict[Path, Path], dict[Path, Path]]:
    """The cache, the place of every clip in it, and the clips of places where there is nothing yet."""
    settings = Settings(fingerprint(options.net), options.frames, options.size, options.pad)
    cache = FeatureCache(Path(options.cache) if options.cache else default_root(), settings)
    places = {clip.path: cache.place(clip.path) for clip in clips}
    return cache, places, {place: path for path, place in places.items() if cache.load(place) is None}


def _records(clips: list[Clip], options: Video) -> list[Record]:
    cache, places, missing = _cached(clips, options)
    failed = _compute([(path, place) for place, path in missing.items()], options) if missing else {}
    if failed and not options.skip:
        first, *others = failed.values()
        more = f" ({len(others)} more clips cannot be used: {_some(list(failed)[1:])})" if others else ""
        kept = len(clips) - len(failed)
        raise InputError(f"{first}, or set skip=true{more}; the features of the other {kept} clips are kept")
    bad = {places[path] for path in failed}
    records = []
    for clip in clips:
        if places[clip.path] in bad:
            continue
        values = cache.load(places[clip.path])
        if values is None:
            raise InputError(f"{places[clip.path]}: vanished while it was in use; run it again")
        records.append(Record(clip.name, values, clip.label, clip.split))
    return records


def _compute(jobs: list[tuple[Path, Path]], options: Video, shown: bool = True) -> dict[Path, str]:
    """Show a bar while the features of clips are computed, unless another process does."""
    try:
        import av  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("decoding clips needs av: pip install 'timeloom[video]'") from None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn(), TimeRemainingColumn())
    device_of(options.device, "device=")
    work = Work(fetched(options.net), options.device, options.frames, options.size, options.pad)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with Progress(*columns, console=console, disable=not shown) as progress:
        bar = progress.add_task("features of clips", total=len(jobs))
        failed = extract(jobs, work, options.workers or _cores(), lambda done: progress.update(bar, completed=done))
    if failed and options.skip and shown:
        console.print(f"{len(failed)} clips cannot be decoded and are left out: {_some(list(failed))}", markup=False)
    return failed


def _cores() -> int:
    """Those that this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _some(paths: list[Path], most: int = 5) -> str:
    """The first few names."""
    names = [f"{path.parent.name}/{path.name}" for path in paths[:most]]
    return ", ".join([*names, "…"] if len(paths) > most else names)
