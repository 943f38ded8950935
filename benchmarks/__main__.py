"""Runs lists of cases; prints each table as it grows and writes JSON, Markdown and a plot of each list."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cases import CASE_LISTS, torch_step_seconds
from benchmarks.measure import Measurement, measure
from benchmarks.memory import peak_growth
from benchmarks.plot import plot
from benchmarks.results import LEFT_ALIGNED, cells, header, machine_facts, markdown, verdict, write_json

BUSY = 0.7
"""Load average before the start above which the numbers cannot be trusted."""
RESULTS = Path(__file__).with_name("results")
WIDTHS = {"T": 5, "B": 3, "n": 3, "regime": 9, "ratio": 7, "goal": 5, "sweeps": 6, "chunk": 11}
"""Widths of the columns whose rows are wider than their title."""


PROGRAM, ON_GPU = "python -m benchmarks", "python -m benchmarks.gpu"


def parse(arguments: Sequence[str] | None, program: str, on_gpu: str) -> argparse.Namespace:
    epilog = f"A GPU is measured by: {on_gpu} (--help lists its pieces)."
    parser = argparse.ArgumentParser(prog=program, description=__doc__, epilog=epilog)
    parser.add_argument("lists", nargs="+", choices=list(CASE_LISTS), help="the lists of cases to run")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too, in fresh processes")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (default: torch's choice)")
    where = "folder of the results (default: benchmarks/results; of `timeloom bench`: runs/bench)"
    parser.add_argument("--out", type=Path, default=RESULTS, help=where)
    options = parser.parse_args(arguments)
    if options.threads is not None and options.threads < 1:
        parser.error(f"argument --threads: expected at least 1, got {options.threads}")
    return options


def command(name: str, options: argparse.Namespace) -> str:
    """The command that repeats this list, without folders of this machine."""
    parts = [PROGRAM, name]
    parts += ["--memory"] if options.memory else []
    parts += [f"--threads {options.threads}"] if options.threads else []
    return " ".join(parts)


def run(name: str, with_memory: bool) -> list[Measurement]:
    """Measures a list, printing row by row."""
    cases = CASE_LISTS[name]()
    titles = header(with_memory)
    patience = sum(torch_step_seconds(case) * 7 for case in cases) / 60
    print(f"\n{name}: {len(cases)} cases, about {max(1, round(patience))} minutes")
    print(_line(titles, titles), flush=True)
    measurements = []
    for case in cases:
        measurement = measure(case)
        if with_memory:
            measurement = replace(measurement, peak_bytes=peak_growth(case))
        measurements.append(measurement)
        print(_line(titles, cells(measurement)), flush=True)
    print(verdict(measurements))
    return measurements


def _line(titles: Sequence[str], texts: Sequence[str]) -> str:
    def pad(title: str, text: str) -> str:
        width = WIDTHS.get(title, len(title))
        return text.ljust(width) if title in LEFT_ALIGNED else text.rjust(width)

    return "  ".join(pad(title, text) for title, text in zip(titles, texts, strict=True))


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM, on_gpu: str = ON_GPU) -> int:
    options = parse(arguments, program, on_gpu)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    machine = machine_facts()
    if machine["load"] > BUSY:
        print(
            f"warning: the load of this machine is {machine['load']}; other work on the cores delays "
            "every parallel region, torch's many small ones most of all: do not trust these ratios",
            file=sys.stderr,
        )
    for name in options.lists:
        measurements = run(name, options.memory)
        facts = {**machine, "command": command(name, options)}
        write_json(options.out / f"{name}.json", measurements, facts)
        (options.out / f"{name}.md").write_text(markdown(measurements, facts))
        plot(options.out / f"{name}.png", measurements, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
