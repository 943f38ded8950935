"""What `experiments.mgrit.ranks` has measured, as a table, in words, and beside a model of the times."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from experiments.harness import Results, earlier_runs, errors, good, made_on, markdown
from experiments.mgrit.rank_worker import REMEMBERS, WAYS

PAPER = 6.5
"""The largest speedup over the serial GRU that the paper reports: HMDB51, 128 frames."""


def pure(rows: list[Results]) -> list[Results]:
    """Rows in which all processes share one sequence."""
    return [row for row in good(rows) if row.get("time_ranks", 1) == row["ranks"]]


def best_serial(rows: list[Results], steps: int, way: str) -> Results | None:
    """The fastest run of a serial network at one length, over its numbers of threads."""
    fitting = [
        row for row in good(rows) if row["steps"] == steps and row["way"].startswith(way) and "serial" in row["way"]
    ]
    return min(fitting, key=lambda row: row["both_ms"], default=None)


def best_alone(rows: list[Results], steps: int) -> Results | None:
    """The fastest run of the implicit GRU on one process: in order, or with chunks side by side, on all its threads."""
    here = [row for row in pure(rows) if (row["steps"], row["ranks"]) == (steps, 1)]
    alone = [row for row in here if row["way"].startswith("exact") and row["way"] != REMEMBERS]
    serial = best_serial(rows, steps, "implicit GRU")
    return min([*alone, *([serial] if serial else [])], key=lambda row: row["both_ms"], default=None)


def fitted(features: Tensor, values: Tensor) -> Tensor:
    """Constants that are not negative, of least squares: the best of those with some of them zero."""
    best, least = torch.zeros(features.shape[1], dtype=features.dtype), float(values.square().sum())
    for count in range(1, features.shape[1] + 1):
        for chosen in itertools.combinations(range(features.shape[1]), count):
            found = torch.linalg.lstsq(features[:, chosen], values[:, None]).solution.flatten()
            error = float((features[:, chosen] @ found - values).square().sum())
            if error < least and float(found.min()) >= 0:
                least, best = error, torch.zeros_like(best)
                best[list(chosen)] = found
    return best


def predict(rows: list[Results], way: str) -> list[Results]:
    """`o + γ T/R + σ T + collectives · exchange(R)`, fitted to all but the longest: what it says of all, and of that.

    o: a call; γ: what ranks share; σ: what they run one after the other (the coarsest level). Exchanges are measured.
    """
    points = [row for row in pure(rows) if row["way"] == way and "exchange_ms" in row]
    longest = max((row["steps"] for row in points), default=0)
    seen = [row for row in points if row["steps"] < longest]
    if len(seen) < 4:
        return []

    def talk(row: Results) -> float:
        return row["collectives"] * row["exchange_ms"]

    features = torch.tensor([[1.0, row["steps"] / row["ranks"], row["steps"]] for row in points], dtype=torch.float64)
    scale = torch.tensor([1 / row["both_ms"] for row in seen], dtype=torch.float64)
    rest = torch.tensor([max(row["both_ms"] - talk(row), 0.0) for row in seen], dtype=torch.float64)
    inside = [i for i, row in enumerate(points) if row["steps"] < longest]
    constants = fitted(features[inside] * scale[:, None], rest * scale)
    said = (features @ constants).tolist()
    return [
        {"way": way, "ranks": row["ranks"], "steps": row["steps"], "model_ms": value + talk(row),
         "ratio": (value + talk(row)) / row["both_ms"], "held_out": row["steps"] == longest}
        for row, value in zip(points, said, strict=True)
    ]  # fmt: skip


def table(results: Results) -> str:
    """A line for each length and way; speedups are over both serial networks."""
    rows, sizes, machine = results["rows"], results["sizes"], results["machine"]
    models = {(one["way"], one["ranks"], one["steps"]): one for way in WAYS for one in predict(rows, way)}
    lines = [
        f"Random inputs, {sizes['hidden']} units, batch {sizes['batch']}, {results['dtype']}; one thread a process. "
        f"{made_on(machine)}.{earlier_runs(results)} "
        f"Milliseconds are the {results['statistic']} of {sizes['turns']} steps, the slowest process of each"
        f"{_rounds(results)}. "
        "~: timed over fewer steps, and scaled.",
        "",
    ]
    if machine.get("cores") and max((row["ranks"] for row in rows), default=1) > machine["cores"]:
        lines += [
            f"**More processes than the {machine['cores']} cores**: they take turns, and the times show that.",
            "",
        ]
    head = [
        "T",
        "way",
        "processes",
        "forward",
        "backward",
        "both",
        "over serial GRU",
        "over serial implicit GRU",
        "over one process",
    ]
    head += ["KiB sent", "model / measured", "states off by", "gradients off by"]
    cells = []
    for row in sorted(good(rows), key=lambda row: (row["steps"], row["way"], row["ranks"], row.get("time_ranks", 1))):
        ratios = []
        for way in ("GRU", "implicit GRU"):
            base = best_serial(rows, row["steps"], way)
            ratios.append(f"{base['both_ms'] / row['both_ms']:.2f}×" if base else "–")
        alone = best_alone(rows, row["steps"])
        ratios.append(f"{alone['both_ms'] / row['both_ms']:.2f}×" if alone else "–")
        shape = (
            f"{row['ranks'] // row['time_ranks']} × {row['time_ranks']}"
            if row.get("time_ranks", 1) != row["ranks"]
            else row["ranks"]
        )
        model = models.get((row["way"], row["ranks"], row["steps"])) if row.get("time_ranks") == row["ranks"] else None
        told = f"{model['ratio']:.2f}{' (held out)' if model['held_out'] else ''}" if model else "–"
        parts = [
            f"{'~' * bool(row.get('scaled'))}{row[key]:.1f}" if row.get(key) is not None else "–"
            for key in ("forward_ms", "backward_ms", "both_ms")
        ]
        off = [f"{row[key]:.0e}" if key in row else "–" for key in ("states_off", "gradients_off")]
        sent = f"{row['kilobytes']:.1f}" if "kilobytes" in row else "–"
        cells.append([row["steps"], row["way"], shape, *parts, *ratios, sent, told, *off])
    lines += markdown(head, cells, 2)
    return "\n".join([*lines, *errors(rows, ("way", "steps", "ranks")), "", *verdict(results)]) + "\n"


def _rounds(results: Results) -> str:
    count = results.get("rounds", 1)
    return f", and of {count} rounds of all rows the median" if count > 1 else ""


def verdict(results: Results) -> list[str]:
    """The best speedups at the longest length, in words."""
    rows = results["rows"]
    longest = max((row["steps"] for row in pure(rows) if row["way"] in WAYS), default=0)
    lines = [f"The paper: up to {PAPER}× at 128 frames, over its serial GRU, on several nodes.", ""]
    for way in WAYS:
        here = [row for row in pure(rows) if row["way"] == way and row["steps"] == longest]
        if not here:
            continue
        best = min(here, key=lambda row: row["both_ms"])
        bases = {f"the best serial {base}": best_serial(rows, longest, base) for base in ("GRU", "implicit GRU")}
        bases["the best of one process"] = best_alone(rows, longest)
        told = [f"{base['both_ms'] / best['both_ms']:.2f}× over {name} ({base['both_ms']:.0f} ms, {base['way']})"
                for name, base in bases.items() if base]  # fmt: skip
        cycles = " and ".join(str(count) for count in best["cycles"]) if "cycles" in best else "?"
        lines.append(
            f"- T = {longest:,}: {way} takes {best['both_ms']:.1f} ms on {best['ranks']} process(es), in {cycles} "
            f"cycles forward and backward: {'; '.join(told) or 'nothing beside it'}."
        )
    return [*lines, *crossover(rows), *trust(rows)]


def crossover(rows: list[Results]) -> list[str]:
    """From what length on the most processes are faster than the best serial run and than the best of one process."""
    here = {row["steps"]: row for row in most_processes(rows)}
    lines = []
    for name, best in (("serial run", lambda t: best_serial(rows, t, "implicit GRU")),
                       ("run of one process", lambda t: best_alone(rows, t))):  # fmt: skip
        bases = {steps: best(steps) for steps in sorted(here)}
        told = [
            f"{base['both_ms'] / here[steps]['both_ms']:.2f}× at T = {steps:,}" for steps, base in bases.items() if base
        ]
        if len(told) > 1:
            count = max(row["ranks"] for row in here.values())
            lines.append(
                f"- {count} processes, {WAYS[0]}, over the best {name} of the same network: {', '.join(told)}."
            )
    return lines


def most_processes(rows: list[Results]) -> list[Results]:
    """Rows of the exact solver in which the most processes share one sequence, by length."""
    here = [row for row in pure(rows) if row["way"] == WAYS[0] and "exchange_ms" in row]
    most = max((row["ranks"] for row in here), default=1)
    return sorted((row for row in here if row["ranks"] == most > 1), key=lambda row: row["steps"])


def trust(rows: list[Results]) -> list[str]:
    """How far the model is from what was measured, where it was fitted and at the length it has not seen."""
    lines = []
    for way in WAYS:
        said = predict(rows, way)
        parts = []
        for held_out, words in ((False, "where it was fitted"), (True, "at the length that it has not seen")):
            ratios = [one["ratio"] for one in said if one["held_out"] == held_out]
            if ratios:
                parts.append(f"{min(ratios):.2f} to {max(ratios):.2f} of the measured time {words}")
        if parts:
            lines.append(f"- The model of {way} says {', '.join(parts)}.")
    return lines


def shared_with_data(rows: list[Results]) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """By groups and processes of a group, `(T, ms)` of the exact solver on the most processes."""
    most, found = max((row["ranks"] for row in good(rows)), default=1), dict[tuple[int, int], list[tuple[int, float]]]()
    for row in sorted(good(rows), key=lambda row: (-row.get("time_ranks", 1), row["steps"])):
        if (row["way"], row["ranks"]) == (WAYS[0], most) and "time_ranks" in row:
            key = most // row["time_ranks"], row["time_ranks"]
            found.setdefault(key, []).append((row["steps"], row["both_ms"]))
    return found
