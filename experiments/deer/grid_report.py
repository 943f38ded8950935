"""What `experiments.deer.grid` has measured, as a table, in words and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.deer import published
from experiments.harness import COLOURS, Results, earlier_runs, errors, figure, good, made_on, markdown, times

CAPTURED = "DEER, captured"
WAYS = ("torch", "loop", "DEER", CAPTURED, "quasi-DEER", "ELK", "shooting", "default")
PAPER = "its GPU evaluation up to 3 orders of magnitude faster than its sequential loop, training more than 10 times"
THEIRS = "the paper's DEER over its own loop (V100)"
PASSES = {"forward_ms": "forward", "both_ms": "forward + backward"}
OVER = {"torch": "torch's layer", "loop": "the plain loop"}


def in_order(row: Results) -> bool:
    """Whether a graph that was to hold Newton's steps holds one run from step to step, as beyond 32 units it does."""
    return row["way"] == CAPTURED and row["sweeps"][0] == 1


def by_place(rows: list[Results]) -> dict[tuple[int, int, int], dict[str, Results]]:
    """Rows by `(n, T, B)` and way, without those that are not what their way says."""
    places: dict[tuple[int, int, int], dict[str, Results]] = {}
    for row in good(rows):
        if in_order(row):
            continue
        places.setdefault((row["n"], row["T"], row["B"]), {})[row["way"]] = row
    return dict(sorted(places.items(), key=lambda item: (item[0][2], item[0][0], item[0][1])))


def table(results: Results) -> str:
    lines = [
        "GRU on random inputs, float32, milliseconds of forward + backward and, in brackets, how many times as fast "
        "as torch's layer "
        f"and as the plain loop. {(results.get('note') or made_on(results['machine'])).rstrip('.')}."
        f"{earlier_runs(results)}",
        "",
        f"The paper: {PAPER}.",
        "",
    ]
    cells, ways = [], [way for way in WAYS if any(row["way"] == way for row in results["rows"])]
    for place, found in by_place(results["rows"]).items():
        row: list[object] = [*place]
        for way in ways:
            row.append(_cell(way, found))
        cells.append(row)
    lines += markdown(["n", "T", "B", *ways], cells)
    skipped = [row for row in results["rows"] if row.get("error", "").split(": ")[1:2] == ["not run"]]
    wrong = [row for row in results["rows"] if row not in skipped]
    lines += errors(wrong, ("way", "n", "T", "B"))
    lines += (
        ["", f"{len(skipped)} cases were left out for their memory or their time (the JSON file says which)."]
        if skipped
        else []
    )
    serial = sum(in_order(row) for row in good(results["rows"]))
    lines += ["", f"{serial} graphs of DEER ran from step to step, and are not shown as DEER."] if serial else []
    return "\n".join([*lines, "", *verdict(results["rows"]), *beside_the_paper(results["rows"])]) + "\n"


def beside_the_paper(rows: list[Results]) -> list[str]:
    """Where the paper's code has published a number: its DEER over its loop, and ours over a loop of `GRUCell`."""
    cells = []
    for (n, steps, batch), found in by_place(rows).items():
        row: list[object] = [n, steps]
        for key in PASSES:
            row.append(_times(published.SPEEDUPS[key].get((n, steps))))
            row += [
                _times(found["loop"][key] / found[way][key] if {"loop", way} <= set(found) else None)
                for way in ("DEER", CAPTURED)
            ]
        if batch == published.BATCH and (n, steps) in published.SPEEDUPS["forward_ms"]:
            cells.append(row)
    head = ["n", "T", *(f"{words}: {who}" for words in PASSES.values() for who in ("the paper", "DEER", CAPTURED))]
    about = (
        f"B = {published.BATCH}, over a loop: the paper's DEER over JAX's scan on a V100, as published with its code "
        "(means of five seeds), and ours over a loop of `GRUCell`."
    )
    return ["", about, "", *markdown(head, cells)] if cells else []


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else times(ratio)


def _cell(way: str, found: dict[str, Results]) -> str:
    if way not in found:
        return "–"
    ms, ratios = found[way]["both_ms"], []
    for base in ("torch", "loop"):
        if base in found and base != way:
            ratios.append(f"{found[base]['both_ms'] / ms:.2g}×")
    mark = "~" if found[way].get("scaled") else ""
    sweeps = f", {'/'.join(map(str, found[way]['sweeps']))}" if found[way].get("sweeps") else ""
    return f"{mark}{ms:.3g}{sweeps} ({', '.join(ratios)})" if ratios else f"{mark}{ms:.3g}"


