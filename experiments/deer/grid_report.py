"""What `experiments.deer.grid` has measured, as a table, in words and as a picture."""

from __future__ import annotations

from pathlib import Path

from experiments.harness import COLOURS, Results, errors, figure, good, made_on, markdown

CAPTURED = "DEER, captured"
WAYS = ("torch", "loop", "DEER", CAPTURED, "quasi-DEER", "ELK", "shooting", "default")
PAPER = "its GPU evaluation up to 3 orders of magnitude faster than its sequential loop, training more than 10 times"


def by_place(rows: list[Results]) -> dict[tuple[int, int, int], dict[str, Results]]:
    """Rows by `(n, T, B)` and way."""
    places: dict[tuple[int, int, int], dict[str, Results]] = {}
    for row in good(rows):
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
    for base in ("torch", "loop"):
        for way in WAYS[2:]:
            ratios = [
                (found[base]["both_ms"] / found[way]["both_ms"], place)
                for place, found in by_place(rows).items()
                if base in found and way in found
            ]
            if ratios:
                best, (n, steps, batch) = max(ratios)
                over = "torch's layer" if base == "torch" else "the loop"
                lines.append(
                    f"- {way} over {over}: {best:.3g}× at best (n = {n}, T = {steps:,}, B = {batch}), "
                    f"{min(ratios)[0]:.2g}× at worst."
                )
    return lines


def draw(results: Results, path: Path) -> None:
    """Forward + backward over torch's layer by length: a picture for each batch and number of units."""
    places = by_place(results["rows"])
    sizes, batches = sorted({n for n, _, _ in places}), sorted({b for _, _, b in places})
    if not places:
        return
    drawn, axes = figure(
        2.6 * len(sizes) + 1, 2.4 * len(batches) + 0.8, len(batches), len(sizes), sharex=True, sharey=True
    )
    for line, batch in zip(axes, batches, strict=True):
        for axis, n in zip(line, sizes, strict=True):
            for colour, way in zip(COLOURS, WAYS[1:], strict=False):
                here = sorted(
                    (steps, found["torch"]["both_ms"] / found[way]["both_ms"])
                    for (size, steps, b), found in places.items()
                    if (size, b) == (n, batch) and way in found and "torch" in found
                )
                axis.loglog([t for t, _ in here], [r for _, r in here], marker=".", color=colour, label=way)
            axis.axhline(1.0, color="grey", linewidth=0.6)
            axis.set_title(f"n = {n}, B = {batch}", fontsize=8)
    axes[-1][0].set_xlabel("steps")
    axes[-1][0].set_ylabel("over torch's layer")
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS))
    drawn.suptitle(f"forward + backward; {results.get('note') or made_on(results['machine'])}", fontsize=8)
    drawn.savefig(path, dpi=90)
