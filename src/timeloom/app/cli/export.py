"""`timeloom export`: a trained model as an exported program of torch's or as ONNX, checked against the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from timeloom.app.cli.display import CONSOLE
from timeloom.app.errors import InputError
from timeloom.app.files import need_folder, write_json
from timeloom.app.train import checkpoint
from timeloom.app.train.exporting import export_onnx, export_torch
from timeloom.app.train.inference import restore

SUFFIXES = {"torch": ".pt2", "onnx": ".onnx"}


@dataclass(frozen=True)
class Options:
    """Options of `timeloom export`."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, or a checkpoint in it."""
    format: Literal["torch", "onnx"] = "torch"
    """torch.export's .pt2, which needs torch alone, or .onnx."""
    out: str = ""
    """File to write; by default model.pt2 or model.onnx in the folder of the run."""


def main(arguments: Sequence[str]) -> int:
    options = tyro.cli(
        Options,
        args=list(arguments),
        prog="timeloom export",
        description="Writes a trained model for other programs, and checks that it gives the same answers.",
    )
    folder = options.run if options.run.is_dir() else options.run.parent
    out = Path(options.out) if options.out else folder / f"model{SUFFIXES[options.format]}"
    need_folder(out)
    loaded = checkpoint.load(options.run)
    if loaded.config.precision == "float64" and options.format == "onnx":
        raise InputError("ONNX models are float32 here; export a float64 run with --format torch")
    model = restore(loaded, torch.device("cpu"))
    difference = export_torch(model, out) if options.format == "torch" else export_onnx(model, out)
    about = out.with_name(out.name + ".json")
    columns = list(loaded.columns) or loaded.channels
    write_json(about, {"task": loaded.task, "classes": list(loaded.classes), "channels": columns})
    checked = (
        f"its answers differ from the checkpoint's by at most {difference:.0e} of the largest"
        if difference is not None
        else "NOT checked, as onnxruntime is missing: pip install 'timeloom[export]'"
    )
    last = "classes" if loaded.classes else "1"
    shape = f"(steps, batch, {last})" if model.per_step else f"(batch, {last})"
    CONSOLE.print(
        f"{out}: takes raw inputs (steps, batch, {loaded.channels}) of one length, gives {shape}; {checked}\n"
        f"{about}: names of classes and channels",
        markup=False,
    )
    return 0
