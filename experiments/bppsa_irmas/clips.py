"""Sound clips in IRMAS's layout: a folder with a sub-folder of WAV files for each instrument.

IRMAS (Bosch, Janer, Fuhrmann and Herrera, 2012; "IRMAS-TrainingData") has 11 instruments and 6,705 clips of three
seconds at 44.1 kHz. Clips named `…0123__1.wav`, `…0123__2.wav` come from one recording.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments.bppsa_irmas import wav
from experiments.bppsa_irmas.mfcc import mfcc

RATE, SECONDS = 44100, 3.0
FEATURES = {
    "ours": "20 MFCC of the mean of both channels, windows of 2048 samples at every length",
    "paper": "MFCC of each of two channels without the first: 19, 12 and 6 of windows of 4096, 2048 and 1024 "
    "samples, from "
    "the longest hop to the shortest (a clip of one channel counts twice), scaled clip by clip",
}
"""Kinds of inputs, in words."""
PAPERS = ((20, 4096), (13, 2048), (7, 1024))
"""Coefficients and samples of a window, by hop."""
TEST_SHARE = 0.25


@dataclass(frozen=True)
class Clip:
    """A file, and the number of its instrument."""

    path: Path
    instrument: int

    @property
    def recording(self) -> str:
        return self.path.stem.rpartition("__")[0] or self.path.stem


def find(folder: Path, most: int) -> tuple[list[str], list[Clip]]:
    """Instruments, and at most so many clips of each, the same ones every time."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the one that holds a sub-folder for each instrument")
    files = {sub.name: _wav_files(sub) for sub in sorted(folder.iterdir()) if sub.is_dir()}
    instruments = [name for name, paths in files.items() if paths]
    if len(instruments) < 2:
        raise ValueError(
            f"{folder} must hold at least two sub-folders with WAV files, one for each instrument (cel, cla, … of "
            f"IRMAS-TrainingData); WAV files were found in {len(instruments)} of its {len(files)} sub-folders"
        )
    clips = [clip for number, name in enumerate(instruments) for clip in _mixed(files[name], number)[:most]]
    return instruments, clips


def _mixed(paths: list[Path], instrument: int) -> list[Clip]:
    """Recordings in another order than that of their names, the clips of each side by side."""
    clips = [Clip(path, instrument) for path in paths]
    recordings = sorted({clip.recording for clip in clips})
    random.Random(0).shuffle(recordings)
    place = {recording: i for i, recording in enumerate(recordings)}
    return sorted(clips, key=lambda clip: place[clip.recording])


def _wav_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".wav" and path.name[0] != ".")


def split(clips: Sequence[Clip]) -> tuple[list[Clip], list[Clip]]:
    """Clips to train on and, a quarter of each instrument's recordings, to test on: no recording is in both."""
    train: list[Clip] = []
    test: list[Clip] = []
    for instrument in sorted({clip.instrument for clip in clips}):
        own = [clip for clip in clips if clip.instrument == instrument]
        recordings = list(dict.fromkeys(clip.recording for clip in own))
        if len(recordings) < 2:
            raise ValueError(
                f"{own[0].path.parent} has clips of one recording only, at least two are needed: one to train on, one "
                "to test on; add files, or take more clips"
            )
        held = set(recordings[: max(1, round(TEST_SHARE * len(recordings)))])
        for clip in own:
            (test if clip.recording in held else train).append(clip)
    return train, test


def features(
    clips: Iterable[Clip], hops: Sequence[int], rate: int = RATE, seconds: float = SECONDS, kind: str = "ours"
) -> tuple[dict[int, Tensor], Tensor]:
    """MFCC `(T, N, D)` by hop, T = 1 + samples // hop, and the instruments `(N,)`; longer clips are cut.

    kind: of FEATURES. The paper's differ by hop: its longest hop has the widest window and the most coefficients.
    """
    length = round(rate * seconds)
    found: dict[int, list[Tensor]] = {hop: [] for hop in hops}
    target = []
    for clip in clips:
        samples, its_rate = wav.read_channels(clip.path)
        if its_rate != rate or len(samples) < length:
            raise ValueError(
                f"{clip.path} has {len(samples)} samples at {its_rate} Hz; at least {length} at {rate} Hz are needed"
            )
        for place, hop in enumerate(hops):
            if kind == "ours":
                found[hop].append(mfcc(samples[:length].mean(1).float(), rate, hop))
            else:
                found[hop].append(_papers(samples[:length], rate, hop, *PAPERS[min(place, len(PAPERS) - 1)]))
        target.append(clip.instrument)
    return {hop: torch.stack(one, 1) for hop, one in found.items()}, torch.tensor(target)


def _papers(samples: Tensor, rate: int, hop: int, coefficients: int, window: int) -> Tensor:
    """Of `(S, C)`, `(T, 2 (coefficients − 1))`: the first coefficient, the loudness, is left out; each of the others
    has mean 0 and deviation 1 over the clip.
    """
    both = samples[:, :2] if samples.shape[1] > 1 else samples.expand(-1, 2)
    parts = [
        mfcc(one.float().contiguous(), rate, hop, window=window, coefficients=coefficients)[:, 1:]
        for one in both.unbind(1)
    ]
    found = torch.cat(parts, 1)
    return (found - found.mean(0)) / found.std(0, correction=0).clamp(min=1e-6)
