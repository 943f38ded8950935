"""Where results go, and what they were made on."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"


def facts(device: str = "cpu") -> dict[str, Any]:
    """The machine and the versions that a result belongs to."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def save(name: str, results: dict[str, Any], folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
