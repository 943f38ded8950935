"""How much of a training's time is spent waiting for its data: `python -m benchmarks.pipeline`.

Two trainings from files: the features of video clips (128 steps × 1000 channels, batch 100, read from disk as they are
needed) and long series (16,384 steps × 4 channels, batch 16). Each is run with the next batch made ready by a second
thread while a step runs, as `timeloom train` does it, and with every batch made when its step begins.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import machine_facts
from timeloom.app.data import Record, Splits, Table, split
from timeloom.app.data.prefetch import Prefetch
from timeloom.app.train.config import ModelConfig, OptimConfig, TrainConfig, preset
from timeloom.app.train.trainer import Trainer
from timeloom.app.video.cache import FeatureCache

RESULTS = Path(__file__).parent / "results"


class InTurn(Prefetch[Any]):
    """Prepares no batch ahead."""

    def begin(self, step: int) -> None:
        pass


def series(folder: Path, count: int, steps: int, channels: int) -> Splits:
    """Random series of two classes, in files that are read when they are used."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    records = []
    for number in range(count):
        place = folder / f"{number}.npy"
        FeatureCache.save(place, torch.randn(steps, channels, generator=generator))
        values = FeatureCache.load(place)
        assert values is not None
        records.append(Record(str(number), values, "ab"[number % 2]))
    return split(Table(str(folder), "classification", records), 0.02, 0.02, 0)


def cases(small: bool) -> dict[str, tuple[tuple[int, int, int], TrainConfig]]:
    """Sizes (series, steps, channels) and configuration."""
    clips = preset("hmdb6")
    long = TrainConfig(model=ModelConfig(), optim=OptimConfig(batch=2 if small else 16))
    if small:
        clips = replace(clips, model=replace(clips.model, hidden=8), optim=replace(clips.optim, batch=4))
        return {"clips": ((12, 16, 20), clips), "long series": ((8, 128, 4), long)}
    return {
        "clips, 256 units": ((420, 128, 1000), clips),
        "clips, 32 units": ((420, 128, 1000), replace(clips, model=replace(clips.model, hidden=32))),
        "long series, 32 units": ((66, 16_384, 4), long),
    }


def measure(config: TrainConfig, splits: Splits, folder: Path, ahead: bool) -> dict[str, float]:
    """Train two epochs; returns the share of the time that steps wait for their batch."""
    folder.mkdir()
    config = replace(config, compare=0, device="cpu", optim=replace(config.optim, epochs=2))
    trainer = Trainer(config, splits, folder, None, lambda row: None)
    if not ahead:
        trainer._batches.close()
        trainer._batches = InTurn(trainer._share_of)
    trainer.run()
    rows = trainer.metrics.of("step")[1:]  # the first batch cannot be made ahead
    waited, worked = sum(row["data_seconds"] for row in rows), sum(row["seconds"] for row in rows)
    return {
        "share": waited / (waited + worked),
        "wait_ms": 1e3 * statistics.median(row["data_seconds"] for row in rows),
        "step_ms": 1e3 * statistics.median(row["seconds"] for row in rows),
    }


def table(results: dict[str, Any]) -> str:
    """A table with a line for each training."""
    lines = [
        "# Waiting for data",
        "",
        f"`python -m benchmarks.pipeline`, {results['machine']['threads']} thread(s), load "
        f"{results['machine']['load']}. Medians of two epochs without their first step; in brackets, the share of the "
        f"time in which the training waits.",
        "",
        "| training | a step | waits for its batch, made ahead | made when the step begins |",
        "|---|--:|--:|--:|",
    ]
    for name, ways in results["cases"].items():
        cells = [f"{ways[way]['wait_ms']:.2f} ms ({ways[way]['share']:.1%})" for way in ("ahead", "in turn")]
        lines.append(f"| {name} | {ways['ahead']['step_ms']:.0f} ms | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"machine": machine_facts(), "cases": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, (sizes, config)) in enumerate(cases(options.small).items()):
            splits = series(Path(temporary) / f"data{number}", *sizes)
            ways = {
                way: measure(config, splits, Path(temporary) / f"{number} {way}", way == "ahead")
                for way in ("ahead", "in turn")
            }
            results["cases"][name] = ways
            print(name, ways, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pipeline.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "pipeline.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
