"""`python -m benchmarks.fuzz --device cuda|cpu --minutes 5 --seed S`: random configurations, judged against float64.

--features      those that use one beside: second order, warm starts, return_states, Layer over a user's
                cell, dropout inside the recurrence, torch.compile
--poisoned      those with a number in their input that is NaN, infinite or far too large
--learned       those with corrections that are learned from sweeps (secant, lowrank)
--training      long sequences that `auto` runs as a training does: many calls, with weights that move
--count 20000   configurations of the seed in all: those in the log are not judged again, so runs can be gone on with
--again         the log's findings first, once more: what is mended is told so
--case JSON     one configuration, told in full (as printed for a finding)
--cases FILE    those of a JSON file, such as benchmarks/fuzz/known.json
--minutes 0     judges none, and writes the page of the log
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.draw import draw, draw_feature, draw_learned, draw_poisoned, draw_training
from benchmarks.fuzz.judge import judge
from benchmarks.fuzz.log import Log
from benchmarks.fuzz.record import facts, reproduce, summary, write
from benchmarks.fuzz.worker import Worker
from benchmarks.results import need_gpu

LONGEST = {"cuda": 120.0, "cpu": 600.0}
"""Seconds, with the start of its process, after which a case counts as a hang: a CPU may be busy with other work."""
GRACE = 20.0
"""Seconds that a case may take at the end of a run before it is left unfinished."""
OTHERS = {"features": draw_feature, "poisoned": draw_poisoned, "learned": draw_learned, "training": draw_training}
"""Kinds of configurations with a random stream of their own, so that the others stay what they are."""
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Task:
    """A case to judge: number `index` of a seed, or one from a file."""

    case: Case
    seed: int | str | None = None
    index: int | None = None


def main(arguments: list[str] | None = None) -> int:
    given = _arguments(arguments)
    if given.case is not None:
        return _one(Case.of(given.case), given.device)
    log = Log(given.log or given.out / f"fuzz-{given.device}.jsonl")
    if given.minutes > 0:
        told = {
            "cases": given.cases.name if given.cases else "random",
            "seed": _stream(given),
            "workers": given.workers,
        }
        log.begin(facts(given.device) | told)
        run(_tasks(given, log), log, given.device, given.minutes, given.workers, given.threads)
    page, result = write(given.out, given.device, log), summary(log)
    print(
        f"{result['configurations']:,} configurations, {sum(result['skipped'].values())} skipped, "
        f"{result['with_findings']} with findings {result['kinds'] or ''}"
    )
    print(page)
    return 1 if result["with_findings"] else 0


def run(tasks: Iterator[Task], log: Log, device: str, minutes: float, workers: int, threads: int) -> None:
    """Judge cases in separate processes until there are no more or the time is over."""
    end, lock = time.monotonic() + 60 * minutes, threading.Lock()

    def work() -> None:
        worker = Worker(device, threads)
        try:
            while time.monotonic() < end:
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return
                seconds = min(LONGEST[device], max(GRACE, end - time.monotonic()))
                answer = worker.judge(task.case, seconds)
                if seconds < LONGEST[device] and any(finding["kind"] == "hang" for finding in answer["findings"]):
                    continue  # the run was over before the case was
                with lock:
                    log.add(answer, task.seed, task.index)
                    _tell(answer, device, len(log.answers))
        finally:
            worker.close()

    crew = [threading.Thread(target=work) for _ in range(workers)]
    for member in crew:
        member.start()
    for member in crew:
        member.join()


def _tell(answer: dict[str, Any], device: str, number: int) -> None:
    if answer["findings"]:
        first = answer["findings"][0]
        print(f"{first['kind']}: {first['what']}\n    {reproduce(device, answer['case'])}", flush=True)
    elif number % 100 == 0:
        print(f"… {number:,} configurations", flush=True)


def _one(case: Case, device: str) -> int:
    answer = judge(case, device)
    if "skipped" in answer:
        print(f"skipped: {answer['skipped']}")
    for name, (error, theirs) in answer["errors"].items():
        print(f"{name:24} {error:.2e}   torch {theirs:.2e}")
    print(answer.get("report", ""))
    for finding in answer["findings"]:
        print(f"{finding['kind']}: {finding['what']}")
    return 1 if answer["findings"] else 0


def _tasks(given: argparse.Namespace, log: Log) -> Iterator[Task]:
    """Cases with findings, if asked for; then those of a file, or those of the seed that are missing in the log."""
    if given.again:
        yield from [Task(Case.of(answer["case"]), answer["seed"], answer["index"]) for answer in log.found()]
    if given.cases is not None:
        yield from [Task(Case.of(entry)) for entry in json.loads(given.cases.read_text())]
        return
    seed, drawn = _stream(given), OTHERS.get(given.others, draw)
    done = log.done(seed)
    for index in islice(count(given.first), given.count):
        if index not in done:
            yield Task(drawn(given.seed, index, given.device), seed, index)


def _stream(given: argparse.Namespace) -> int | str:
    """The key of a seed's configurations in the log; those of another kind have a key of their own."""
    return f"{given.others} {given.seed}" if given.others else int(given.seed)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    whole: Callable[[str], int] = int
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description="Random configurations, judged.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=5.0, help="after which no new case begins")
    parser.add_argument("--seed", type=whole, default=0, help="of the random configurations")
    parser.add_argument("--first", type=whole, default=0, help="number of the first configuration of the seed")
    parser.add_argument("--count", type=whole, default=None, help="configurations of the seed, with those before")
    parser.add_argument("--workers", type=whole, default=None, help="processes at once (4 on a GPU, 1 on a CPU)")
    parser.add_argument("--threads", type=whole, default=None, help="of each process (all cores shared out)")
    others = parser.add_mutually_exclusive_group()
    for kind in OTHERS:
        others.add_argument(
            f"--{kind}", dest="others", action="store_const", const=kind, help="draw those, as said above"
        )
    parser.add_argument("--case", help="one configuration as JSON")
    parser.add_argument("--cases", type=Path, help="a JSON file of configurations")
    parser.add_argument("--again", action="store_true", help="judge the log's findings once more, first of all")
    parser.add_argument("--log", type=Path, help="the file that answers are added to (fuzz-DEVICE.jsonl in --out)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of fuzz-DEVICE.json and .md")
    given = parser.parse_args(arguments)
    if given.minutes > 0 or given.case is not None:
        need_gpu(parser, given.device)
    if given.cases is not None and not given.cases.is_file():
        parser.error(f"there is no file {given.cases}")
    given.workers = given.workers or (4 if given.device == "cuda" else 1)
    given.threads = given.threads or max(1, (os.cpu_count() or 1) // given.workers)
    return given


if __name__ == "__main__":
    sys.exit(main())
