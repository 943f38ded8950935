"""Model a guitar amplifier with neural-amp-modeler's LSTM, by full back-propagation through 262,144 samples at once.

The practice is to cut the recording into blocks of 32,768 samples and to run the first 8,192 of each without gradients:
cuDNN refuses more than 65,535 steps. The same network, data and seed are trained that way by torch's layer, and over
the whole recording by timeloom, for the same time each. Without a recording, a guitar and a circuit are generated.

    python examples/amplifier/amplifier.py --out amplifier
    python examples/amplifier/amplifier.py --recording dry.wav wet.wav --device cuda
"""

from __future__ import annotations

import argparse
import json
import math
import wave
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

import timeloom as tl

RATE = 48_000  # samples a second


def network(units: int = 18, layers: int = 3) -> nn.Module:
    try:
        from nam.models.recurrent import LSTM
    except ImportError:
        print("neural-amp-modeler is not installed (pip install neural-amp-modeler): a stand-in of its shape runs")
        model = nn.Module()
        model._core, model._head = nn.LSTM(1, units, layers, batch_first=True), nn.Linear(units, 1)
        for bias in (value.data for name, value in model._core.named_parameters() if "bias" in name):
            bias[: 2 * units] += torch.tensor([-2.0, 2.0]).repeat_interleave(units)
        return model
    return LSTM(units, num_layers=layers)


def guitar(samples: int) -> Tensor:
    """Plucked notes, `(samples,)`: decaying harmonics, a new note every quarter of a second or so."""
    signal, at = torch.zeros(samples), 0
    while at < samples:
        time, pitch = torch.arange(samples - at) / RATE, 82.4 * 2 ** (float(torch.randint(30, ())) / 12)
        for k in range(1, 9):
            signal[at:] += 0.4 * k**-1.5 * torch.sin(2 * math.pi * pitch * k * time) * torch.exp(-time * (2 + k))
        at += int(RATE * (0.1 + 0.3 * float(torch.rand(()))))
    return signal.clamp(-1, 1)


def circuit(dry: Tensor) -> Tensor:
    """A supply that sags with 30 ms of loudness, an asymmetric clipper, a tone filter."""

    def smooth(x: Tensor, seconds: float) -> Tensor:
        keep = torch.tensor(math.exp(-1 / (RATE * seconds)), dtype=torch.float64)
        return tl.linear_scan(keep.expand(len(x), 1), (1 - keep) * x.double().unsqueeze(-1)).squeeze(-1)

    sagging = 8 / (1 + 2 * smooth(dry.abs(), 0.03))
    clipped = torch.tanh(sagging * (dry - smooth(dry, 0.004)) + 0.2) - math.tanh(0.2)
    return 0.5 * smooth(clipped, 1e-4).float()


def read(path: Path) -> Tensor:
    with wave.open(str(path)) as file:
        if (file.getsampwidth(), file.getnchannels()) != (2, 1):
            raise SystemExit(f"{path} is not a wav file of one channel with 16 bits: convert it to one")
        return torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16) / 32768


def error_to_signal(model: nn.Module, x: Tensor, y: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Of dry and wet signals `(B, T)`."""
    given = model._head(model._core(x.unsqueeze(-1), hx)[0])[..., 0]
    return (given - y).square().sum() / y.square().sum()


def whole(model: nn.Module, dry: Tensor, wet: Tensor) -> Tensor:
    return error_to_signal(model, dry[None], wet[None])


def blocks(model: nn.Module, dry: Tensor, wet: Tensor) -> Tensor:
    """The practice: blocks side by side, each with a burn-in of a quarter."""
    burn = min(32_768, len(dry)) // 4
    x, y = (signal.unfold(0, 4 * burn, 3 * burn) for signal in (dry, wet))
    with torch.no_grad():
        hx = model._core(x[:, :burn].unsqueeze(-1))[1]
    return error_to_signal(model, x[:, burn:], y[:, burn:], hx)


def train(model: nn.Module, loss_of: Callable[..., Tensor], data: list[Tensor], seconds: float) -> list[list[float]]:
    """For so many seconds, while the learning rate falls tenfold; `[seconds, error on unheard music]`, 40 times."""
    optimiser, spent, curve = torch.optim.Adam(model.parameters()), 0.0, [[0.0, math.inf]]
    while spent < seconds:
        begin = perf_counter()
        optimiser.param_groups[0]["lr"] = 4e-3 * 0.1 ** (spent / seconds)
        loss = loss_of(model, *data[:2])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        loss.item()  # waits for the device
        spent += perf_counter() - begin
        if spent - curve[-1][0] > seconds / 40 or spent >= seconds:
            with torch.no_grad():
                curve.append([spent, float(whole(model, *data[2:]))])
    return curve[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=262_144, help="samples to train on")
    parser.add_argument("--seconds", type=float, default=120, help="time for each way of training")
    parser.add_argument("--recording", type=Path, nargs=2, help="dry and wet wav files, 16 bits, mono")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for results.json and the picture")
    options = parser.parse_args()
    torch.manual_seed(0)
    length, both = options.length, options.length + min(RATE, options.length)  # up to a second more, to judge by
    dry = guitar(both) if options.recording is None else read(options.recording[0])[:both]
    wet = circuit(dry) if options.recording is None else read(options.recording[1])[:both]
    data = [part.to(options.device) for part in (dry[:length], wet[:length], dry[length:], wet[length:])]
    theirs = network().to(options.device)
    ours = tl.parallelize(deepcopy(theirs))
    for name, model in (("timeloom", deepcopy(ours)), ("torch", deepcopy(theirs))):
        try:
            seconds = min(train(model, whole, data, 1e-9)[0][0] for _ in range(3))
            print(f"{name}: one update through {length} samples in {seconds:.3f} s", flush=True)
        except RuntimeError as refused:
            print(f"{name} refuses {length} samples in one call: {str(refused).splitlines()[0]}")
    results = {"timeloom, whole": train(ours, whole, data, options.seconds)}
    results["torch, blocks"] = train(theirs, blocks, data, options.seconds)
    for name, curve in results.items():
        print(f"{name}: error-to-signal ratio {curve[-1][1]:.4f} on unheard music after {curve[-1][0]:.0f} s")
    print(ours._core.reports[0])
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps(results))
        import matplotlib.pyplot as plt

        for name, curve in results.items():
            plt.semilogy(*zip(*curve, strict=True), label=name)
        plt.gca().set(xlabel="seconds of training", ylabel="error-to-signal ratio, unheard music")
        plt.legend()
        plt.savefig(options.out / "amplifier.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
