"""A log's summary as JSON and as a page: counts, seeds, versions, findings, errors and torch's errors by regime."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import timeloom
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.judge import FLOOR, PERTURBED
from benchmarks.fuzz.log import KINDS, Answer, Log
from benchmarks.results import machine_facts

SOURCES = (".py", ".c", ".h", ".cu", ".cuh")
SLOWEST = 10
"""Number of slowest configurations that are listed."""
RULE = f"""\
A finding is a crash, a hang, a number that is none where torch has one, an error beyond twice torch's own (plus a floor
of the dtype's rounding), or a certificate that lies. Torch's own error is the worst of its layer's and, where that does
not do, of {PERTURBED} more runs of it on numbers that are a rounding off; the floor is \
{FLOOR[torch.float32]} roundings of float32 and float64, {FLOOR[torch.float16]} of
half precision. `benchmarks/fuzz/judge.py` has the exceptions. Configuration number i of a seed is the same on every
machine: `python -m benchmarks.fuzz --seed S --first i --count 1` judges it again, as long as the drawing of cases is
not changed; the line beside a finding does so for ever."""


def facts(device: str) -> dict[str, Any]:
    """What the findings depend on."""
    found = machine_facts() | {"timeloom": timeloom.__version__, "code": code(), "device": device}
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def code() -> str:
    """A digest of timeloom's sources, which changes with them."""
    root, found = Path(timeloom.__file__).parent, hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:10]


def reproduce(device: str, case: str) -> str:
    """The line that runs a case again."""
    return f"python -m benchmarks.fuzz --device {device} --case '{case}'"


def summary(log: Log) -> dict[str, Any]:
    """A summary of all judged cases: each configuration counts once, by its last answer."""
    answers = list(log.answers.values())
    skipped = Counter(answer["skipped"] for answer in answers if "skipped" in answer)
    judged = [answer for answer in answers if "skipped" not in answer]
    found = log.found()
    return {
        "runs": log.runs,
        "configurations": len(judged),
        "skipped": dict(skipped),
        "with_findings": len(found),
        "kinds": dict(Counter(answer["findings"][0]["kind"] for answer in found)),
        "seeds": _seeds(answers),
        "counts": _counts(judged),
        "findings": [{"case": answer["case"], "found": answer["findings"][:3]} for answer in found],
        "mended": [{"case": answer["case"], "found": answer["findings"][:3]} for answer in log.mended.values()],
        "seconds": round(sum(answer.get("seconds", 0.0) for answer in answers)),
        "slowest": [
            {"seconds": answer.get("seconds", 0.0), "case": answer["case"]}
            for answer in sorted(answers, key=lambda answer: -answer.get("seconds", 0.0))[:SLOWEST]
        ],
        "errors": regimes(judged),
    }


def _seeds(answers: Iterable[Answer]) -> dict[str, str]:
    """The numbers of each seed that were judged, and how many cases came from a file."""
    numbers: dict[str, list[int]] = {}
    filed = 0
    for answer in answers:
        if answer["seed"] is None:
            filed += 1
        else:
            numbers.setdefault(str(answer["seed"]), []).append(answer["index"])
    told = {seed: ", ".join(_stretches(sorted(indices))) for seed, indices in numbers.items()}
    return told | ({"of a file": str(filed)} if filed else {})


def _stretches(numbers: list[int]) -> list[str]:
    """Numbers with neighbours joined to ranges: 0–41, 43."""
    found = []
    for _, members in groupby(enumerate(numbers), key=lambda entry: entry[1] - entry[0]):
        stretch = [number for _, number in members]
        found.append(f"{stretch[0]}–{stretch[-1]}" if len(stretch) > 1 else str(stretch[0]))
    return found


def _counts(answers: Iterable[Answer]) -> dict[str, dict[str, int]]:
    """Counts by cell, solver, regime, precision and kind of input, the most frequent first."""
    counters: dict[str, Counter[str]] = {name: Counter() for name in ("cell", "solver", "regime", "precision", "input")}
    for answer in answers:
        case = Case.of(answer["case"])
        counters["cell"][case.cell] += 1
        counters["solver"][case.solver] += 1
        counters["regime"][regime_of(case)] += 1
        counters["precision"][precision_of(case)] += 1
        counters["input"].update(_kinds_of_input(case))
    return {name: dict(counter.most_common()) for name, counter in counters.items()}


