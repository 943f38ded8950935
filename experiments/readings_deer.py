"""What the stored results say of each claim of the DEER paper, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.harness import Results, good, times
from experiments.readings import Told, device


def grid_best(*ways: str, base: str = "torch", key: str = "both_ms") -> Callable[[Results], Told]:
    def told(results: Results) -> Told:
        from experiments.deer.grid_report import PASSES, extremes

        parts = [
            f"{way} {best} at best ({at}), {worst} at worst"
            for way in ways
            for best, at, worst in extremes(results["rows"], way, base, key)
        ]
        about = f"{results.get('note', '').rstrip('.') or device(results)}, {PASSES[key]}"
        more = (f"{PASSES[key]}: {'; '.join(parts)}",) if len(parts) > 1 else ()
        return Told(f"{about}: {parts[0]}", more) if parts else Told(f"{about}: not measured yet")

    return told


def beside_the_paper(results: Results) -> Told:
    """DEER over a loop, where the paper's code has published its own numbers."""
    from experiments.deer import published
    from experiments.deer.grid_report import PASSES, by_place, extremes

    short, more = list[str](), list[str]()
    loops: dict[str, list[float]] = {key: [] for key in PASSES}
    for key, words in PASSES.items():
        parts = []
        for (n, steps, batch), found in by_place(results["rows"]).items():
            if "loop" in found:
                loops[key].append(1e3 * found["loop"][key] / steps)
            theirs = published.SPEEDUPS[key].get((n, steps))
            if theirs and batch == published.BATCH and {"loop", "DEER"} <= set(found):
                parts.append(
                    f"n = {n}, T = {steps:,}: {times(found['loop'][key] / found['DEER'][key])} ({times(theirs)})"
                )
        more += (
            [f"{words}, B = {published.BATCH}, ours and in brackets the paper's: {'; '.join(parts)}"] if parts else []
        )
        for best, at, worst in extremes(results["rows"], "DEER", "loop", key):
            short.append(f"{words} {best} at best ({at}), {worst} at worst")
        slow, fast = max(loops[key], default=0), min(loops[key], default=0)
        more.append(f"{words}, a step of our loop takes {fast:.0f} to {slow:.0f} µs")
    return Told(f"{device(results)}, over a loop of `GRUCell`: {'; '.join(short)}", tuple(more))


def small_and_long(results: Results) -> Told:
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
    return Told(f"{device(results)}, n = 1 … 16, B = 1, forward + backward: " + "; ".join(parts))


def worms(results: Results) -> Told:
    runs = results["runs"]
    told = []
    for name, run in runs.items():
        twin = runs.get(name.replace("parallel", "torch")) if name.startswith("parallel") else None
        if twin:  # whole trainings say more than the few steps that are repeated
            ratio, by = twin["seconds_a_step"] / run["seconds_a_step"], "median steps of two whole trainings"
        elif run.get("speedup"):
            ratio, by = run["speedup"], "steps repeated by torch"
        else:
            continue
        told.append(f"{times(ratio)} a training step at {run['length']:,} steps ({by})")
    return Told(f"{results['data']}, {device(results)}: " + ", ".join(told))


def worms_accuracy(results: Results) -> Told:
    if "accuracy" in results:
        told = [f"{name} {mean:.1%} ± {spread:.1%}" for name, (mean, spread, _) in results["accuracy"].items()]
    else:
        told = [f"{name} {run['test_quality']:.0%}" for name, run in results["runs"].items()]
    return Told(f"{results['data']}: " + ", ".join(told))


