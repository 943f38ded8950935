"""What a result was made on, and where it goes."""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def facts(device: str = "cpu") -> dict[str, Any]:
    """The machine and the versions that a result belongs to."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def save(name: str, results: dict[str, Any], folder: Path) -> None:
    """`name` with .json; lists of numbers in one line."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[\s\d.,e+-]+\]", lambda found: " ".join(found[0].split()), text)
    (folder / f"{name}.json").write_text(text + "\n")


def write(
    name: str,
    results: dict[str, Any],
    folder: Path,
    table: Callable[[dict[str, Any]], str],
    plot: Callable[[dict[str, Any], Path], None],
) -> None:
    """`name` with .json, .md and .png."""
    save(name, results, folder)
    (folder / f"{name}.md").write_text(table(results))
    plot(results, folder / f"{name}.png")


def command(doc: str | None) -> argparse.ArgumentParser:
    """The options that all experiments on papers have."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="all parts in small; writes only where --out says")
    parser.add_argument("--out", type=Path, help="where results go (default: results/ beside the script)")
    return parser


def target(options: argparse.Namespace, script: str) -> Path | None:
    """Where results go; None if nowhere."""
    return options.out or (None if options.fast else Path(script).with_name("results"))
