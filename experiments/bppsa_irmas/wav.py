"""WAV files of whole numbers (PCM) to samples and back, by the standard library's `wave`."""

from __future__ import annotations

import wave
from pathlib import Path

import torch
from torch import Tensor


def read(path: Path) -> tuple[Tensor, int]:
    """Samples `(S,)` in [-1, 1), float32, the mean of all channels; and the rate, samples a second."""
    samples, rate = read_channels(path)
    return samples.mean(1).float(), rate


def read_channels(path: Path) -> tuple[Tensor, int]:
    """Samples by channel `(S, C)` in [-1, 1), float64; and the rate, samples a second."""
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, frames = file.getparams()[:4]
            data = file.readframes(frames)
    except (wave.Error, EOFError) as error:
        told = str(error) or "it ends too early"
        raise ValueError(f"{path} cannot be read as a WAV file ({told}); a PCM file is needed: convert it") from None
    if len(data) != frames * channels * width:
        raise ValueError(
            f"{path} holds {len(data)} bytes of sound where its header promises {frames * channels * width}: "
            "it was cut short; fetch it again"
        )
    if not data:
        return torch.zeros(0, channels, dtype=torch.float64), rate
    scaled = _numbers(data, width) / float(1 << (8 * width - 1))
    return scaled.view(-1, channels), rate


def _numbers(data: bytes, width: int) -> Tensor:
    """Little-endian numbers of so many bytes, signed; single bytes count from 128."""
    places = torch.tensor([1 << (8 * place) for place in range(width)])
    numbers = (torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, width) * places).sum(1)
    half = 1 << (8 * width - 1)
    return (numbers - half if width == 1 else (numbers + half) % (2 * half) - half).double()


def write(path: Path, samples: Tensor, rate: int) -> None:
    """Samples `(S,)` or, by channel, `(S, C)`, as 16-bit numbers; what is beyond [-1, 1] is cut off."""
    whole = (samples.clamp(-1, 1) * 32767).round().to(torch.int16)
    low_high = torch.stack([whole & 0xFF, (whole >> 8) & 0xFF], -1).to(torch.uint8)  # little-endian on any machine
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.dim() == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(low_high.flatten().tolist()))
