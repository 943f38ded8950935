"""Sets of the UEA and UCR archives by name, through `aeon`, which downloads them."""

from __future__ import annotations

from typing import Any

import torch

from timeloom.app.data.records import Record, Split, Table
from timeloom.app.errors import InputError
from timeloom.options import did_you_mean


def from_archive(name: str) -> Table:
    """The official train and test series of a classification set."""
    try:
        from aeon.datasets import load_classification
    except ModuleNotFoundError as error:
        missing = "" if error.name == "aeon" else f" (aeon is there, {error.name} is not)"
        raise InputError(
            f"{name!r} is neither a file nor a folder nor a built-in task. To fetch it from the UEA/UCR archive: "
            f"pip install 'timeloom[archive]'{missing}; or give the path of its .ts file"
            f"{did_you_mean(name, ['turning'])}"
        ) from None
    records = []
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        try:
            series, labels = load_classification(name, split=split)
        except Exception as error:  # aeon lets through whatever the network and the archive raise
            raise InputError(
                f"aeon could not load {name!r} ({type(error).__name__}: {str(error)[:120]}). Check the name and the "
                f"network, or download the set elsewhere and give the path of its .ts file"
            ) from error
        records += [
            _record(values, label, f"{split} {i}", split)
            for i, (values, label) in enumerate(zip(series, labels, strict=True))
        ]
    return Table(name, "classification", records)


def _record(values: Any, label: Any, name: str, split: Split) -> Record:
    """aeon has channels first."""
    return Record(name, torch.as_tensor(values, dtype=torch.float32).T.contiguous(), str(label), split)
