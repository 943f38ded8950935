"""What the stored results say of each claim, in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.harness import Results, good, times

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Told:
    """What a result says of a claim: its heart for a table's cell, and the rest for those who want it all."""

    short: str
    more: tuple[str, ...] = ()


def stored(name: str) -> Results | None:
    """A kept result, as `bppsa_bitstream/grid_rnn_cuda`; None where nothing is kept yet."""
    folder, _, file = name.partition("/")
    return read_result(FOLDER / folder / "results" / f"{file}.json")


def read_result(path: Path) -> Results | None:
    """A result as its script wrote it; None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def all_stored() -> list[Path]:
    """The files of all kept results."""
    return sorted(FOLDER.glob("*/results/*.json"))


def device(results: Results) -> str:
    """Where it was measured, and the load that it met there, where one is known and worth a word."""
    machine = results["machine"]
    name, threads, load = (machine.get(key) for key in ("device", "threads", "load"))
    cores = machine.get("of_cores", machine.get("cores"))
    if name in ("x86_64", "aarch64"):
        name = "one CPU thread" if threads == 1 else f"{threads} CPU threads"
    busy = load and cores and load > (threads if "CPU thread" in name else 1) + 1
    if machine.get("clock"):
        name = f"{name}, {machine['clock']}"
    return f"{name} (load {load:.0f} on {cores} cores)" if busy else name


# Multigrid


SAME, CLASSIC = "the best serial run of the same network", "torch's serial GRU"
SERIAL = {SAME: "implicit GRU", CLASSIC: "GRU"}
"""What processes are compared with, and how the names of those rows begin."""
FRAMES = 128
"""Steps of the paper's sequences."""
PUBLISHED_FACTOR = 4
"""Steps in one on the next level, in the command published with its code."""
JUMP = 1.5
"""More time a step than at half the length by so much is told."""


def ranks_speedup(results: Results) -> Told:
    from experiments.mgrit.rank_report import WAYS, best_serial, most_processes, pure

    rows, sizes = results["rows"], results["sizes"]
    longest = most_processes(rows)[-1]
    steps, ranks = longest["steps"], longest["ranks"]
    cores = (results.get("machine") or {}).get("cores")
    short = f"{longest['way']}, {sizes['hidden']} units, batch {sizes['batch']}, {ranks} processes on {cores} cores; "
    short += f"T = {steps:,}: {_over(longest, _bases(rows, steps))}"
    here = {row["steps"]: row for row in most_processes(rows)}
    short += _jump(rows, list(here.values()))
    if FRAMES in here:
        short += f"; T = {FRAMES}, the paper's length: {_over(here[FRAMES], _bases(rows, FRAMES))}"
    ways = [row for row in pure(rows) if row["steps"] == steps and row["ranks"] > 1]
    by_count = sorted((row["ranks"], row["both_ms"]) for row in pure(rows) if _at(row) == (longest["way"], steps))
    told = ", ".join(f"{ms:.1f} ms on {count}" for count, ms in by_count)
    more = [f"T = {steps:,}, {longest['way']}, by processes: {told}"]
    for way in dict.fromkeys(row["way"] for row in ways):
        most = max((row for row in ways if row["way"] == way), key=lambda row: row["ranks"])
        told = _over(most, _bases(rows, steps))
        more.append(f"T = {steps:,}, {way}: {most['both_ms']:.1f} ms on {most['ranks']} processes, {told}")
    for words, way in SERIAL.items():
        pairs = [(row, best_serial(rows, row["steps"], way)) for row in here.values()]
        told = ", ".join(
            f"{times(base['both_ms'] / row['both_ms'])} at {row['steps']:,}" for row, base in pairs if base
        )
        more += [f"{WAYS[0]} on {ranks} processes over {words}, by length: {told}"] if told and len(here) > 1 else []
    return Told(short, (*more, *_model_of_ranks(rows)))


def _at(row: Results) -> tuple[str, int]:
    return row["way"], row["steps"]


def _jump(rows: list[Results], here: list[Results]) -> str:
    """Where the serial run takes far more than twice as long over twice the steps, the gain rests on that: told."""
    from experiments.mgrit.rank_report import best_serial

    if len(here) < 2:
        return ""
    before, last = (best_serial(rows, row["steps"], SERIAL[SAME]) for row in here[-2:])
    if not (before and last) or last["both_ms"] / before["both_ms"] < JUMP * last["steps"] / before["steps"]:
        return ""
    ratio = times(before["both_ms"] / here[-2]["both_ms"])
    return (
        f". That serial run jumps from {before['both_ms']:.1f} ms at T = {before['steps']:,}, where processes reach "
        f"{ratio}, to {last['both_ms']:.1f} ms: the gain over it is this jump"
    )


def _bases(rows: list[Results], steps: int) -> dict[str, Results | None]:
    from experiments.mgrit.rank_report import best_alone, best_serial

    found = {words: best_serial(rows, steps, way) for words, way in SERIAL.items()}
    return {**found, "its best on one process": best_alone(rows, steps)}


