"""The experiments on the papers: list them, run one or all, and write the page that sets them beside the papers.

python -m experiments                                           # a list
python -m experiments run all --fast                            # every experiment in small
python -m experiments run deer.grid --device cuda --minutes 4   # one; further options are the experiment's own
python -m experiments page                                      # docs/papers.md from the stored results
python -m experiments page --check                              # fails where the page is older than they are
python -m experiments draw build/experiments/deer.grid/grid_cuda.json   # table and picture of a result once more
python -m experiments draw                                      # those of all stored results
python -m experiments missing                                   # what is not stored yet, with its minutes and command
python -m experiments missing --run --minutes 9 --out FOLDER    # make what this machine can, most minutes in all
python -m experiments store FOLDER                              # keep what lies there, in place of what is stored
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from experiments import missing, page
from experiments.catalogue import EXPERIMENTS, Experiment, find
from experiments.harness import BUILD, minutes
from experiments.readings import all_stored
from experiments.wanted import Wanted


def listing() -> str:
    """Names, papers and what they show."""
    wide = max(len(one.name) for one in EXPERIMENTS)
    lines = [
        f"{one.name:<{wide}}  {one.paper:<9}  {one.shows}" + (f" (--data {one.real_data})" if one.real_data else "")
        for one in EXPERIMENTS
    ]
    return "\n".join(
        [
            *lines,
            "",
            "python -m experiments run NAME … | all   [--fast] [--device cuda] [--minutes M] [--out FOLDER | --store]",
            "python -m experiments missing            what is not stored yet, and how to make it",
        ]
    )


def run(names: Sequence[str], more: Sequence[str]) -> int:
    """Run them one after the other, each in a folder of its own; how many failed."""
    chosen = list(EXPERIMENTS) if list(names) == ["all"] else [find(name) for name in names]
    more, out = _out(list(more))
    failed = []
    for experiment in chosen:
        arguments = list(more) if "--store" in more else [*more, "--out", str((out or BUILD) / experiment.name)]
        if "cuda" in arguments and not experiment.gpu:
            print(f"== {experiment.name}: has no GPU part, left out", flush=True)
            continue
        began = time.monotonic()
        print(f"== {experiment.name}", flush=True)
        if not _succeeds(experiment, arguments):
            failed.append(experiment.name)
        print(
            f"== {experiment.name}: {'FAILED' if experiment.name in failed else 'done'} in "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    if failed:
        print(f"{len(failed)} of {len(chosen)} failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


def _succeeds(experiment: Experiment, arguments: Sequence[str]) -> bool:
    try:
        experiment.module().main(arguments)
    except SystemExit as ended:
        return ended.code in (0, None)
    except Exception:
        traceback.print_exc()
        return False
    return True


def _makes(wanted: Wanted, arguments: Sequence[str]) -> bool:
    return _succeeds(find(wanted.experiment), arguments)


def _out(more: list[str]) -> tuple[list[str], Path | None]:
    """--out is the folder of all folders here."""
    if "--out" not in more:
        return more, None
    at = more.index("--out")
    if at + 1 == len(more):
        raise ValueError("--out needs a folder behind it")
    return more[:at] + more[at + 2 :], Path(more[at + 1])


def draw(path: Path, table_at: Path | None = None) -> None:
    """The table and the picture of a result, by the script that it names: beside it, or as the table is told to be."""
    try:
        results = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give the JSON file of a result") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON file ({error}); give that of a result") from error
    if "made_by" not in results:
        raise ValueError(
            f"{path} does not say which script made it: it is older than this command, or no result of an experiment"
        )
    table, picture = (getattr(importlib.import_module(module), name) for module, name in results["made_by"])
    written = table_at or path.with_suffix(".md")
    written.write_text(table(results))
    picture(results, written.with_suffix(".png"))
    print(f"written: {written}, {written.with_suffix('.png')}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", metavar="list | run | page | draw | missing | store")
    verbs.add_parser("list", help="names and what they show")
    running = verbs.add_parser("run", help="run experiments; options go on to them")
    running.add_argument("names", nargs="+", metavar="NAME", help="or all")
    writing = verbs.add_parser("page", help="write docs/papers.md from the stored results")
    writing.add_argument("--check", action="store_true", help="write nothing; fail where the page is out of date")
    drawing = verbs.add_parser("draw", help="tables and pictures of results once more")
    drawing.add_argument("files", type=Path, nargs="*", help="(default: all stored results)")
    lacking = verbs.add_parser("missing", help="what is not stored yet; --run makes it")
    lacking.add_argument("--device", choices=("cpu", "cuda"), help="only what is made there (default: all)")
    lacking.add_argument("--run", action="store_true", help="make what this machine can, one after the other")
    lacking.add_argument("--minutes", type=minutes, help="with --run: begin only what fits into so many in all")
    lacking.add_argument("--out", type=Path, help="folder of folders for results; what it holds is not missing")
    lacking.add_argument("--fast", action="store_true", help="with --run: all parts in small, in seconds")
    keeping = verbs.add_parser("store", help="put the results of a folder in the places of the stored ones")
    keeping.add_argument("folder", type=Path, help="as --out has made it: a folder for each experiment")
    given, more = parser.parse_known_args(arguments)
    try:
        if given.verb == "run":
            return min(run(given.names, more), 1)
        if more:
            parser.error(f"unknown options: {' '.join(more)}")
        if given.verb == "page":
            return page.main(given.check)
        if given.verb == "missing":
            if not given.run:
                print(missing.listing(given.device, given.out))
                return 0
            found = missing.absent(given.device, given.out)
            return min(missing.make(found, _makes, given.minutes, given.out, given.fast), 1)
        if given.verb == "store":
            missing.keep(given.folder, draw)
        elif given.verb == "draw":
            for file in given.files or all_stored():
                draw(file)
        else:
            print(listing())
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
