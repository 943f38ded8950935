"""The features of many clips, by several processes; each clip is on disk as soon as it is done."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from timeloom.app.errors import InputError
from timeloom.app.video.cache import FeatureCache
from timeloom.app.video.decode import read_frames
from timeloom.app.video.resnet import Extractor


@dataclass(frozen=True)
class Work:
    """What every process is told."""

    net: Path
    """Folder of its weights."""
    device: str
    frames: int
    size: int
    pad: bool
    threads: int = 0
    """Of torch in each process; 0 leaves them alone."""


Job = tuple[Path, Path]
"""A clip, and where its features go."""
_extractor: Extractor | None = None
_work: Work | None = None


def extract(jobs: Sequence[Job], work: Work, workers: int, show: Callable[[int], None]) -> dict[Path, str]:
    """Compute what is missing; what is wrong with each clip that could not be read.

    show: told how many are done.
    """
    failed: dict[Path, str] = {}
    with _processes(work, min(workers, len(jobs))) as run:
        for done, (clip, problem) in enumerate(run(jobs), start=1):
            if problem:
                failed[clip] = problem
            show(done)
    return failed


@contextmanager
def _processes(work: Work, workers: int) -> Iterator[Callable[[Sequence[Job]], Iterator[tuple[Path, str]]]]:
    """Something that runs jobs, in this process or in several."""
    if workers <= 1:
        extractor = Extractor(work.net, work.device)
        yield lambda jobs: ((clip, _one(extractor, work, clip, place)) for clip, place in jobs)
        return
    threads = max(1, torch.get_num_threads() // workers)
    told = Work(work.net, work.device, work.frames, work.size, work.pad, threads)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(told,))

    def run(jobs: Sequence[Job]) -> Iterator[tuple[Path, str]]:
        futures = {pool.submit(_job, clip, place): clip for clip, place in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise InputError(
                "a process that computed features died, perhaps for want of memory; the finished features are kept: "
                "run it again with fewer workers=, or with a smaller net="
            ) from None

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)


def _start(work: Work) -> None:
    """Set up a process: it ends with its parent, and leaves Ctrl-C to it."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(work.threads)
    _work = work


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _job(clip: Path, place: Path) -> str:
    global _extractor
    assert _work is not None
    if _extractor is None:  # here, where an error reaches the parent
        _extractor = Extractor(_work.net, _work.device)
    return _one(_extractor, _work, clip, place)


def _one(extractor: Extractor, work: Work, clip: Path, place: Path) -> str:
    """The features of a clip, kept; or what is wrong with it."""
    try:
        frames = read_frames(clip, work.frames, work.size)
    except InputError as error:
        return str(error)
    FeatureCache.save(place, extractor.padded(frames, work.frames) if work.pad else extractor(frames))
    return ""
