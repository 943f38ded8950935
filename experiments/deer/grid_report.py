"""What `experiments.deer.grid` has measured, as a table, in words and as a picture."""

from __future__ import annotations

from pathlib import Path

from experiments.harness import COLOURS, Results, errors, figure, good, made_on, markdown, times

CAPTURED = "DEER, captured"
WAYS = ("torch", "loop", "DEER", CAPTURED, "quasi-DEER", "ELK", "shooting", "default")
PAPER = "its GPU evaluation up to 3 orders of magnitude faster than its sequential loop, training more than 10 times"
PASSES = {"forward_ms": ("forward", 1000.0), "both_ms": ("forward + backward", 10.0)}
"""In words, and how many times as fast as its own loop the paper says that is."""


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
        f"and as the plain loop. {results.get('note') or made_on(results['machine'])}",
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
    return "\n".join([*lines, "", *verdict(results["rows"])]) + "\n"


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
    for base, over in (("torch", "torch's layer"), ("loop", "the loop")):
        for way in WAYS[2:]:
            told = [
                f"{words} {best} at best ({at}), {worst} at worst"
                for key, (words, _) in PASSES.items()
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


def draw(results: Results, path: Path) -> None:
    """Each pass over torch's layer by length: a picture for each batch and number of units."""
    places = by_place(results["rows"])
    sizes, batches = sorted({n for n, _, _ in places}), sorted({b for _, _, b in places})
    if not places:
        return
    lines = [(key, batch) for key in PASSES for batch in batches]
    drawn, axes = figure(2.6 * len(sizes) + 1, 2.4 * len(lines) + 0.8, len(lines), len(sizes), sharex=True, sharey=True)
    for line, (key, batch) in zip(axes, lines, strict=True):
        words, paper = PASSES[key]
        for axis, n in zip(line, sizes, strict=True):
            for colour, way in zip(COLOURS, WAYS[1:], strict=False):
                here = sorted(
                    (steps, found["torch"][key] / found[way][key])
                    for (size, steps, b), found in places.items()
                    if (size, b) == (n, batch) and way in found and "torch" in found
                )
                axis.loglog([t for t, _ in here], [r for _, r in here], marker=".", color=colour, label=way)
            axis.axhline(1.0, color="grey", linewidth=0.6)
            axis.axhline(paper, color="black", linewidth=0.6, linestyle="--")
            axis.set_title(f"n = {n}, B = {batch}, {words}", fontsize=8)
        line[0].set_ylabel("over torch's layer", fontsize=8)
    axes[-1][0].set_xlabel("steps")
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS))
    paper = "dashed: the paper, over its own loop, up to 1,000× in evaluation and more than 10× in training"
    drawn.suptitle(f"{results.get('note') or made_on(results['machine'])}; {paper}", fontsize=8)
    drawn.savefig(path, dpi=90)
