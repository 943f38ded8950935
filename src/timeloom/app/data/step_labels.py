"""What a file says of each step: its class, its number, and whether it counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from timeloom.app.data.columns import is_missing, is_number
from timeloom.app.data.records import Label, Record
from timeloom.app.errors import InputError

SPECIAL = ("label", "target", "mask")
"""Columns that are no channels."""
_COUNTS, _DOES_NOT = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "")


@dataclass(frozen=True)
class Steps:
    """Labels of the steps of one series."""

    label: Label | None
    counts: Tensor | None
    """(T,) bool: the steps that are learned from and measured; None for all."""

    @classmethod
    def of_texts(cls, columns: Mapping[str, Sequence[str]], where: str) -> Steps:
        """From the special columns of a file."""
        if "label" in columns and "target" in columns:
            raise InputError(
                f"{where}: both a column 'label' and a column 'target'; give the one that is to be learned"
            )
        counts = _mask(columns["mask"], where) if "mask" in columns else None
        label: Label | None = None
        if "label" in columns:
            label = [text.strip() for text in columns["label"]]
        elif "target" in columns:
            label = [_number(text, step, where) for step, text in enumerate(columns["target"])]
        return cls(label, counts)

    def record(self, name: str, values: Tensor, columns: tuple[str, ...] | None) -> Record:
        return Record(name, values, self.label, columns=columns, counts=self.counts)


def _mask(texts: Sequence[str], where: str) -> Tensor:
    found = []
    for step, text in enumerate(texts):
        word = text.strip().lower()
        if word not in (*_COUNTS, *_DOES_NOT):
            raise InputError(
                f"{where}: the mask of step {step} is {text.strip()[:40]!r}; give 1 (it counts) or 0", kind="mask"
            )
        found.append(word in _COUNTS)
    return torch.tensor(found, dtype=torch.bool)


def _number(text: str, step: int, where: str) -> float:
    if is_missing(text):
        return float("nan")
    if not is_number(text):
        raise InputError(
            f"{where}: the target of step {step} is {text.strip()[:40]!r}, expected a number", kind="target of a step"
        )
    return float(text)


def of_arrays(labels: numpy.ndarray | None, targets: numpy.ndarray | None, mask: numpy.ndarray | None) -> Steps:
    """From arrays `(T,)` beside a file of values."""
    counts = None if mask is None else torch.from_numpy(mask.ravel().astype(bool))
    if targets is not None:
        return Steps([float(value) for value in targets.ravel()], counts)
    return Steps(None if labels is None else [str(value) for value in labels.ravel()], counts)
