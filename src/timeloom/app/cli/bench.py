"""`timeloom bench`: the benchmarks, which live beside the package in a source checkout; by default the headline."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import timeloom
from timeloom.app.errors import InputError

DEVICES = ("cpu", "cuda")
VALUES = ("--threads", "--out", "--minutes")
"""Options that a value follows."""
PROGRAM = "timeloom bench"
ON_GPU = f"{PROGRAM} --device cuda"


def main(arguments: Sequence[str]) -> int:
    root = Path(timeloom.__file__).parents[2]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise InputError(
            "the benchmarks are not part of the installed package: get the source of timeloom, and run `make bench` "
            "there; `timeloom doctor` measures one speedup anywhere"
        )
    sys.path.insert(0, str(root))
    device, words = device_of(arguments)
    if device == "cpu" and not names_cases(words) and torch.cuda.is_available():
        print(f"this measures the CPU; there is a GPU, too: {ON_GPU} (--help lists its pieces)", file=sys.stderr)
    module, names = ("benchmarks", (PROGRAM, ON_GPU)) if device == "cpu" else ("benchmarks.gpu", (ON_GPU,))
    status: int = importlib.import_module(f"{module}.__main__").main(with_defaults(words), *names)
    return status


def device_of(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """What `--device` asks for, the CPU by default, and the other words."""
    device, words, rest = "cpu", iter(arguments), []
    for word in words:
        name, _, value = word.partition("=")
        if name != "--device":
            rest.append(word)
            continue
        device = value or next(words, "")
        if device not in DEVICES:
            raise InputError(f"--device must be {' or '.join(DEVICES)}; got {device!r}")
    return device, rest


def names_cases(words: Sequence[str]) -> bool:
    """Whether lists or pieces are named, or help is asked for."""
    values = {at + 1 for at, word in enumerate(words) if word in VALUES}
    named = any(not word.startswith("-") for at, word in enumerate(words) if at not in values)
    return named or bool({"-h", "--help"} & set(words))


def with_defaults(words: Sequence[str]) -> list[str]:
    """The headline cases where none are named, and results that do not replace those of the checkout."""
    elsewhere = [] if any(word.startswith("--out") for word in words) else ["--out", "runs/bench"]
    return [*([] if names_cases(words) else ["headline"]), *words, *elsewhere]
