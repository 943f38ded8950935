"""`timeloom bench`: the benchmarks, which live beside the package in a source checkout; by default the headline."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import timeloom
from timeloom.errors import InputError


def main(arguments: Sequence[str]) -> int:
    root = Path(timeloom.__file__).parents[2]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise InputError(
            "the benchmarks are not part of the installed package: get the source of timeloom, and run `make bench` "
            "there; `timeloom doctor` measures one speedup anywhere"
        )
    sys.path.insert(0, str(root))
    status: int = importlib.import_module("benchmarks.__main__").main(with_defaults(arguments))
    return status


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """The headline cases where none are named, and results that do not replace those of the checkout."""
    given = list(arguments)
    values = {at + 1 for at, word in enumerate(given) if word in ("--threads", "--out")}
    named = any(not word.startswith("-") for at, word in enumerate(given) if at not in values)
    named = named or bool({"-h", "--help"} & set(given))
    elsewhere = [] if any(word.startswith("--out") for word in given) else ["--out", "runs/bench"]
    return [*([] if named else ["headline"]), *given, *elsewhere]