def verdict(rows: list[Results]) -> list[str]:
    """Where each way is best over torch's layer and over the loop."""
    lines = []
    for base, over in OVER.items():
        for way in WAYS[2:]:
            told = [
                f"{words} {best} at best ({at}), {worst} at worst"
                for key, words in PASSES.items()
                for best, at, worst in extremes(rows, way, base, key)
            ]
            lines += [f"- {way} over {over}: {'; '.join(told)}."] if told else []
    return lines


def extremes(rows: list[Results], way: str, base: str, key: str) -> list[tuple[str, str, str]]:
    """How many times as fast as `base` a way is at best, where that is, and at worst, if it was measured."""
    ratios = [
        (found[base][key] / found[way][key], place)
        for place, found in by_place(rows).items()
        if base in found and way in found
    ]
    if not ratios:
        return []
    best, (n, steps, batch) = max(ratios)
    return [(times(best), f"n = {n}, T = {steps:,}, B = {batch}", times(min(ratios)[0]))]


def drawn_sizes(places: dict[tuple[int, int, int], dict[str, Results]]) -> list[int]:
    """Units with more than one length of some batch: a single point makes no line."""
    lengths: dict[tuple[int, int], set[int]] = {}
    for n, steps, batch in places:
        lengths.setdefault((n, batch), set()).add(steps)
    return sorted({n for (n, _), some in lengths.items() if len(some) > 1})


def draw(results: Results, path: Path) -> None:
    """Each pass over torch's layer by length, a picture for each batch and number of units; below, over the plain loop,
    beside the paper's own numbers. Of one length alone: by units.
    """
    places = by_place(results["rows"])
    if not places:
        return
    sizes, batches = drawn_sizes(places), sorted({b for _, _, b in places})
    if sizes:
        lines = [("torch", key, batch) for key in PASSES for batch in batches]
        lines += [("loop", key, published.BATCH) for key in PASSES if published.BATCH in batches]
        drawn, axes = figure(
            2.6 * len(sizes) + 1, 2.3 * len(lines) + 1.2, len(lines), len(sizes), sharex=True, sharey="row"
        )
        for line, (base, key, batch) in zip(axes, lines, strict=True):
            for axis, n in zip(line, sizes, strict=True):
                _lines(axis, {t: found for (m, t, b), found in places.items() if (m, b) == (n, batch)}, base, key)
                if base == "loop":
                    theirs = sorted((t, ratio) for (m, t), ratio in published.SPEEDUPS[key].items() if m == n)
                    axis.loglog([t for t, _ in theirs], [r for _, r in theirs], "ks--", markersize=3, label=THEIRS)
                axis.set_title(f"n = {n}, B = {batch}", fontsize=9)
            line[0].set_ylabel(f"{PASSES[key]},\ntimes as fast as {OVER[base]}", fontsize=8)
        for axis in axes[-1]:
            axis.set_xlabel("steps T", fontsize=9)
    else:
        drawn, axes = figure(9, 4.2, 1, len(PASSES), sharey=True)
        (steps, batch), *_ = {(t, b) for _, t, b in places}
        for axis, (key, words) in zip(axes[0], PASSES.items(), strict=True):
            _lines(axis, {n: found for (n, _, _), found in places.items()}, "torch", key)
            axis.set(xlabel="units n", title=f"{words}, T = {steps:,}, B = {batch}")
            axis.set_xticks(sorted(n for n, _, _ in places), sorted(n for n, _, _ in places))
            axis.minorticks_off()
        axes[0][0].set_ylabel(f"times as fast as {OVER['torch']}")
    handles = {
        label: one for axis in axes.flatten() for one, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=9)
    drawn.suptitle((results.get("note") or made_on(results["machine"])).rstrip("."), fontsize=9)
    drawn.savefig(path, dpi=90)


def _lines(axis: Any, found: dict[int, dict[str, Results]], base: str, key: str) -> None:
    """A line for each way: by length or units, how many times as fast as `base`."""
    for colour, way in zip(COLOURS, WAYS[1:], strict=False):
        here = sorted(
            (at, ways[base][key] / ways[way][key])
            for at, ways in found.items()
            if {base, way} <= set(ways) and way != base
        )
        if here:
            axis.loglog([at for at, _ in here], [r for _, r in here], marker=".", color=colour, label=way)
    axis.axhline(1.0, color="grey", linewidth=0.6)
