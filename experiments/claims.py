"""Every claim of the papers, and how ours is read from the stored results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.catalogue import BPPSA, DEER, MGRIT
from experiments.harness import Results, good

FOLDER = Path(__file__).parent


def stored(name: str) -> Results | None:
    """A kept result, as `bppsa_bitstream/grid_rnn_cuda`; None where nothing is kept yet."""
    folder, _, file = name.partition("/")
    path = FOLDER / folder / "results" / f"{file}.json"
    return json.loads(path.read_text()) if path.exists() else None


@dataclass(frozen=True)
class Claim:
    """What a paper says, what we found, and what differs."""

    paper: str
    says: str
    number: str
    """The paper's."""
    results: tuple[str, ...]
    """Stored results that ours is read from, the first that is there."""
    ours: Callable[[Results], str]
    differs: str
    command: str
    """Without `python -m experiments.` in front."""

    def found(self) -> tuple[str, str | None]:
        """Ours in words, and the result that it was read from."""
        for name in self.results:
            kept = stored(name)
            if kept is not None:
                return self.ours(kept), name
        return "not measured yet", None


def device(results: Results) -> str:
    machine = results.get("machine") or results.get("facts") or {}
    name = machine.get("device", "unknown")
    return "one CPU thread" if name in ("x86_64", "aarch64") else name


# Multigrid


def ranks_speedup(results: Results) -> str:
    rows = [row for row in good(results["rows"]) if "multigrid" in row["way"] and row.get("time_ranks") == row["ranks"]]
    longest = max(row["steps"] for row in rows)
    parts = []
    for way in dict.fromkeys(row["way"] for row in rows):
        here = {row["ranks"]: row["both_ms"] for row in rows if (row["way"], row["steps"]) == (way, longest)}
        most = max(here)
        parts.append(f"{way}: {here[min(here)] / here[most]:.2f}× on {most} processes over {min(here)}")
        serial = [row["both_ms"] for row in good(results["rows"]) if row["steps"] == longest and "serial" in row["way"] and row["way"].startswith("implicit")]
        if serial:
            parts[-1] += f", {min(serial) / min(here.values()):.2f}× over the best serial run of the same network"
    cores = (results.get("machine") or {}).get("cores")
    return f"T = {longest:,}, {cores} cores: " + "; ".join(parts)


def ways_accuracy(results: Results) -> str:
    told = [f"{name} {one['accuracy']:.0%}" for name, one in results["ways"].items() if "accuracy" in one]
    return f"{results['data']}: " + ", ".join(told)


def accuracy_cost(results: Results) -> str:
    parts = []
    for name, found in results["sets"].items():
        means = {way: sum(run["serial inference"] for run in runs) / len(runs) for way, runs in found["ways"].items()}
        parts.append(f"{name}: " + ", ".join(f"{way} {mean:.0%}" for way, mean in means.items()))
    return "; ".join(parts)


def gradient_errors(results: Results) -> str:
    rows = [row for row in results["rows"] if row["method"] == "as published"]
    return "gradients as published are off by " + ", ".join(f"{row['error']:.0%} ({row['network']}, {row['regime']})" for row in rows)


