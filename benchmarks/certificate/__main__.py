"""`python -m benchmarks.certificate`: error estimates of many solves, forward and backward, beside their true errors.

For every correction: how many solves there were, how many fell back to sequential (and were not judged), how the true
error compares with the estimate (median, 99 of 100, worst), and how many estimates were below a third of the error or
above thirty times it.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from benchmarks.certificate.audit import Audit, audit
from benchmarks.certificate.draw import drawn


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.certificate", description=__doc__)
    options.add_argument("--networks", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0, help="the first seed")
    options.add_argument("--seconds", type=float, default=600.0, help="no network is begun after so long")
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of the solves; the truth is a CPU's")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    began, found = time.perf_counter(), defaultdict[tuple[str, str], list[Audit]](list)
    for seed in range(given.seed, given.seed + given.networks):
        if time.perf_counter() - began > given.seconds:
            break
        case = drawn(seed, given.device == "cuda")
        both = audit(case.problem(given.device), case.solver)
        for direction, one in zip(("forward", "backward"), both, strict=True):
            found[case.correction, direction].append(one)
            if one.told and (one.too_little or one.too_much):
                true = f"error {one.error:.1e}, rounding {one.rounding:.0e}"
                print(f"{direction}: {true}, {one.report}; {case}", flush=True)
    for (correction, direction), audits in sorted(found.items()):
        print(summary(f"{correction} {direction}", audits))
    return 0


def summary(name: str, audits: list[Audit]) -> str:
    told = [one for one in audits if one.told]
    ratios = sorted(
        one.error / one.report.error_estimate for one in told if one.report.error_estimate and one.error > one.floor
    )
    places = [ratios[int(part * (len(ratios) - 1))] for part in (0.01, 0.5, 0.99, 1.0)] if ratios else []
    low, high = sum(one.too_little for one in told), sum(one.too_much for one in told)
    spread = "error / estimate, 1 % 50 % 99 % worst: " + " ".join(f"{ratio:.2g}" for ratio in places)
    return f"{name}: {len(told)} told, {len(audits) - len(told)} fell back; {spread}; too little {low}, too much {high}"


if __name__ == "__main__":
    raise SystemExit(main())
