"""What is not stored yet: list it, make it where the machine allows, and keep what other machines have made."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.catalogue import EXPERIMENTS
from experiments.harness import BUILD, Clock, save
from experiments.readings import FOLDER, read_result
from experiments.wanted import WANTED, Wanted


def absent(device: str | None = None, out: Path | None = None) -> list[tuple[Wanted, str]]:
    """Results that are not stored, nor in `out`, and what each of them lacks, in words."""
    chosen = [one for one in WANTED if device in (None, one.device)]
    return [(one, why) for one in chosen if (why := one.missing(out))]


def listing(device: str | None = None, out: Path | None = None) -> str:
    """A line for each: why, what this machine lacks for it, its minutes, and its command."""
    found = absent(device, out)
    if not found:
        return "Nothing is missing."
    lines, by_files = list[str](), sum(bool(one.data) for one, _ in found)
    for one, why in found:
        given = ["--data", one.data] if one.data else []
        needs = f"; needs {one.needs()}" if one.needs() else ""
        lines.append(f"{one.result}: {why}{needs}; at most {one.minutes:g} minutes")
        lines.append(f"    python -m experiments run {one.experiment} {shlex.join([*one.command, *given])} --store")
    minutes = sum(one.minutes for one, _ in found if not one.data)
    rest = f"; {by_files} more need files that are not generated" if by_files else ""
    lines += ["", f"{len(found) - by_files} results, {minutes:g} minutes at most{rest}."]
    return "\n".join([*lines, "python -m experiments missing --run [--device cuda] makes what this machine can."])


def make(
    found: Sequence[tuple[Wanted, str]],
    run: Callable[[Wanted, list[str]], bool],
    minutes: float | None = None,
    out: Path | None = None,
    fast: bool = False,
) -> int:
    """Each that this machine can make and that fits into the time left, in a folder of its own; how many failed.

    One that goes on with rows that are stored finds them there.
    """
    clock, failed, out = Clock(minutes), 0, out or BUILD
    for one, why in found:
        if one.needs() or clock.left < 60 * one.minutes:
            told = f"needs {one.needs()}" if one.needs() else f"its {one.minutes:g} minutes are not left"
            print(f"== {one.result}: {told}, left out", flush=True)
            continue
        folder = out / one.experiment
        fresh = folder / one.stored_at.name
        if "--resume" in one.arguments and one.stored_at.exists() and not fresh.exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(one.stored_at, fresh)
        print(f"== {one.result}: {why}", flush=True)
        made = run(one, [*one.command, *(["--fast"] if fast else []), "--out", str(folder)])
        failed += not made
        print(f"== {one.result}: {'done' if made else 'FAILED'} after {clock.seconds:.0f} s in all", flush=True)
    print(f"to keep what was made: python -m experiments store {out}", flush=True)
    return failed


def keep(folder: Path, draw: Callable[[Path], None]) -> int:
    """Results of `folder/NAME/` in the places of the stored ones, drawn anew; how many there were.

    A run that was cut short has rows, but does not name its script: a stored result of its kind does.
    """
    names = {one.name for one in EXPERIMENTS}
    files = sorted(path for path in folder.glob("*/*.json") if path.parent.name in names)
    if not files:
        raise ValueError(f"{folder} holds no results: a folder for each experiment is expected, as --out makes them")
    for file in files:
        target = FOLDER / file.parent.name.partition(".")[0] / "results" / file.name
        results, stored = read_result(file), read_result(target)
        if "made_by" not in (results or {}) and stored is None:
            print(f"left out: {file}, which was cut short and does not say which script draws it")
            continue
        print(f"{'new' if stored is None else 'replaced'}: {target}")
        save(target.stem, {"made_by": (stored or {}).get("made_by")} | (results or {}), target.parent)
        draw(target)
    return len(files)
