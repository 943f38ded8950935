"""What a run found, as JSON and as a page: counts, seeds, versions, findings, errors beside torch's by regime."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import timeloom
from benchmarks.fuzz.case import Case
from benchmarks.results import machine_facts

Answer = dict[str, Any]
SLOWEST = 10
"""Configurations named for the time they took."""


def facts(device: str) -> dict[str, Any]:
    """What the findings depend on."""
    found = machine_facts() | {"timeloom": timeloom.__version__, "device": device}
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def reproduce(device: str, case: str) -> str:
    """The line that runs a case again."""
    return f"python -m benchmarks.fuzz --device {device} --case '{case}'"


def summary(answers: Sequence[Answer], given: dict[str, Any]) -> dict[str, Any]:
    """Of one run; `given`: its seed or file, and its facts."""
    skipped = Counter(answer["skipped"] for answer in answers if "skipped" in answer)
    found = [answer for answer in answers if answer["findings"]]
    kinds = Counter(finding["kind"] for answer in found for finding in answer["findings"][:1])
    return given | {
        "configurations": len(answers) - sum(skipped.values()),
        "skipped": dict(skipped),
        "with_findings": len(found),
        "kinds": dict(kinds),
        "findings": [{"case": answer["case"], "found": answer["findings"][:3]} for answer in found],
        "slowest": [
            {"seconds": answer.get("seconds", 0.0), "case": answer["case"]}
            for answer in sorted(answers, key=lambda answer: -answer.get("seconds", 0.0))[:SLOWEST]
        ],
        "errors": regimes(answers),
    }


def regime_of(case: Case) -> str:
    """A few words, for a table."""
    if case.trained:
        return "trained"
    words = ["gate bias ≥ 3"] if case.gate_bias >= 3 else []
    words += ["weights ≥ ×2"] if case.scale >= 2 else []
    return ", ".join(words) or "near the default"


def regimes(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """By dtype and regime: the median and the worst of timeloom's error and of torch's, outputs and gradients."""
    groups: dict[tuple[str, str], list[dict[str, tuple[float, float]]]] = {}
    for answer in answers:
        if answer["errors"]:
            case = Case.of(answer["case"])
            precision = f"autocast {case.autocast}" if case.autocast else case.dtype
            groups.setdefault((precision, regime_of(case)), []).append(answer["errors"])
    rows = []
    for (precision, regime), errors in sorted(groups.items()):
        row: dict[str, Any] = {"precision": precision, "regime": regime, "cases": len(errors)}
        for kind in ("outputs", "gradients"):
            worst = [_worst(each, kind == "gradients") for each in errors]
            pairs = [pair for pair in worst if pair is not None]
            if pairs:
                row[kind] = {
                    "median": [statistics.median(pair[side] for pair in pairs) for side in (0, 1)],
                    "worst": [max(pair[side] for pair in pairs) for side in (0, 1)],
                }
        rows.append(row)
    return rows


def _worst(errors: dict[str, tuple[float, float]], gradient: bool) -> tuple[float, float] | None:
    pairs = [pair for name, pair in errors.items() if name.startswith("grad ") == gradient and pair[0] == pair[0]]
    pairs = [pair for pair in pairs if pair[1] == pair[1]]
    return (max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)) if pairs else None


def write(folder: Path, device: str, run: dict[str, Any]) -> Path:
    """The JSON with this run after those before it, and the page of it; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fuzz-{device}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    for earlier in runs:
        earlier.pop("errors", None)
        earlier.pop("slowest", None)
    runs.append(run)
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    page = path.with_suffix(".md")
    page.write_text(document(device, runs))
    return page


def document(device: str, runs: list[dict[str, Any]]) -> str:
    last = runs[-1]
    lines = [f"# Random configurations on {'a GPU' if device == 'cuda' else 'a CPU'}", ""]
    lines += [
        "Written by `python -m benchmarks.fuzz`. A finding is a crash, a number that is none where torch has one, an",
    ]
    lines += ["error beyond twice torch's own (plus a floor of the dtype's rounding), or a certificate that lies.", ""]
    lines += [
        "| date | cases | seed | configurations | skipped | with findings | of which | torch | on |",
        "|---|" + "---|" * 8,
    ]
    for run in runs:
        kinds = ", ".join(f"{count} {kind}" for kind, count in run["kinds"].items()) or "–"
        lines.append(
            f"| {run['date']} | {run['cases']} | {run['seed']} | {run['configurations']:,} | "
            f"{sum(run['skipped'].values())} | {run['with_findings']} | {kinds} | {run['torch']} | "
            f"{run.get('gpu') or run['processor']} |"
        )
    lines += [
        "",
        "Errors of the last run against float64, relative to the largest number of a tensor: timeloom / torch.",
        "",
    ]
    lines += [
        "| precision | regime | cases | outputs, median | worst | gradients, median | worst |",
        "|---|" + "---|" * 6,
    ]
    for row in last.get("errors", []):
        cells = [row["precision"], row["regime"], str(row["cases"])]
        for kind in ("outputs", "gradients"):
            for which in ("median", "worst"):
                pair = row.get(kind, {}).get(which)
                cells.append("–" if pair is None else f"{pair[0]:.1e} / {pair[1]:.1e}")
        lines.append(f"| {' | '.join(cells)} |")
    if last["findings"]:
        lines += ["", "Findings of the last run:", ""]
        for finding in last["findings"]:
            lines += [f"- {finding['found'][0]['kind']}: {finding['found'][0]['what']}", ""]
            lines += [f"      {reproduce(device, finding['case'])}", ""]
    if last["skipped"]:
        lines += ["", "Skipped, since torch cannot run them either:", ""]
        lines += [f"- {count} × {reason}" for reason, count in last["skipped"].items()]
    return "\n".join(lines) + "\n"