def length_speedup(results: Results) -> str:
    parts = []
    for regime, rows in results["regimes"].items():
        here = [row for row in rows if "torch.nn.GRU" in row and "multigrid" in row]
        ratios = [(row["steps"], row["torch.nn.GRU"]["milliseconds"] / row["multigrid"]["milliseconds"]) for row in here]
        parts.append(f"{regime}: " + ", ".join(f"{r:.3g}× at T = {t:,}" for t, r in (ratios[0], ratios[len(ratios) // 2], ratios[-1])))
    return f"{device(results)}: " + "; ".join(parts)


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
    told = [f"{name} {base * len(one['elapsed']) / one['elapsed'][-1]:.2g}× ({one['accuracy']:.0%} right)" for name, one in ways.items() if name != "torch"]
    return f"{device(results)}: " + ", ".join(told) + f"; torch {ways['torch']['accuracy']:.0%} right"


def instruments(results: Results) -> str:
    parts = []
    for steps, length in results["lengths"].items():
        base, ways = length["methods"]["torch"], length["methods"]
        told = [f"{name} {base['backward_ms']['fastest'] / one['backward_ms']['fastest']:.2g}×" for name, one in ways.items() if name != "torch"]
        parts.append(f"T = {steps}: {', '.join(told)}")
    return f"{results['data']}, {device(results)}, backward pass: " + "; ".join(parts)


def exactness(results: Results) -> str:
    worst = max(max(one["gradient_error"].values()) for length in results["lengths"].values() for one in length["methods"].values())
    unlike = sum(one["answers_unlike_torch"] for length in results["lengths"].values() for one in length["methods"].values())
    return f"gradients off by {worst:.1e} at most against float64, torch's own included; {unlike} answers unlike torch's after training"


def pruned_vgg(results: Results) -> str:
    levels, dense = results["levels"], results["serial_dense_flops"]
    best = min(levels, key=lambda row: row["critical_flops"])
    share = results.get("sizes", results.get("options", {}))["share"]
    told = (
        f"1/{share} of the channels, {results.get('data', 'generated images')}: {best['critical_flops'] / 1e6:.2f} M FLOPs along {best['critical_steps']} "
        f"steps (levels={best['levels']}) against {dense / 1e6:.1f} M along {len(results['dense_steps'])} of dense back-propagation; gradients differ "
        f"by {results['largest_difference']:.0e}"
    )
    if "autograd_ms" in results:
        fastest = min(levels, key=lambda row: row["ms"])
        told += f". By the clock in one process {fastest['ms']:.0f} ms at best, autograd {results['autograd_ms']:.0f} ms"
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


# DEER


def grid_best(*ways: str, base: str = "torch") -> Callable[[Results], str]:
    def told(results: Results) -> str:
        from experiments.deer.grid import by_place

        places, parts = by_place(results["rows"]), []
        for way in ways:
            found = [(here[base]["both_ms"] / here[way]["both_ms"], place) for place, here in places.items() if base in here and way in here]
            if found:
                best, (n, steps, batch) = max(found)
                parts.append(f"{way} {best:.3g}× at best (n = {n}, T = {steps:,}, B = {batch}), {min(found)[0]:.2g}× at worst")
        note = results.get("note") or device(results)
        return f"{note.rstrip('.')}: " + ("; ".join(parts) or "not measured yet")

    return told


def worms(results: Results) -> str:
    runs = results["runs"]
    timed = [run for run in runs.values() if run.get("speedup")]
    told = [f"{run['speedup']:.0f}× a training step at {run['length']:,} steps" for run in timed]
    return f"{results['data']}, {device(results)}: " + ", ".join(told)


def worms_accuracy(results: Results) -> str:
    if "accuracy" in results:
        return f"{results['data']}: " + ", ".join(f"{name} {mean:.1%} ± {spread:.1%}" for name, (mean, spread, _) in results["accuracy"].items())
    return f"{results['data']}: " + ", ".join(f"{name} {run['test_quality']:.0%}" for name, run in results["runs"].items())


def two_bodies(results: Results) -> str:
    found = results["found"]
    ratios = [one["loop_seconds"] / one["our_seconds"] for one in found["compared"]]
    check = found["validation"]
    return (
        f"{device(results)}, {results['sizes']['orbits'] if isinstance(results['sizes']['orbits'], int) else results['sizes']['orbits'][0]} orbits: "
        f"{min(ratios):.0f}–{max(ratios):.0f}× over a loop of Runge–Kutta steps, gradients apart by {max(o['gradient_difference'] for o in found['compared']):.0e}; "
        f"error on new orbits {check['error']:.2g} (standing still: {check['standing_still']:.2g})"
    )


def pixel_images(results: Results) -> str:
    ways = {name: one for name, one in results["ways"].items() if "error" not in one}
    base = ways["torch"]["seconds_a_step"]
    told = [f"{name} {one['accuracy_by_epoch'][-1]:.0%}, {base / one['seconds_a_step']:.2g}× torch's step" for name, one in ways.items()]
    return f"{results['data']}, {device(results)}: " + "; ".join(told)


def warm_starts(results: Results) -> str:
    rows: dict[str, dict[bool, Any]] = {}
    for row in good(results["rows"]):
        rows.setdefault(row["solver"], {})[row["warm"]] = row
    told = [f"{name} {pair[False]['sweeps'][-1]:.1f} → {pair[True]['sweeps'][-1]:.1f}" for name, pair in rows.items() if len(pair) == 2]
    return "sweeps of the last epoch without and with the last epoch's states: " + ", ".join(told)


def sweeps(results: Results) -> str:
    rows = [row for row in results["rows"] if row["network"] in ("as initialised", "trained to remember")]
    told = [f"{row['layer']} {row['network']}: DEER {row['solvers']['DEER']['sweeps']}, quasi-DEER {row['solvers']['quasi-DEER']['sweeps']}" for row in rows]
    return "sweeps to 1e-6: " + "; ".join(told)


GENERATED = "Generated data stand in where the real files are not given (`--data`)."
CLAIMS = (
    Claim(MGRIT, "One sequence over many processes trains faster than serially", "up to 6.5× over the serial GRU, HMDB51, 128 frames",
          ("mgrit/ranks",), ranks_speedup,
          "Processes of one machine, one thread each, gloo; random inputs; the paper has several nodes of 4 ranks × 9 threads. Where cores are "
          "fewer than processes, they take turns, and this is no measurement of speed.", "mgrit.ranks"),
    Claim(MGRIT, "The gain grows with the length", "stated, without a number for other lengths", ("mgrit/scaling_cuda", "mgrit/scaling_cpu"),
          length_speedup, "One device, chunks side by side in place of ranks; a GRU, exact to tolerance, not the published inexact cycles.", "mgrit.scaling"),
    Claim(MGRIT, "Accuracy on HMDB51 is that of serial training", "classic ≈ implicit ≈ parallel", ("mgrit_hmdb51/HMDB51_hmdb6", "mgrit_hmdb51/generated"),
          ways_accuracy, f"{GENERATED} The net on them has random weights.", "mgrit_hmdb51.run"),
    Claim(MGRIT, "The published example, UCI-HAR", "a log of the published code has 87 % with its own inexact inference, 84 % serially",
          ("mgrit_har/har", "mgrit_har/generated"), ways_accuracy, f"{GENERATED} Epochs are ours.", "mgrit_har.run"),
    Claim(MGRIT, "A fixed number of cycles is enough", "2 cycles forward, 1 backward", ("mgrit/accuracy",), accuracy_cost,
          "Small real series sets (five seeds, serial inference with the trained weights): the published setting is not harmless on all of them.", "mgrit.accuracy"),
    Claim(MGRIT, "… and its gradients", "not reported", ("mgrit/gradient_error",), gradient_errors, "Ours: random inputs, T = 128, float64.", "mgrit.gradient_error"),
    Claim(BPPSA, "The backward pass is faster as a scan", "up to 108× (arXiv), 8.8× (proceedings), on GPUs",
          ("bppsa_bitstream/grid_rnn_cuda", "bppsa_bitstream/grid_rnn_cpu"), best_of("backward"),
          "Against torch's layer: cuDNN on a GPU. On a CPU the default scan multiplies no matrices: it is the compiled sweep in order.", "bppsa_bitstream.grid"),
    Claim(BPPSA, "A training step is faster", "up to 2.75×", ("bppsa_bitstream/grid_rnn_cuda", "bppsa_bitstream/grid_rnn_cpu"), best_of("both"),
          "Our forward pass is parallel in time too; the paper's is serial.", "bppsa_bitstream.grid"),
    Claim(BPPSA, "Bit streams by length, B = 16", "speedup grows to T = 30,000", ("bppsa_bitstream/bitstream_cuda", "bppsa_bitstream/bitstream"), bitstream_backward,
          "Backward pass alone. Products of matrices do not pay on a CPU.", "bppsa_bitstream.run"),
    Claim(BPPSA, "… and their training", "same loss curve, 80 epochs of 32,000 streams at 1e-5", ("bppsa_bitstream/bitstream_paper", "bppsa_bitstream/bitstream"), bitstream_training,
          "1,000 steps of new streams at 3e-3; `--protocol paper` has the paper's.", "bppsa_bitstream.run"),
    Claim(BPPSA, "A GRU on IRMAS, three lengths", "within the numbers above", ("bppsa_irmas/irmas_cuda", "bppsa_irmas/irmas", "bppsa_irmas/generated"), instruments,
          f"{GENERATED} Inputs are 20 MFCC of one channel; `--features paper` has the paper's 38, 24 and 12.", "bppsa_irmas.run"),
    Claim(BPPSA, "The scan is exact", "same convergence", ("bppsa_irmas/irmas", "bppsa_irmas/generated"), exactness, "Gradients are compared too, not curves alone.", "bppsa_irmas.run"),
    Claim(BPPSA, "Retraining a pruned VGG-11 is a practical use", "fewer FLOPs along the critical path than back-propagation",
          ("bppsa_vgg/cifar10", "bppsa_vgg/generated"), pruned_vgg,
          f"{GENERATED} FLOPs are what a machine with a processor for each product could gain; in one process the scan is far slower than autograd.", "bppsa_vgg.run"),
    Claim(BPPSA, "Jacobians are mostly zeros that are known beforehand", "a table of zeros, and of generation times against autograd",
          ("bppsa_vgg/cifar10", "bppsa_vgg/generated"), zeros, "One image at a time; autograd's columns are timed for some and counted for all.", "bppsa_vgg.run"),
    Claim(DEER, "Evaluation on a GPU is faster by up to 3 orders of magnitude", "against its sequential loop (JAX's scan)", ("deer/grid_cuda",),
          grid_best("DEER", "shooting", "default", base="loop"), "Forward + backward against a loop of `GRUCell`; beyond 2,000 steps the loop is scaled.", "deer.grid"),
    Claim(DEER, "… and against torch's own layer", "not reported", ("deer/grid_cuda", "deer/grid_cpu"), grid_best("DEER", "quasi-DEER", "ELK", "shooting", "default"),
          "cuDNN is a far better loop than JAX's scan.", "deer.grid"),
    Claim(DEER, "Newton's iteration converges in few sweeps", "quadratic", ("deer/iterations",), sweeps, "One seed a network.", "deer.iterations"),
    Claim(DEER, "Training is more than 10 times as fast: EigenWorms", "25× a step over JAX's scan", ("deer_eigenworms/eigenworms", "deer_eigenworms/generated_cuda", "deer_eigenworms/generated"), worms,
          f"{GENERATED} By the default solver (chunks side by side), against `torch.nn.GRU`.", "deer_eigenworms.run"),
    Claim(DEER, "A GRU on EigenWorms", "88.0 ± 4.4 % (3 seeds)", ("deer_eigenworms/eigenworms", "deer_eigenworms/generated"), worms_accuracy,
          "Generated worms say nothing about the real set; `--data EigenWorms --protocol paper --twin` has seeds, split and a twin by torch.", "deer_eigenworms.run"),
    Claim(DEER, "A Hamiltonian network on two bodies", "more than 10 times as fast, same validation loss",
          ("deer_two_body/two_body_paper_cuda", "deer_two_body/two_body"), two_bodies,
          "The loop takes the same Runge–Kutta steps, so that gradients can be compared to rounding; `--size paper` has 800/100/100 orbits and the whole energy learned.", "deer_two_body.run"),
    Claim(DEER, "A multi-head strided GRU on sequential CIFAR-10", "90.25 %", ("deer_cifar/cifar10_large_cuda", "deer_cifar/generated_large_cuda", "deer_cifar/generated"), pixel_images,
          f"{GENERATED} A smaller network and fewer epochs.", "deer_cifar.run"),
    Claim(DEER, "The last epoch's states are a good guess", "used, not measured", ("deer/warm",), warm_starts, "A small task that is learned on the way.", "deer.warm"),
)  # fmt: skip