def _kinds_of_input(case: Case) -> list[str]:
    kinds = {
        "more than 1000 steps": case.T > 1000,
        "at most 8 steps": case.T <= 8,
        "more than 256 units": case.n > 256,
        "layers": case.layers > 1,
        "both directions": case.bidirectional,
        case.ragged: bool(case.ragged),
        case.feature: bool(case.feature),
        f"poisoned by {case.poison}": bool(case.poison),
        "resets": case.resets,
        "h0": case.h0,
        "gradients": case.grad,
        "a tolerance asked for": "tol" in case.options,
    }
    return [kind for kind, there in kinds.items() if there]


def precision_of(case: Case) -> str:
    return f"autocast {case.autocast}" if case.autocast else case.dtype


def regime_of(case: Case) -> str:
    """A few words, for a table."""
    if case.trained:
        return "trained"
    words = ["gate bias ≥ 3"] if case.gate_bias >= 3 else []
    words += ["weights ≥ ×2"] if case.scale >= 2 else []
    return ", ".join(words) or "near the default"


def regimes(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """By dtype and regime: the median and the worst of timeloom's error and of torch's, outputs and gradients."""
    groups: dict[tuple[str, str], list[dict[str, tuple[float, float]]]] = {}
    for answer in answers:
        case = Case.of(answer["case"])
        if answer["worst"] and "tol" not in case.options:  # a given tolerance is not torch's accuracy
            groups.setdefault((precision_of(case), regime_of(case)), []).append(answer["worst"])
    rows = []
    for (precision, regime), errors in sorted(groups.items()):
        row: dict[str, Any] = {"precision": precision, "regime": regime, "cases": len(errors)}
        for kind in KINDS:
            pairs = [each[kind] for each in errors if kind in each]
            if pairs:
                row[kind] = {
                    "median": [statistics.median(pair[side] for pair in pairs) for side in (0, 1)],
                    "worst": [max(pair[side] for pair in pairs) for side in (0, 1)],
                }
        rows.append(row)
    return rows


def write(folder: Path, device: str, log: Log) -> Path:
    """Write the JSON of a log's summary, and its page; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    result = summary(log)
    path = folder / f"fuzz-{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    page = path.with_suffix(".md")
    page.write_text(document(device, result))
    return page


def document(device: str, result: dict[str, Any]) -> str:
    lines = [f"# Random configurations on {'a GPU' if device == 'cuda' else 'a CPU'}", ""]
    lines += ["Written by `python -m benchmarks.fuzz`.", RULE, ""]
    lines += [
        f"**{result['configurations']:,} configurations, {result['with_findings']} with findings** "
        f"({len(result['mended'])} mended), {sum(result['skipped'].values())} skipped; {result['seconds']:,} s.",
        "",
    ]
    lines += _table("run | seed | timeloom | of sources | torch | on", [_run_cells(run) for run in result["runs"]])
    lines += ["Judged:", ""]
    lines += [f"- seed {seed}: {numbers}" for seed, numbers in result["seeds"].items()]
    for name, counts in result["counts"].items():
        lines += [f"- by {name}: " + ", ".join(f"{kind} {number:,}" for kind, number in counts.items())]
    lines += ["", "Errors against float64, relative to the largest number of a tensor: timeloom / torch. Where a"]
    lines += ["tolerance was asked for, the errors are those, and left out here.", ""]
    head = "precision | regime | cases | outputs, median | worst | gradients, median | worst"
    lines += _table(head, [_error_cells(row) for row in result["errors"]])
    for title, name in (("Findings", "findings"), ("Findings that are mended", "mended")):
        if result[name]:
            lines += [f"{title}:", ""]
        for finding in result[name]:
            lines += [f"- {finding['found'][0]['kind']}: {finding['found'][0]['what']}", ""]
            lines += [f"      {reproduce(device, finding['case'])}", ""]
    if result["skipped"]:
        lines += ["Skipped, since torch cannot run them either:", ""]
        lines += [f"- {count} × {reason}" for reason, count in result["skipped"].items()]
    return "\n".join(lines).rstrip() + "\n"


def _run_cells(run: dict[str, Any]) -> list[str]:
    seed = str(run["seed"]) if run["cases"] == "random" else run["cases"]
    return [
        run["date"],
        seed,
        run["timeloom"],
        run.get("code", "earlier"),
        run["torch"],
        run.get("gpu") or run["processor"],
    ]


def _error_cells(row: dict[str, Any]) -> list[str]:
    cells = [row["precision"], row["regime"], str(row["cases"])]
    for kind in KINDS:
        for which in ("median", "worst"):
            pair = row.get(kind, {}).get(which)
            cells.append("–" if pair is None else f"{pair[0]:.1e} / {pair[1]:.1e}")
    return cells


def _table(head: str, rows: list[list[str]]) -> list[str]:
    return [f"| {head} |", "|---" * (head.count("|") + 1) + "|", *(f"| {' | '.join(row)} |" for row in rows), ""]
