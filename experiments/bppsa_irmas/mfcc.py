"""Mel-frequency cepstral coefficients, in torch alone.

Frames of `window` samples, `hop` apart and centred at 0, hop, 2 hop, … (the ends are mirrored), are weighted by a Hann
window; the power of their spectra is gathered by triangles that are evenly spaced on the mel scale; of its logarithm,
the first coefficients of the orthonormal cosine transform remain.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

FLOOR = 1e-10
"""Power below which a band counts as silent."""


def mfcc(
    samples: Tensor, rate: int, hop: int, *, window: int = 2048, bands: int = 40, coefficients: int = 20
) -> Tensor:
    """Samples `(S,)` to features `(1 + S // hop, coefficients)`, in the samples' precision."""
    if hop < 1 or window % 2 or not 0 < coefficients <= bands:
        raise ValueError(
            f"hop must be at least 1, window even, and coefficients no more than bands; "
            f"got hop={hop}, window={window}, coefficients={coefficients}, bands={bands}"
        )
    if samples.dim() != 1 or len(samples) <= window // 2:
        raise ValueError(f"samples must be (S,) with S > {window // 2}, half a window; got {tuple(samples.shape)}")
    mirrored = pad(samples[None], (window // 2, window // 2), mode="reflect")[0]
    hann = torch.hann_window(window, dtype=samples.dtype, device=samples.device)
    power = torch.fft.rfft(mirrored.unfold(0, window, hop) * hann).abs().square()  # (T, window/2 + 1)
    energy = power @ mel_filters(rate, window, bands).to(samples)
    return energy.clamp(min=FLOOR).log() @ cosines(bands, coefficients).to(samples)


def mel_filters(rate: int, window: int, bands: int) -> Tensor:
    """Triangles `(window/2 + 1, bands)` of height 1, each from its left neighbour's centre to its right one's.

    Centres are evenly spaced in mel(f) = 2595 log10(1 + f / 700) from 0 to half the rate.
    """
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, bands + 2, dtype=torch.float64) / 2595) - 1)
    bins = torch.linspace(0, rate / 2, window // 2 + 1, dtype=torch.float64)[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins - left) / (centre - left), (right - bins) / (right - centre)
    return torch.minimum(rising, falling).clamp(min=0)


def cosines(bands: int, coefficients: int) -> Tensor:
    """The orthonormal cosine transform (DCT-II) `(bands, coefficients)`."""
    place = torch.arange(bands, dtype=torch.float64)[:, None] + 0.5
    table = torch.cos(math.pi / bands * place * torch.arange(coefficients)) * math.sqrt(2 / bands)
    table[:, 0] /= math.sqrt(2)
    return table
