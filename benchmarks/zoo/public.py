"""Public trained weights: silero-vad's LSTM of 128 units, which detects speech, on generated talk.

They are read from a file that the user names or from the installed package; none are stored here.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

UNITS = 128
PIECE, CONTEXT, RATE = 512, 64, 16_000
"""Samples per piece, samples of the piece before it that are repeated, and samples per second."""
AT_ONCE = 4096
"""Pieces that the convolutions process in one call."""


def weights_file(given: Path | None) -> Path | None:
    """The file silero_vad.jit that is named, or the installed package's; None if there is none."""
    if given is not None:
        if not given.is_file():
            raise FileNotFoundError(f"--weights {given}: no such file; expected silero-vad's silero_vad.jit")
        return given
    package = find_spec("silero_vad")
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0]) / "data" / "silero_vad.jit"


def speech_lstm(file: Path) -> tuple[dict[str, Tensor], Any]:
    """The weights by the names of torch's layer, and the function from pieces `(N, PIECE + CONTEXT)` to its inputs."""
    heard = torch.jit.load(file, map_location="cpu")._model.eval()
    rnn = heard.decoder.rnn.state_dict()
    weights = {f"{name}_l0": rnn[name].detach() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    return weights, lambda pieces: heard.encoder(heard.stft(pieces)).squeeze(-1)


def talk(steps: int, batch: int, hear: Any, generator: torch.Generator) -> Tensor:
    """Features of buzzing syllables in noise, with pauses, at different places in every sequence: `(T, B, 128)`."""
    time = torch.arange(steps * PIECE) / RATE + 7 * torch.arange(batch)[:, None]
    phase = 2 * math.pi * (110 * time - 16 * torch.cos(2 * math.pi * 0.3 * time))
    buzz = torch.stack([torch.sin(k * phase) / k for k in range(1, 12)]).sum(0)
    syllables = torch.relu(torch.sin(2 * math.pi * 4 * time)) * (torch.sin(2 * math.pi * 0.07 * time) > 0)
    wave = 0.1 * syllables * buzz + 0.003 * torch.randn(time.shape, generator=generator)
    pieces = torch.nn.functional.pad(wave, (CONTEXT, 0)).unfold(1, PIECE + CONTEXT, PIECE).transpose(0, 1)
    with torch.no_grad():
        found = torch.cat([hear(some) for some in pieces.flatten(0, 1).split(AT_ONCE)])
    return found.view(steps, batch, UNITS)