def _over(row: Results, bases: dict[str, Results | None]) -> str:
    return ", ".join(
        f"{times(base['both_ms'] / row['both_ms'])} over {name}{' (scaled)' if base.get('scaled') else ''}"
        for name, base in bases.items()
        if base
    )


def _model_of_ranks(rows: list[Results]) -> list[str]:
    """How the model of the time does at the length that it has not seen, and where it was fitted."""
    from experiments.mgrit.rank_report import WAYS, predict

    told = []
    for way in WAYS:
        said = predict(rows, way)
        seen, unseen = ([one["ratio"] for one in said if one["held_out"] is held] for held in (False, True))
        if said:
            spans = [f"{min(ratios):.2f} to {max(ratios):.2f}" for ratios in (unseen, seen)]
            told.append(f"{way} {spans[0]} ({spans[1]} where it was fitted)")
    return [f"A model of the time says of it, at a length it has not seen: {', '.join(told)}"] if told else []


def preprocessors(results: Results) -> Told:
    from experiments.mgrit_hmdb51.nets import speedups

    found = speedups(results["rows"])
    most = max(ranks for _, ranks in found)
    told = []
    for net in dict.fromkeys(net for net, _ in sorted(found)):
        both, kept = found[net, most]
        alone = f", on one process {found[net, 1][1]:.2f}×" if (net, 1) in found and most > 1 else ""
        told.append(f"{net} {both:.2f}× with its features made in every step; with features kept {kept:.2f}×{alone}")
    sizes, cores = results["sizes"], (results.get("machine") or {}).get("cores")
    about = f"{most} processes on {cores} cores, {sizes['size']} × {sizes['size']} pixels, batch {sizes['batch']}"
    return Told(f"{about}, over torch's serial GRU: " + "; ".join(told))


def ways_accuracy(results: Results) -> Told:
    ways = {name: one for name, one in results["ways"].items() if "accuracy" in one}
    told = ", ".join(f"{name} {one['accuracy']:.0%}" for name, one in ways.items())
    seconds = ", ".join(f"{name} {1e3 * one['seconds_a_step']:.0f} ms" for name, one in ways.items())
    return Told(f"{results['data']}, {device(results)}: {told}", (f"A training step: {seconds}",))


def accuracy_cost(results: Results) -> Told:
    parts = []
    for name, found in results["sets"].items():
        means = {way: sum(run["serial inference"] for run in runs) / len(runs) for way, runs in found["ways"].items()}
        parts.append(f"{name}: " + ", ".join(f"{way} {mean:.0%}" for way, mean in means.items()))
    return Told("; ".join(parts))


def gradient_errors(results: Results) -> Told:
    rows = [row for row in results["rows"] if row["method"] == "as published"]
    found, told = (
        [row["error"] for row in rows],
        [f"{row['error']:.0%} ({row['network']}, {row['regime']})" for row in rows],
    )
    short = f"gradients as published are off by {min(found):.0%} to {max(found):.0%}"
    return Told(short, (f"Gradients as published are off by {', '.join(told)}",))


