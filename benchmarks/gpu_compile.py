"""Training steps on a GPU inside and outside of torch.compile: DEER's EigenWorms model on data of that shape.

python -m benchmarks.gpu_compile  # cuDNN, timeloom, timeloom in one graph, and that in CUDA graphs
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import timeloom
from benchmarks.gpu import clock
from benchmarks.gpu_training import Classifier, train_steps
from benchmarks.results import new_file

RESULTS = Path(__file__).parent / "results" / "gpu-compile.json"
EAGER_STEPS = 5
"""Steps that every model makes before it is compiled, from which layers learn how to solve."""
SETTLING_STEPS = 10
"""Steps after these that are not timed, in which graphs are compiled and captured."""
TIMED_STEPS = 20
MODES: dict[str, dict[str, Any] | None] = {
    "cudnn": None,
    "timeloom": None,
    "compiled": {},
    "cuda_graphs": {"mode": "reduce-overhead"},
}


def train(name: str) -> dict[str, Any]:
    """Losses, milliseconds per step (median and least), and the layers' reports on their last solve."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Classifier().to(clock.DEVICE)
    if name != "cudnn":
        timeloom.parallelize(model)
    options = MODES[name]
    compiled: Any = model if options is None else torch.compile(model, fullgraph=True, **options)
    calls = [model] * EAGER_STEPS + [compiled] * (SETTLING_STEPS + TIMED_STEPS)
    losses, seconds = train_steps(model, calls)
    timed = sorted(1e3 * one for one in seconds[-TIMED_STEPS:])
    facts: dict[str, Any] = {"milliseconds": timed[TIMED_STEPS // 2], "least_milliseconds": timed[0], "losses": losses}
    facts["settling_seconds"] = sum(seconds[EAGER_STEPS:-TIMED_STEPS])
    if name != "cudnn":
        layers: Any = model.layers
        facts["reports"] = [str(layer.reports[0]) for layer in layers]
        facts["certificates_over_tolerance"] = certificates(layers)
    return facts


def certificates(layers: Any) -> float | None:
    """The largest certificate of a captured graph's last replay, relative to its tolerance; None without one."""
    reports = [report for layer in layers for report in (layer.reports[0], layer.reports[0].backward)]
    read = [float(report.certificate) / report.tolerance for report in reports if report.certificate is not None]
    return max(read, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_compile", description=__doc__.split("\n")[0])
    where = "file of the JSON (default: gpu-compile.json in benchmarks/results)"
    parser.add_argument("--out", type=new_file, default=RESULTS, help=where)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_compile needs a CUDA device")
    from torch._dynamo import config

    config.allow_rnn = True
    facts: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    facts |= {name: train(name) for name in MODES}
    truth = facts["cudnn"]["losses"]
    for name in MODES:
        facts[name]["largest_difference"] = max(abs(a - b) for a, b in zip(facts[name]["losses"], truth, strict=True))
        print(name, json.dumps({key: value for key, value in facts[name].items() if key != "losses"}, indent=1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
