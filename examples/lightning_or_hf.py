"""Somebody's model in somebody's trainer, made parallel in time by one line.

`Recogniser` is an ordinary LightningModule on torch's own GRU layers; nothing in it knows of timeloom.
`tl.parallelize` swaps the layers in place, so whatever holds the model goes on working: Lightning's Trainer here,
transformers' Trainer or a loop of your own in the same way. The checkpoint loads into the untouched model.

    pip install lightning
    python examples/lightning_or_hf.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import timeloom as tl


class Recogniser(lightning.LightningModule):
    """Which of three waves is it? Two layers of torch's GRU and a head on the mean of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(dim=1))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, label = batch
        return nn.functional.cross_entropy(self(x), label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def waves(count: int, steps: int) -> TensorDataset:
    """Noisy sines of three frequencies, `(count, steps, 1)`, and which one each is."""
    label = torch.arange(count) % 3
    phase = torch.arange(steps) * (0.2 + 0.2 * label).unsqueeze(1) + 6.3 * torch.rand(count, 1)
    return TensorDataset((phase.sin() + 0.5 * torch.randn(count, steps)).unsqueeze(-1), label)


def fit(model: Recogniser, data: TensorDataset, epochs: int, folder: str) -> float:
    """Train with Lightning; the seconds it took."""
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    began = time.perf_counter()
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
    trainer.save_checkpoint(Path(folder) / "model.ckpt")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4000, help="steps in a series")
    parser.add_argument("--series", type=int, default=60, help="series to train on")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    data = waves(options.series, options.length)
    model = Recogniser()
    tl.parallelize(model)  # the one line
    with tempfile.TemporaryDirectory() as folder:
        seconds = fit(model, data, options.epochs, folder)
        print(f"{options.epochs} epochs with timeloom's layers: {seconds:.1f} s; the last solve:")
        print(model.rnn.reports[0])
        plain = Recogniser.load_from_checkpoint(Path(folder) / "model.ckpt").eval()
    x, label = waves(30, options.length).tensors
    with torch.no_grad():
        ours, theirs = model.eval()(x), plain(x)
    print(f"right on new series: {(ours.argmax(-1) == label).float().mean():.0%}")
    print(f"the same weights in torch's own layers answer the same, to {(ours - theirs).abs().max():.0e}")


if __name__ == "__main__":
    main()