def length_speedup(results: Results) -> Told:
    parts = []
    for regime, rows in results["regimes"].items():
        here = [row for row in rows if "torch.nn.GRU" in row and "multigrid" in row]
        ratios = [
            (row["steps"], row["torch.nn.GRU"]["milliseconds"] / row["multigrid"]["milliseconds"]) for row in here
        ]
        parts.append(
            f"{regime}: "
            + ", ".join(f"{times(r)} at T = {t:,}" for t, r in (ratios[0], ratios[len(ratios) // 2], ratios[-1]))
        )
        last, implicit = here[-1], "implicit GRU, multigrid"
        if implicit in last:
            ratio = last["torch.nn.GRU"]["milliseconds"] / last[implicit]["milliseconds"]
            parts[-1] += f", the implicit GRU {times(ratio)} there"
    return Told(f"{device(results)}: " + "; ".join(parts))


def coarse_steps(results: Results) -> Told:
    parts: dict[int, list[str]] = {}
    for row in good(results["rows"]):
        parts.setdefault(row["factor"], []).append(f"{row['step']} {row['residuals'][-1]:.0e}")
    told = [f"{factor} steps in one: {', '.join(steps)}" for factor, steps in parts.items()]
    about = f"residual after {results['sizes']['cycles']} cycles or where it stopped; "
    published = f"{PUBLISHED_FACTOR} steps in one: {', '.join(parts[PUBLISHED_FACTOR])}"
    return Told(about + published, (f"R{about[1:]}" + "; ".join(told),))


# BPPSA


PASSES = {"backward": "the backward pass", "both": "a training step"}


def best_of(*keys: str) -> Callable[[Results], Told]:
    def told(results: Results) -> Told:
        rows = good(results["rows"])
        parts = []
        for key in keys:
            for family, words in (("scan", "by a scan"), ("", "by any way")):
                here = [row for row in rows if row["way"].startswith(family)]
                best = max(here, key=lambda row: row[f"torch_{key}_ms"] / row[f"{key}_ms"])
                ratio = times(best[f"torch_{key}_ms"] / best[f"{key}_ms"])
                which = f"{PASSES[key]} " if len(keys) > 1 else ""
                parts.append(f"{which}{ratio} {words} ({best['way']}, T = {best['steps']:,}, B = {best['batch']})")
        return Told(f"{device(results)}, at best: " + "; ".join(parts))

    return told


def bitstream_backward(results: Results) -> Told:
    parts = []
    for steps, found in results["backward"].items():
        base = found["torch"]["ms"]
        told = ", ".join(f"{name} {base / one['ms']:.2g}×" for name, one in found.items() if name != "torch")
        parts.append(f"T = {int(steps):,}: {told}")
    return _longest_first(device(results), parts)


def _longest_first(about: str, parts: list[str]) -> Told:
    """The last of the parts in short, all of them behind it."""
    return Told(f"{about}, {parts[-1]}", ("; ".join(parts),) if len(parts) > 1 else ())


def bitstream_training(results: Results) -> Told:
    from experiments.bppsa_bitstream.run import seconds, steps_of

    about, ways = results["training"], results["training"]["ways"]
    streams = f"{about['sequences']:,} streams" if about.get("sequences") else "new streams in every step"
    how = f"{steps_of(ways['torch']):,} steps of {streams} of {about['length']:,} bits, Adam at {about['rate']:g}"
    told = [
        f"{name} {seconds(ways['torch']) / seconds(one):.2g}× ({one['accuracy']:.0%} right)"
        for name, one in ways.items()
        if name != "torch"
    ]
    right = f"torch {ways['torch']['accuracy']:.0%} right"
    return Told(f"{device(results)}, {how}: a step {', '.join(told)}; {right}")


def instruments(results: Results) -> Told:
    parts = []
    for steps, length in results["lengths"].items():
        base, ways = length["methods"]["torch"], length["methods"]
        ratios = {
            name: [base[key]["fastest"] / one[key]["fastest"] for key in ("backward_ms", "step_ms")]
            for name, one in ways.items()
            if name != "torch"
        }
        told = [f"{name} {backward:.2g}× ({step:.2g}×)" for name, (backward, step) in ratios.items()]
        parts.append(f"T = {int(steps):,}: {', '.join(told)}")
    about = f"{results['data']}, {device(results)}, batch {results['batch']}"
    inputs = results.get("features_in_words", "inputs not named")
    return _longest_first(f"{about}, {inputs}; backward pass (whole step)", parts)


def exactness(results: Results) -> Told:
    methods = [(name, one) for length in results["lengths"].values() for name, one in length["methods"].items()]
    errors = {
        whose: max(max(one["gradient_error"].values()) for name, one in methods if (name == "torch") == torchs)
        for whose, torchs in (("ours", False), ("torch's", True))
    }
    unlike = sum(one["answers_unlike_torch"] for _, one in methods)
    told = " and ".join(f"{whose} by {error:.1e}" for whose, error in errors.items())
    return Told(f"gradients off from float64: {told} at most; {unlike} answers unlike torch's after training")


def pruned_vgg(results: Results) -> Told:
    levels, dense = results["levels"], results["serial_dense_flops"]
    share = results["sizes"]["share"]
    by_level = [
        f"{row['critical_flops'] / 1e6:,.2f} M in {row['critical_steps']} by the scan, levels={row['levels']}"
        for row in levels
        if row["levels"]
    ]
    told = (
        f"{'full width' if share == 1 else f'1/{share} of the channels'}, {results['data']}, along the critical path: "
        f"{dense / 1e6:.1f} M FLOPs in {len(results['dense_steps'])} steps by dense back-propagation, "
        f"{results['serial_sparse_flops'] / 1e6:.2f} M in as many by sparse Jacobians in order, "
        f"{'; '.join(by_level)}; gradients differ by {results['largest_difference']:.0e}"
    )
    if "autograd_ms" in results:
        in_order = next(row for row in levels if not row["levels"])
        fastest = min((row for row in levels if row["levels"]), key=lambda row: row["ms"])
        told += (
            f". By the clock in one process the scan takes {fastest['ms']:.0f} ms at best, Jacobians in order "
            f"{in_order['ms']:.0f} ms, autograd {results['autograd_ms']:.0f} ms"
        )
    return Told(told)


def zeros(results: Results) -> Told:
    rows = results["jacobians"]
    by_kind: dict[str, list[Results]] = {}
    for row in rows:
        by_kind.setdefault(row["layer"].split()[1], []).append(row)
    told = []
    for kind, here in by_kind.items():
        ratio = sum(row["autograd_ms"] for row in here) / sum(row["ms"] for row in here)
        told.append(f"{kind} {min(row['zeros'] for row in here):.2%} and more, {ratio:.0f}×")
    return Told("zeros, and how much faster than autograd's columns: " + "; ".join(told))


def workers(results: Results) -> Told:
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
    return Told(f"{cores} cores: " + "; ".join(parts))
