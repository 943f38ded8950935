"""What the stored results say of each claim, in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from experiments.harness import Results, good

FOLDER = Path(__file__).parent


def stored(name: str) -> Results | None:
    """A kept result, as `bppsa_bitstream/grid_rnn_cuda`; None where nothing is kept yet."""
    folder, _, file = name.partition("/")
    path = FOLDER / folder / "results" / f"{file}.json"
    return json.loads(path.read_text()) if path.exists() else None


def device(results: Results) -> str:
    machine = results.get("machine") or results.get("facts") or {}
    name = machine.get("device", "unknown")
    return "one CPU thread" if name in ("x86_64", "aarch64") else name


# Multigrid


def ranks_speedup(results: Results) -> str:
    from experiments.mgrit.rank_report import best_alone, best_serial, pure

    rows = [row for row in pure(results["rows"]) if row["ranks"] > 1]
    longest, parts = max(row["steps"] for row in rows), []
    bases = {
        "torch's serial GRU": best_serial(results["rows"], longest, "GRU"),
        "the best serial run of the same network": best_serial(results["rows"], longest, "implicit GRU"),
        "its best on one process": best_alone(results["rows"], longest),
    }
    for way in dict.fromkeys(row["way"] for row in rows):
        most = max((row for row in rows if (row["way"], row["steps"]) == (way, longest)), key=lambda row: row["ranks"])
        told = [f"{base['both_ms'] / most['both_ms']:.3g}× over {name}" for name, base in bases.items() if base]
        parts.append(f"{way} {most['both_ms']:.1f} ms on {most['ranks']} processes ({', '.join(told)})")
    cores = (results.get("machine") or {}).get("cores")
    sizes = results["sizes"]
    told = f"T = {longest:,}, {sizes['hidden']} units, batch {sizes['batch']}, {cores} cores: " + "; ".join(parts)
    return told + by_length(results["rows"])


def by_length(rows: list[Results]) -> str:
    """The most processes against the serial networks at every length, and the model at the one it has not seen."""
    from experiments.mgrit.rank_report import WAYS, best_serial, most_processes, predict

    here = most_processes(rows)
    if len(here) < 2:
        return ""
    parts = []
    for words, way in (("torch's serial GRU", "GRU"), ("the best serial run of the same network", "implicit GRU")):
        bases = [(row, best_serial(rows, row["steps"], way)) for row in here]
        told = [f"{base['both_ms'] / row['both_ms']:.3g}× at {row['steps']:,}" for row, base in bases if base]
        parts.append(f"over {words} {', '.join(told)}")
    ratios = [one["ratio"] for one in predict(rows, WAYS[0]) if one["held_out"]]
    model = f". A model of the time says {min(ratios):.2f} to {max(ratios):.2f} of it at a length it has not seen"
    return f". {WAYS[0]} on {here[0]['ranks']} processes by length: " + "; ".join(parts) + (model if ratios else "")


def preprocessors(results: Results) -> str:
    from experiments.mgrit_hmdb51.nets import speedups

    found = speedups(results["rows"])
    most = max(ranks for _, ranks in found)
    told = [
        f"{net} {found[net, ranks][0]:.2f}×, with features kept {found[net, ranks][1]:.2f}×"
        for net, ranks in sorted(found)
        if ranks == most
    ]
    cores = (results.get("machine") or {}).get("cores")
    return f"{most} processes on {cores} cores: " + "; ".join(told)


def ways_accuracy(results: Results) -> str:
    told = [
        f"{name} {one['accuracy']:.0%} ({1e3 * one['seconds_a_step']:.0f} ms a step)"
        for name, one in results["ways"].items()
        if "accuracy" in one
    ]
    return f"{results['data']}, {device(results)}: " + ", ".join(told)


def accuracy_cost(results: Results) -> str:
    parts = []
    for name, found in results["sets"].items():
        means = {way: sum(run["serial inference"] for run in runs) / len(runs) for way, runs in found["ways"].items()}
        parts.append(f"{name}: " + ", ".join(f"{way} {mean:.0%}" for way, mean in means.items()))
    return "; ".join(parts)


def gradient_errors(results: Results) -> str:
    rows = [row for row in results["rows"] if row["method"] == "as published"]
    return "gradients as published are off by " + ", ".join(
        f"{row['error']:.0%} ({row['network']}, {row['regime']})" for row in rows
    )


def length_speedup(results: Results) -> str:
    parts = []
    for regime, rows in results["regimes"].items():
        here = [row for row in rows if "torch.nn.GRU" in row and "multigrid" in row]
        ratios = [
            (row["steps"], row["torch.nn.GRU"]["milliseconds"] / row["multigrid"]["milliseconds"]) for row in here
        ]
        parts.append(
            f"{regime}: "
            + ", ".join(f"{r:.3g}× at T = {t:,}" for t, r in (ratios[0], ratios[len(ratios) // 2], ratios[-1]))
        )
    return f"{device(results)}: " + "; ".join(parts)


def coarse_steps(results: Results) -> str:
    parts: dict[int, list[str]] = {}
    for row in good(results["rows"]):
        parts.setdefault(row["factor"], []).append(f"{row['step']} {row['residuals'][-1]:.0e}")
    told = [f"{factor} steps in one: {', '.join(steps)}" for factor, steps in parts.items()]
    return f"residual after {results['sizes']['cycles']} cycles or where it stopped; " + "; ".join(told)


# BPPSA


def best_of(key: str) -> Callable[[Results], str]:
    def told(results: Results) -> str:
        rows = good(results["rows"])
        parts = []
        for family, words in (("scan", "by a scan"), ("", "by any way")):
            here = [row for row in rows if row["way"].startswith(family)]
            best = max(here, key=lambda row: row[f"torch_{key}_ms"] / row[f"{key}_ms"])
            ratio = best[f"torch_{key}_ms"] / best[f"{key}_ms"]
            parts.append(f"{ratio:.2f}× {words} ({best['way']}, T = {best['steps']:,}, B = {best['batch']})")
        return f"{device(results)}, at best: " + "; ".join(parts)

    return told


def bitstream_backward(results: Results) -> str:
    parts = []
    for steps, found in results["backward"].items():
        base = found["torch"]["ms"]
        told = ", ".join(f"{name} {base / one['ms']:.2g}×" for name, one in found.items() if name != "torch")
        parts.append(f"T = {steps}: {told}")
    return f"{device(results)}: " + "; ".join(parts)


def bitstream_training(results: Results) -> str:
    ways = results["training"]["ways"]
    base = ways["torch"]["elapsed"][-1] / len(ways["torch"]["elapsed"])
    told = [
        f"{name} {base * len(one['elapsed']) / one['elapsed'][-1]:.2g}× ({one['accuracy']:.0%} right)"
        for name, one in ways.items()
        if name != "torch"
    ]
    return f"{device(results)}: " + ", ".join(told) + f"; torch {ways['torch']['accuracy']:.0%} right"


def instruments(results: Results) -> str:
    parts = []
    for steps, length in results["lengths"].items():
        base, ways = length["methods"]["torch"], length["methods"]
        told = [
            f"{name} {base['backward_ms']['fastest'] / one['backward_ms']['fastest']:.2g}×"
            for name, one in ways.items()
            if name != "torch"
        ]
        parts.append(f"T = {steps}: {', '.join(told)}")
    return f"{results['data']}, {device(results)}, backward pass: " + "; ".join(parts)


def exactness(results: Results) -> str:
    worst = max(
        max(one["gradient_error"].values())
        for length in results["lengths"].values()
        for one in length["methods"].values()
    )
    unlike = sum(
        one["answers_unlike_torch"] for length in results["lengths"].values() for one in length["methods"].values()
    )
    return (
        f"gradients off by {worst:.1e} at most against float64, torch's own included; {unlike} answers unlike torch's "
        "after training"
    )


def pruned_vgg(results: Results) -> str:
    levels, dense = results["levels"], results["serial_dense_flops"]
    best = min(levels, key=lambda row: row["critical_flops"])
    share = results.get("sizes", results.get("options", {}))["share"]
    told = (
        f"1/{share} of the channels, {results.get('data', 'generated images')}: {best['critical_flops'] / 1e6:.2f} M "
        f"FLOPs along {best['critical_steps']} "
        f"steps (levels={best['levels']}) against {dense / 1e6:.1f} M along {len(results['dense_steps'])} of dense "
        "back-propagation; gradients differ "
        f"by {results['largest_difference']:.0e}"
    )
    if "autograd_ms" in results:
        fastest = min(levels, key=lambda row: row["ms"])
        told += (
            f". By the clock in one process {fastest['ms']:.0f} ms at best, autograd {results['autograd_ms']:.0f} ms"
        )
    return told


def zeros(results: Results) -> str:
    if "jacobians" not in results:
        return "not measured yet"
    rows = results["jacobians"]
    by_kind: dict[str, list[Results]] = {}
    for row in rows:
        by_kind.setdefault(row["layer"].split()[1], []).append(row)
    told = []
    for kind, here in by_kind.items():
        ratio = sum(row["autograd_ms"] for row in here) / sum(row["ms"] for row in here)
        told.append(f"{kind} {min(row['zeros'] for row in here):.2%} and more, {ratio:.0f}×")
    return "zeros, and how much faster than autograd's columns: " + "; ".join(told)


def workers(results: Results) -> str:
    from experiments.bppsa_vgg.ranks import modelled

    rows, parts = good(results["rows"]), []
    for way in dict.fromkeys(row["way"] for row in rows):
        here = {row["ranks"]: row for row in rows if row["way"] == way}
        first, last = here[min(here)], here[max(here)]
        flops = modelled(first["products"], first["ranks"]) / modelled(last["products"], last["ranks"])
        measured = first["ms"] / last["ms"]
        parts.append(
            f"{way}: {measured:.2f}× on {last['ranks']} over {first['ranks']} by the clock, {flops:.2f}× by FLOPs"
        )
    cores = (results.get("machine") or {}).get("cores")
    return f"{cores} cores: " + "; ".join(parts)
