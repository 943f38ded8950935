"""The results of `run.py` as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.harness import made_on

COLOURS = ("tab:red", "tab:blue", "tab:green", "tab:orange", "tab:purple")


def row(steps: int, methods: dict[str, Any]) -> str:
    """What is seen while it runs."""
    told = [f"{name} {one['backward_ms']['fastest']:.3g} ms, {one['accuracy']:.0%}" for name, one in methods.items()]
    return f"T = {steps}: {'; '.join(told)}"


def table(results: dict[str, Any]) -> str:
    """A line for each length and method; speed-ups are over torch's layer."""
    clips = results["clips"]
    lines = [
        f"{results['data']} clips, {len(results['instruments'])} instruments, {clips['train']} clips to train and "
        f"{clips['test']} to test on; {results['hidden']} units, batch {results['batch']}, "
        f"{results['training_steps']} training steps; {made_on(results['machine'])}, float32. "
        f"Times are the fastest of {results['turns']}, on trained weights.",
        "",
        f"Inputs: {results['features_in_words']}." if "features_in_words" in results else "Inputs: see the README.",
        "",
        "| T | method | backward | | whole step | | gradient error, initialised | trained | accuracy | unlike torch |",
        "| --: | --- " + "| --: " * 8 + "|",
    ]
    for steps, length in results["lengths"].items():
        base = length["methods"]["torch"]
        for name, one in length["methods"].items():
            cells = [steps, name]
            for kind in ("backward_ms", "step_ms"):
                ms = one[kind]["fastest"]
                cells += [f"{ms:.3g} ms", f"{base[kind]['fastest'] / ms:.2g}×"]
            cells += [f"{one['gradient_error'][when]:.1e}" for when in ("as_initialised", "as_trained")]
            cells += [f"{one['accuracy']:.1%}", f"{one['answers_unlike_torch']} of {clips['test']}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Times by length above, losses below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lengths = results["lengths"]
    names = list(next(iter(lengths.values()))["methods"])
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    shown = (
        ("backward_ms", "fastest", "backward pass"),
        ("step_ms", "fastest", "whole training step"),
        ("gradient_error", "as_trained", "error of gradients, trained weights"),
    )
    for ax, (kind, which, title) in zip(axes[0], shown, strict=True):
        for i, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
            values = [length["methods"][name][kind][which] for length in lengths.values()]
            ax.bar([place + 0.16 * (i - 2) for place in range(len(lengths))], values, 0.16, color=colour, label=name)
        ax.set(
            yscale="log",
            xlabel="steps T",
            ylabel="ms" if kind.endswith("_ms") else "relative to the largest",
            title=title,
        )
        ax.set_xticks(range(len(lengths)), list(lengths))
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        *handles,
        loc="outside upper center",
        ncols=len(names),
        title=f"{results['data']} clips; {made_on(results['machine'])}",
    )
    for ax, (steps, length) in zip(axes[1], lengths.items(), strict=False):
        for i, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
            # Curves lie upon one another: each is drawn thinner than the one below it.
            ax.plot(length["methods"][name]["losses"], color=colour, linewidth=6 - 1.2 * i)
        ax.set(xlabel="training step", ylabel="loss", title=f"T = {steps}")
    figure.savefig(path, dpi=90)
    plt.close(figure)
