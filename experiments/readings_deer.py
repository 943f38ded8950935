"""What the stored results say of each claim of the DEER paper, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.harness import Results, good
from experiments.readings import device


def grid_best(*ways: str, base: str = "torch") -> Callable[[Results], str]:
    def told(results: Results) -> str:
        from experiments.deer.grid_report import by_place

        places, parts = by_place(results["rows"]), []
        for way in ways:
            found = [
                (here[base]["both_ms"] / here[way]["both_ms"], place)
                for place, here in places.items()
                if base in here and way in here
            ]
            if found:
                best, (n, steps, batch) = max(found)
                parts.append(
                    f"{way} {best:.3g}× at best (n = {n}, T = {steps:,}, B = {batch}), {min(found)[0]:.2g}× at worst"
                )
        note = results.get("note") or device(results)
        return f"{note.rstrip('.')}: " + ("; ".join(parts) or "not measured yet")

    return told


def small_and_long(results: Results) -> str:
    """DEER against torch's layer where states are small and one sequence is long."""
    from experiments.deer.grid_report import by_place

    parts = []
    for way, words in (("DEER", "called eagerly"), ("DEER, captured", "in a CUDA graph")):
        found: dict[int, list[float]] = {}
        for (n, steps, batch), here in by_place(results["rows"]).items():
            if n <= 16 and steps >= 16384 and batch == 1 and "torch" in here and way in here:
                found.setdefault(steps, []).append(here["torch"]["both_ms"] / here[way]["both_ms"])
        told = [f"{min(some):.1f}–{max(some):.1f}× at T = {steps:,}" for steps, some in sorted(found.items())]
        parts.append(f"{words} {', '.join(told)}")
    return f"{device(results)}, n = 1 … 16, B = 1, forward + backward: " + "; ".join(parts)


def worms(results: Results) -> str:
    runs = results["runs"]
    timed = [run for run in runs.values() if run.get("speedup")]
    told = [f"{run['speedup']:.0f}× a training step at {run['length']:,} steps" for run in timed]
    return f"{results['data']}, {device(results)}: " + ", ".join(told)


def worms_accuracy(results: Results) -> str:
    if "accuracy" in results:
        return f"{results['data']}: " + ", ".join(
            f"{name} {mean:.1%} ± {spread:.1%}" for name, (mean, spread, _) in results["accuracy"].items()
        )
    return f"{results['data']}: " + ", ".join(
        f"{name} {run['test_quality']:.0%}" for name, run in results["runs"].items()
    )


def two_bodies(results: Results) -> str:
    found, sizes = results["found"], results["sizes"]
    ratios = [one["loop_seconds"] / one["our_seconds"] for one in found["compared"]]
    compared = found["compared"][-1].get("steps", sizes["steps"])
    orbits = sizes["orbits"] if isinstance(sizes["orbits"], int) else sizes["orbits"][0]
    told = (
        f"{device(results)}, {orbits} orbits, {len(found['losses'])} training steps: "
        f"{min(ratios):.0f}–{max(ratios):.0f}× over a loop of Runge–Kutta steps"
    )
    if compared < sizes["steps"]:
        loop = min(one["loop_seconds"] for one in found["compared"]) * sizes["steps"] / compared
        ours = min(found["seconds"])
        told += (
            f" of {compared} steps; of all {sizes['steps']:,} a training step takes {ours:.2f} s, and the loop, "
            f"scaled, {loop:.0f} s ({loop / ours:.0f}×)"
        )
    return f"{told}; gradients apart by {max(one['gradient_difference'] for one in found['compared']):.0e}"


def two_bodies_learned(results: Results) -> str:
    found = results["found"]
    check, losses = found["validation"], found["losses"]
    return (
        f"{device(results)}: loss {losses[0]:.2g} at first, {losses[-1]:.2g} after {len(losses)} training steps; "
        f"error on new orbits {check['error']:.2g} (standing still: {check['standing_still']:.2g})"
    )


def pixel_images(results: Results) -> str:
    ways = {name: one for name, one in results["ways"].items() if "error" not in one}
    base, told = ways["torch"]["seconds_a_step"], []
    for name, one in ways.items():
        learned = f"{one['accuracy_by_epoch'][-1]:.0%} after {len(one['losses'])} steps"
        told.append(f"{name} {learned}, a step {base / one['seconds_a_step']:.2g}× as fast as torch's")
    return f"{results['data']}, {device(results)}: " + "; ".join(told)


def warm_starts(results: Results) -> str:
    rows: dict[str, dict[bool, Any]] = {}
    for row in good(results["rows"]):
        rows.setdefault(row["solver"], {})[row["warm"]] = row
    told = []
    for name, pair in rows.items():
        if len(pair) == 2:
            cold, warm = (min(pair[key]["seconds"][1:] or pair[key]["seconds"]) for key in (False, True))
            sweeps = f"{pair[False]['sweeps'][-1]:.1f} → {pair[True]['sweeps'][-1]:.1f}"
            told.append(f"{name} {sweeps} (an epoch {1e3 * cold:.3g} → {1e3 * warm:.3g} ms)")
    where = device(results)
    return f"{where}, sweeps of the last epoch without and with the last epoch's states: " + ", ".join(told)


def sweeps(results: Results) -> str:
    rows = [row for row in results["rows"] if row["network"] in ("as initialised", "trained to remember")]
    told = [
        f"{row['layer']} {row['network']}: DEER {row['solvers']['DEER']['sweeps']}, quasi-DEER "
        f"{row['solvers']['quasi-DEER']['sweeps']}"
        for row in rows
    ]
    return "sweeps to 1e-6: " + "; ".join(told)
