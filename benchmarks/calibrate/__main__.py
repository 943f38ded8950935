"""See `benchmarks.calibrate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import benchmarks.calibrate
from benchmarks.calibrate import cpu, cuda
from benchmarks.calibrate.constants import BY_OTHERS, MEASURED, stored

MEASURING = (cpu, cuda)
"""Files whose functions measure constants."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibrate", description=benchmarks.calibrate.__doc__)
    parser.add_argument("--threads", type=int, default=None, help="threads of torch's; all of them by default")
    parser.add_argument("--only", default="", help="constants whose names hold this word")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    has_gpu = torch.cuda.is_available()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads", torch.cuda.get_device_name() if has_gpu else ""
    )
    for constant in MEASURED.values():
        if options.only not in constant.name:
            continue
        here = constant.measure() if constant.device == "cpu" or has_gpu else "not measured, no GPU"
        print(f"{constant.name}: stored {constant.stored}, here {here} ({constant.what})", flush=True)
    for name, command in BY_OTHERS.items():
        if options.only in name:
            print(f"{name}: stored {stored(name)}, measured by `{command}`")


if __name__ == "__main__":
    main()
