"""The results of `run.py` as a page and as a picture."""

from __future__ import annotations

from pathlib import Path

from experiments.harness import Results, figure, made_on, markdown, whole_numbers


def table(results: Results) -> str:
    """The result in words."""
    sizes, found = results["sizes"], results["found"]
    counts = sizes["orbits"] if isinstance(sizes["orbits"], list) else [sizes["orbits"]] * 3
    lines = [
        f"{counts[0]} generated orbits of {sizes['steps']:,} steps to train on, float64, kinetic energy "
        f"{sizes.get('kinetic', 'given')}, {len(found['losses'])} training steps"
        f"{_batch(sizes)}{schedule(sizes)}; "
        f"{made_on(results['machine'])}.",
        "",
    ]
    cells = []
    for one in found["compared"]:
        steps = one.get("steps", sizes["steps"])
        cells.append(
            [
                one.get("step", one.get("epoch")),
                f"{steps:,}",
                f"{one['our_seconds']:.2f} s",
                f"{one['loop_seconds']:.1f} s",
                f"{one['loop_seconds'] / one['our_seconds']:.1f}×",
                f"{one['loss_difference']:.0e}",
                f"{one['gradient_difference']:.0e}",
            ]
        )
    head = [
        "training step",
        "time steps of both",
        "odeint",
        "loop of Runge–Kutta steps",
        "ratio",
        "difference of losses",
        "of gradients",
    ]
    lines += markdown(head, cells)
    check = found["validation"]
    lines += [
        "",
        f"Loss {found['losses'][0]:.2e} at first, {found['losses'][-1]:.2e} at last; on orbits never seen "
        f"{check['error']:.2e} (standing "
        f"still: {check['standing_still']:.2e}). A training step takes {min(found['seconds']):.2f} s at least; all "
        "took "
        f"{sum(found['seconds']):.0f} s.",
    ]
    if found.get("cold_newton_steps") and found["newton_steps"]:
        cold, warm = (sum(values) / len(values) for values in (found["cold_newton_steps"], found["newton_steps"]))
        lines += [
            "",
            f"Newton steps of a solve: {cold:.1f} from no guess, {warm:.1f} from the orbits of the last epoch (means).",
        ]
    return "\n".join(lines) + "\n"


def _batch(sizes: Results) -> str:
    return f" of {sizes['batch']} orbits" if "batch" in sizes else ""


def schedule(sizes: Results) -> str:
    """The learning rate, and how the part of the orbits that is trained on grows."""
    grows = f" on the orbits' first {sizes['grow']} steps, as many more in every epoch" if sizes.get("grow") else ""
    if sizes.get("pieces"):
        grows = " that falls to zero, on growing pieces of the orbits that begin anywhere"
    return (f" at a rate of {sizes['rate']:g}" if "rate" in sizes else "") + grows


def draw(results: Results, path: Path) -> None:
    """Loss, the time of a step, the error over time, and an orbit."""
    found = results["found"]
    whole = "by_time" in found["validation"]
    drawn, axes = figure(17 if whole else 9, 3.9, 1, 4 if whole else 2)
    axes[0][0].plot(found["losses"])
    title = f"generated orbits of {results['sizes']['steps']:,} steps"
    axes[0][0].set(xlabel="training step", ylabel="mean squared error", yscale="log", title=title)
    axes[0][1].plot(found["seconds"], label="odeint, all steps at once")
    for one in found["compared"]:
        times = results["sizes"]["steps"] / one.get("steps", results["sizes"]["steps"])
        label = "loop of steps" + (f", {one['steps']} of them scaled" if times > 1 else "")
        axes[0][1].plot(
            one.get("step", one.get("epoch")), times * one["loop_seconds"], "o", color="tab:orange", label=label
        )
    axes[0][1].set(
        xlabel="training step", ylabel="seconds, forward + backward", yscale="log", title="time of a training step"
    )
    axes[0][1].legend(*_once(axes[0][1]), fontsize=8)
    if whole:
        check = found["validation"]
        axes[0][2].semilogy(check["times"][1:], check["by_time"][1:])
        axes[0][2].axhline(check["standing_still"], color="grey", linewidth=0.8, label="bodies that stand still (mean)")
        axes[0][2].set(xlabel="time", ylabel="mean squared error", title="orbits never seen")
        axes[0][2].legend(fontsize=8)
        for name, style in (("true", "-"), ("learned", "--")):
            orbit = check["orbit"][name]
            for body, colour in ((0, "tab:blue"), (2, "tab:red")):
                axes[0][3].plot(
                    orbit[body], orbit[body + 1], style, color=colour, label=f"body {body // 2 + 1}, {name}"
                )
                if name == "learned":  # an orbit that stands still is no line
                    axes[0][3].plot(orbit[body][-1], orbit[body + 1][-1], "x", color=colour, label="… its end")
        axes[0][3].set(title="one of them", xlabel="x", ylabel="y", aspect="equal")
        axes[0][3].legend(fontsize=7, loc="center")
    for axis in axes[0][:2]:
        whole_numbers(axis)
    drawn.suptitle(made_on(results["machine"]), fontsize=9)
    drawn.savefig(path, dpi=100)


def _once(axis: object) -> tuple[list[object], list[str]]:
    handles, labels = axis.get_legend_handles_labels()
    kept = dict(zip(labels, handles, strict=True))
    return list(kept.values()), list(kept)
