"""A stand-in for IRMAS: clips of synthetic instruments in the same layout, made from a seed.

An instrument is a sum of harmonics with an envelope, vibrato and noise; a clip is a random melody of it over a
background of noise. Brightness, loudness and noise differ from clip to clip, so that a single frame tells little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments.bppsa_irmas import wav
from experiments.bppsa_irmas.clips import RATE, SECONDS

HARMONICS = 12
RELEASE = 0.03
"""Seconds in which a note ends."""


@dataclass(frozen=True)
class Instrument:
    """How notes sound.

    slope: harmonic k has strength k^-slope.
    even: what even harmonics are multiplied by.
    attack: seconds until a note is loud.
    decay: seconds until it is down to 1/e; None for a held note.
    damping: how much faster the second harmonic fades than the first, the third than the second, …
    vibrato: depth in semitones.
    noise: strength beside a tone of 1.
    """

    slope: float
    even: float = 1.0
    attack: float = 0.03
    decay: float | None = None
    damping: float = 0.0
    vibrato: float = 0.0
    noise: float = 0.01


INSTRUMENTS = {
    "cla": Instrument(slope=1.2, even=0.15, attack=0.05, noise=0.02),
    "flu": Instrument(slope=2.2, attack=0.08, vibrato=0.2, noise=0.06),
    "gac": Instrument(slope=1.2, attack=0.004, decay=0.4, damping=0.4),
    "org": Instrument(slope=1.0, attack=0.02),
    "pia": Instrument(slope=1.5, attack=0.008, decay=0.9, damping=0.1),
    "tru": Instrument(slope=0.7, attack=0.09, vibrato=0.05),
    "vio": Instrument(slope=1.0, attack=0.1, vibrato=0.4, noise=0.03),
    "voi": Instrument(slope=1.4, attack=0.12, vibrato=0.8, noise=0.04),
}


def generate(
    folder: Path, clips: int, names: tuple[str, ...] = tuple(INSTRUMENTS), rate: int = RATE, seconds: float = SECONDS
) -> None:
    """Write so many clips of each instrument below the folder."""
    generator = torch.Generator().manual_seed(0)
    for name in names:
        own = folder / name
        own.mkdir(parents=True)
        for number in range(clips):
            samples = melody(INSTRUMENTS[name], round(rate * seconds), rate, generator)
            wav.write(own / f"[{name}]{number:04d}__1.wav", samples, rate)


def melody(instrument: Instrument, length: int, rate: int, generator: torch.Generator) -> Tensor:
    """A clip `(length,)`: notes of 0.2–0.8 s over the two octaves from 220 Hz."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    brightness, notes, left = between(-0.3, 0.3), [], length
    while left > 0:
        steps = min(left, round(rate * between(0.2, 0.8)))
        notes.append(note(instrument, 220 * 2 ** between(0, 2), brightness, steps, rate, generator))
        left -= steps
    background = between(0.002, 0.05) * torch.randn(length, generator=generator)
    return between(0.2, 0.9) * (torch.cat(notes) + background)


def note(
    instrument: Instrument, pitch: float, brightness: float, steps: int, rate: int, generator: torch.Generator
) -> Tensor:
    """One note `(steps,)`; a brighter one has stronger harmonics."""
    time = torch.arange(steps, dtype=torch.float64) / rate
    swing = torch.sin(2 * math.pi * 5.5 * time) * instrument.vibrato / 12
    phase = 2 * math.pi * (pitch * 2**swing).cumsum(0) / rate
    k = torch.arange(1, HARMONICS + 1)[:, None]
    strength = k ** (brightness - instrument.slope) * torch.where(k % 2 == 0, instrument.even, 1.0)
    waves = strength * torch.sin(k * phase)
    if instrument.decay is not None:
        waves = waves * torch.exp(-time * (1 + instrument.damping * (k - 1)) / instrument.decay)
    rough = instrument.noise * torch.randn(steps, generator=generator)
    envelope = (time / instrument.attack).clamp(max=1) * ((steps / rate - time) / RELEASE).clamp(max=1)
    return (envelope * (waves.sum(0) / strength.sum() + rough)).float()