def two_bodies(results: Results) -> Told:
    found, sizes = results["found"], results["sizes"]
    ratios = [one["loop_seconds"] / one["our_seconds"] for one in found["compared"]]
    compared = found["compared"][-1].get("steps", sizes["steps"])
    orbits = sizes["orbits"] if isinstance(sizes["orbits"], int) else sizes["orbits"][0]
    told = (
        f"{device(results)}, {orbits} orbits ({sizes.get('drawn', 'nearly circular')}), batch "
        f"{sizes.get('batch', orbits)}, {len(found['losses'])} training steps"
        f"{'' if learned_from_all(results) else ', too few to learn from'}: "
        f"{'–'.join(dict.fromkeys(f'{ratio:.0f}' for ratio in (min(ratios), max(ratios))))}× over a loop of "
        "Runge–Kutta steps"
    )
    if sizes.get("pieces"):
        from experiments.deer_two_body.run import piece_of

        first, last = (piece_of(share, sizes["steps"]) - 1 for share in (0.0, 1.0))
        told += f" of {compared} steps; a training step of pieces of {first:,} to {last:,} time steps takes "
        told += f"{min(found['seconds']):.2f} s and more"
    elif sizes.get("grow"):
        told += f" of {compared} steps; a training step of {sizes['grow']} time steps, as many more in every epoch, "
        told += f"takes {min(found['seconds']):.2f} s and more"
    elif compared < sizes["steps"]:
        loop = min(one["loop_seconds"] for one in found["compared"]) * sizes["steps"] / compared
        ours = min(found["seconds"])
        told += (
            f" of {compared} steps; of all {sizes['steps']:,} a training step takes {ours:.2f} s, and the loop, "
            f"scaled, {loop:.0f} s ({loop / ours:.0f}×)"
        )
    return Told(f"{told}; gradients apart by {max(one['gradient_difference'] for one in found['compared']):.0e}")


def learned_from_all(results: Results) -> bool:
    """Whether every orbit was trained on at least once."""
    orbits = results["sizes"]["orbits"]
    return len(results["found"]["losses"]) * results["sizes"].get("batch", orbits) >= (
        orbits if isinstance(orbits, int) else orbits[0]
    )


def two_bodies_learned(results: Results) -> Told:
    from experiments.deer_two_body.report import schedule

    found = results["found"]
    check, losses = found["validation"], found["losses"]
    sizes = results["sizes"]
    orbits = sizes["orbits"] if isinstance(sizes["orbits"], int) else sizes["orbits"][0]
    return Told(
        f"{device(results)}, {orbits} orbits, kinetic energy {sizes.get('kinetic', 'given')}: loss {losses[0]:.2g} at "
        f"first, {losses[-1]:.2g} after {len(losses)} training steps{schedule(sizes)}; "
        f"error on new orbits {check['error']:.2g} (standing still: {check['standing_still']:.2g})"
    )


def pixel_images(results: Results) -> Told:
    """Losses are compared over the steps that both ways took: a time limit ends the slower one sooner."""
    ways = {name: one for name, one in results["ways"].items() if "error" not in one}
    torch, told = ways["torch"], []
    for name, one in ways.items():
        learned = f"{one['accuracy_by_epoch'][-1]:.0%} after {len(one['losses'])} steps"
        if one is not torch:
            pairs = list(zip(one["losses"], torch["losses"], strict=False))
            apart = max(abs(a - b) for a, b in pairs)
            learned += f" (losses of the first {len(pairs)} apart by {apart:.0e}), a step "
            learned += f"{times(torch['seconds_a_step'] / one['seconds_a_step'])} as fast as torch's"
        told.append(f"{name} {learned}")
    return Told(f"{results['data']}, {device(results)}: " + "; ".join(told))


def warm_starts(results: Results) -> Told:
    rows: dict[str, dict[bool, Any]] = {}
    for row in good(results["rows"]):
        rows.setdefault(row["solver"], {})[row["warm"]] = row
    told = []
    for name, pair in rows.items():
        if len(pair) == 2:
            cold, warm = (min(pair[key]["seconds"][1:] or pair[key]["seconds"]) for key in (False, True))
            sweeps = f"{pair[False]['sweeps'][-1]:.1f} → {pair[True]['sweeps'][-1]:.1f}"
            told.append(f"{name} {sweeps} (an epoch {cold:.2g} → {warm:.2g} s)")
    where = device(results)
    return Told(f"{where}, sweeps of the last epoch without and with the last epoch's states: " + ", ".join(told))


def sweeps(results: Results) -> Told:
    rows = [row for row in results["rows"] if row["network"] in ("as initialised", "trained to remember")]
    told = [
        f"{row['layer']} {row['network']}: DEER {row['solvers']['DEER']['sweeps']}, quasi-DEER "
        f"{row['solvers']['quasi-DEER']['sweeps']}"
        for row in rows
    ]
    return Told("sweeps to 1e-6: " + "; ".join(told))
