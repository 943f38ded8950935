"""`python -m benchmarks.certificate.trained`: the same of the zoo's trained networks, in float32, at several chunks.

Every line: the error against float64, that of a plain run in float32, and what the report says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from benchmarks.certificate.audit import audit
from benchmarks.zoo.networks import TORCHS, WEIGHTS, model_of, stored_weights
from benchmarks.zoo.tasks import TASKS
from timeloom.inspection.memory import recurrences
from timeloom.nn.base import Recurrent
from timeloom.solve.plan import Correction
from timeloom.solvers import Shooting

CORRECTIONS: tuple[Correction, ...] = ("none", "diag", "secant", "lowrank")


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.certificate.trained", description=__doc__)
    options.add_argument("--weights", type=Path, default=WEIGHTS, help="file of state_dicts by the networks' names")
    options.add_argument("--steps", type=int, default=2048)
    options.add_argument("--chunks", type=int, nargs="+", default=[32, 128])
    options.add_argument("--tol", type=float, nargs="+", default=[1e-2, 1e-4])
    options.add_argument("--seconds", type=float, default=600.0, help="no network is begun after so long")
    given = options.parse_args(arguments)
    stored, began, judged, wrong = stored_weights(given.weights), time.perf_counter(), 0, 0
    for network in TORCHS:
        if time.perf_counter() - began > given.seconds:
            print(f"{network.name}: left out")
            continue
        model = model_of(network, stored, torch.device("cpu"))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            x = model.features(TASKS[network.task].draw(given.steps, 1, generator).x)
        problem = next(recurrences(cast(Recurrent, model.layer), x))
        for chunk in given.chunks:
            for correction in CORRECTIONS:
                for tol in given.tol:
                    solver = Shooting(chunk=chunk, warmup=chunk, correction=correction, tol=tol, max_iters=60)
                    for direction, one in zip(("forward", "backward"), audit(problem, solver), strict=True):
                        verdict = "fell back"
                        if one.told:
                            judged, wrong = judged + 1, wrong + (one.too_little or one.too_much)
                            verdict = "TOO LITTLE" if one.too_little else "TOO MUCH" if one.too_much else "true"
                        numbers = (
                            f"error {one.error:.1e}, rounding {one.rounding:.0e}, said {one.report.error_estimate}"
                        )
                        what = f"{network.name}, chunk {chunk}, {correction}, tol {tol:g}, {direction}"
                        print(f"{verdict}: {what}: {numbers}, {one.report.iterations} sweeps", flush=True)
    print(f"{judged} judged, {wrong} wrong")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
