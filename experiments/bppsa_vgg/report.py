"""The results of `run.py` as a page and as a picture."""

from __future__ import annotations

from pathlib import Path

from experiments.harness import Results, figure, made_on, markdown, whole_numbers

COLOURS = {"up": "tab:blue", "middle": "tab:gray", "down": "tab:green"}


def table(results: Results) -> str:
    """What was retrained, the scan by levels, and the Jacobians."""
    sizes, accuracy = results["sizes"], results["accuracy"]
    trained = results.get("trained_steps", f"at most {sizes['train']}")  # a time limit ends the training sooner
    width = "full width" if sizes["share"] == 1 else f"1/{sizes['share']} of its channels"
    lines = [
        f"VGG-11 ({width}{', BatchNorm' if results['norm'] else ''}), {results['amount']:.0%} of its weights pruned, "
        "on "
        f"{results['data']}; retrained {len(results['losses']['scan'])} steps of {sizes['batch']} images. "
        f"{made_on(results['machine'])}.",
        "",
        f"Accuracy {accuracy['trained']:.1%} as trained ({trained} steps), {accuracy['pruned']:.1%} as pruned, "
        f"{accuracy['retrained']:.1%} retrained by the scan. Gradients of scan and autograd differ by "
        f"{results['largest_difference']:.1e} at most (relative to the largest entry of each parameter).",
        "",
        f"One gradient of a batch of {sizes['batch']} by the clock, in one process; autograd takes "
        f"{results['autograd_ms']:.1f} ms. FLOPs "
        f"of one image; back-propagation over the dense layers has {results['serial_dense_flops'] / 1e6:.2f} M.",
        "",
    ]
    cells = [
        [
            f"scan, levels={row['levels']}",
            row["critical_steps"],
            f"{row['critical_flops'] / 1e6:.2f} M",
            f"{row['total_flops'] / 1e6:.2f} M",
            f"{row['ms']:.0f} ms",
            f"{results['autograd_ms'] / row['ms']:.3f}×",
        ]
        for row in results["levels"]
    ]
    lines += markdown(["", "steps of the critical path", "FLOPs along it", "in all", "time", "over autograd"], cells)
    lines += ["", "Jacobians of one image: entries certain to be zero, and the time to write one down.", ""]
    cells = [
        [
            row["layer"],
            f"{row['shape'][0]} × {row['shape'][1]}",
            f"{row['zeros']:.4%}",
            f"{row['ms']:.2f} ms",
            f"{row['autograd_ms']:.0f} ms",
            f"{row['autograd_ms'] / row['ms']:.0f}×",
        ]
        for row in results["jacobians"]
    ]
    head = ["layer", "transposed Jacobian", "zeros", "written down", "by autograd, column by column", "ratio"]
    return "\n".join([*lines, *markdown(head, cells)]) + "\n"


def draw(results: Results, path: Path) -> None:
    """The critical path, time by levels, and the losses of both."""
    drawn, axes = figure(16, 4.2, 1, 3)
    left, middle, right = axes[0]
    levels = results["levels"]
    for i, step in enumerate(results["scan_steps"]):
        left.bar(i, step["flops"], color=COLOURS[step["phase"]], zorder=2)
    named = {"up": "up-sweep: largest product of a level", "middle": "in order, between the sweeps",
             "down": "down-sweep: largest product of a level"}  # fmt: skip
    for phase in dict.fromkeys(step["phase"] for step in results["scan_steps"]):
        left.bar(0, 0, color=COLOURS[phase], label=f"scan, {named[phase]}")
    for name, style in (("dense_steps", "tab:red"), ("sparse_steps", "tab:orange")):
        label = f"back-propagation, {name.removesuffix('_steps')} layers"
        left.step(range(len(results[name])), results[name], color=style, where="mid", label=label)
    left.set(yscale="log", xlabel="step of the critical path", ylabel="FLOPs for one image")
    left.set(title=f"critical path, scan of levels={levels[-1]['levels']}")
    left.set_ylim(bottom=1, top=left.get_ylim()[1] * 3e3)  # room for the names of the lines
    left.legend(fontsize=8, loc="upper left")
    middle.semilogy([row["levels"] for row in levels], [row["ms"] for row in levels], "o-", label="scan, one process")
    middle.axhline(results["autograd_ms"], color="tab:red", label="autograd")
    middle.set(
        xlabel="levels that multiply matrices",
        ylabel="ms of a gradient",
        title=f"batch {results['sizes']['batch']}, {made_on(results['machine'])}",
    )
    middle.title.set_fontsize(8)
    middle.legend(fontsize=8)
    right.plot(results["losses"]["autograd"], color="tab:red", label="autograd")
    right.plot(results["losses"]["scan"], "--", color="tab:blue", label="scan")
    title = f"{results['data']}: gradients differ by {results['largest_difference']:.0e} at most"
    right.set(xlabel="retraining step", ylabel="loss", title=title)
    right.title.set_fontsize(8)
    right.legend()
    for axis in axes[0]:
        whole_numbers(axis)
    drawn.savefig(path, dpi=110)
