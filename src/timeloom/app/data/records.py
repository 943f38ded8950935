"""What every reader returns: named series with what is known about them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from timeloom.app.data.clocks import FEWEST_STEPS
from timeloom.app.errors import InputError, Problem, Problems

Task = Literal["classification", "regression", "labelling", "tracking"]
"""A class for a series, a number for a series, a class for each of its steps, a number for each of its steps."""
PER_STEP = ("labelling", "tracking")
NUMERIC = ("regression", "tracking")
Split = Literal["train", "valid", "test"]
Label = str | float | list[str] | list[float]
"""A class, a number, the class of each step, the number of each step."""
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Record:
    """One series."""

    name: str
    values: Tensor
    """(T, D) float32."""
    label: Label | None
    """None where it is not known, as in data to predict."""
    split: Split | None = None
    """Where the data say themselves what it is for."""
    columns: tuple[str, ...] | None = None
    """Names of the channels, where the file has them."""
    counts: Tensor | None = None
    """(T,) bool: the steps that are learned from and measured; None for all."""
    clocks: Mapping[str, str] = field(default_factory=dict)
    """Columns of the file that count time or rows, each with an example."""

    def names(self) -> list[str]:
        """What `--columns` calls the channels."""
        return list(self.columns or map(str, range(1, self.values.shape[1] + 1)))

    def in_order(self, columns: Sequence[str], of: str) -> Record:
        """The same with its channels in the order of `columns`, which `of` has."""
        if self.columns is None or self.columns == tuple(columns):
            return self
        lacks = [name for name in columns if name not in self.columns]
        extra = [name for name in self.columns if name not in columns]
        if lacks or extra:
            differs = [f"lacks {', '.join(map(repr, lacks))}"] if lacks else []
            differs += [f"has {', '.join(map(repr, extra))} more"] if extra else []
            raise InputError(
                f"{self.name}: its columns are not those of {of}: it {' and '.join(differs)}; name the common ones "
                f"with --columns"
            )
        order = [self.columns.index(name) for name in columns]
        return replace(self, values=self.values[:, order].contiguous(), columns=tuple(columns))

    def without_label(self) -> str:
        """What to do about it where a label is needed."""
        return f"{self.name} has no label; give it one, or move it away (`timeloom predict` needs none)"

    def problem(self) -> Problem | None:
        """What keeps a network from being run on it."""
        if not len(self.values):
            return self._wrong("is empty; remove it")
        if not bool(self.values.isfinite().all()):
            step, channel = (~self.values.isfinite()).nonzero()[0].tolist()
            named = f"column {self.names()[channel] if self.columns is None else repr(self.columns[channel])}"
            if bool(self.values[step, channel].isnan()):
                text = f"has a missing value at step {step}, {named}; fill it with --fill, or remove it"
                return self._wrong(text, f"a missing value, {named}")
            text = f"has an infinite value at step {step}, {named}; correct or remove it"
            return self._wrong(text, f"an infinite value, {named}")
        if isinstance(self.label, float) and not abs(self.label) <= LARGEST:
            large = f", and float32 ends at {LARGEST:.1e}" if math.isfinite(self.label) else ""
            return self._wrong(f"has the target {self.label}{large}; give it a number or remove it", "a target")
        return self._step_problem(self.label) if isinstance(self.label, list) else None

    def _wrong(self, text: str, kind: str = "") -> Problem:
        return Problem(f"{self.name} {text}", kind or text, self.name)

    def _step_problem(self, labels: list[str] | list[float]) -> Problem | None:
        if len(labels) != len(self.values):
            return self._wrong(f"has {len(self.values)} steps and {len(labels)} labels", "steps and labels")
        if self.counts is not None and len(self.counts) != len(self.values):
            return self._wrong(f"has {len(self.values)} steps and a mask of {len(self.counts)}", "steps and mask")
        counted = [True] * len(labels) if self.counts is None else self.counts.tolist()
        if not any(counted):
            return self._wrong("has a mask that leaves no step to learn from; remove it")
        for step, (label, counts) in enumerate(zip(labels, counted, strict=True)):
            known = abs(label) <= LARGEST if isinstance(label, float) else label != ""
            if counts and not known:
                found = "no target" if isinstance(label, float) else "no label"
                found += f" but {label:g}" if isinstance(label, float) and label == label else ""
                text = f"has {found} at step {step}; give it one, or 0 in a column 'mask'"
                return self._wrong(text, "a label of a step")
        return None


@dataclass(frozen=True)
class Table:
    """All series of a source."""

    source: str
    task: Task | None
    """None where no series has a label."""
    records: list[Record]
    problems: tuple[Problem, ...] = ()
    """What is wrong with other series, which could not be read."""

    def checked(self, labelled: bool = False) -> Table:
        """Itself with all channels in one order, if a network can be run on it; else all that is wrong with it.

        labelled: whether every series needs a label.
        """
        problems, seen, matched = Problems(self.problems), set[str](), list[Record]()
        if not self.records:
            problems.tell(self.source)
            raise InputError(f"{self.source}: no series found")
        first = self._typical()
        for record in self.records:
            if record.name in seen:
                problems.add(f"{self.source}: {record.name} is listed twice")
            seen.add(record.name)
            with problems.noted(record.name):
                matched.append(self._like(record, first))
            if labelled and self.task is not None and record.label is None:
                problems.add(f"{self.source}: {record.without_label()}")
        problems.found += self._clocks() if labelled else []
        problems.tell(self.source)
        return replace(self, records=matched)

    def _typical(self) -> Record:
        """The first of the series with the columns that most have; those with names before others."""
        kinds = [(r.columns is not None, frozenset(r.columns or ()), r.values.shape[1]) for r in self.records]
        number = Counter(kinds)
        return self.records[kinds.index(max(number, key=lambda kind: (kind[0], number[kind])))]

    def _like(self, record: Record, first: Record) -> Record:
        """A record with the channels of the first one."""
        if (
            first.columns is not None and record.columns is None and record.name.lower().endswith(".csv")
        ):  # arrays have no names
            raise InputError(
                f"{self.source}: {first.name} names its columns, {record.name} does not; give all a header or none"
            )
        try:
            ordered = record.in_order(first.columns, first.name) if first.columns is not None else record
        except InputError as error:
            raise InputError(f"{self.source}: {error}") from None
        if ordered.values.shape[1] != first.values.shape[1]:
            raise InputError(
                f"{self.source}: {record.name} has {record.values.shape[1]} channels, {first.name} has "
                f"{first.values.shape[1]}; all series need the same"
            )
        found = ordered.problem()
        if found is not None:
            raise InputError(f"{self.source}: {found.text}", found.kind)
        return ordered

    def _clocks(self) -> list[Problem]:
        """Columns that count time or rows in all series: who trains on them learns when a series was recorded."""
        long = [record for record in self.records if len(record.values) >= FEWEST_STEPS]
        if not long:
            return []
        first, columns = long[0], [name for name in long[0].names() if name not in long[0].clocks]
        found = []
        for name, example in first.clocks.items() if columns else ():
            if all(name in record.clocks for record in long):
                named = not first.name.lower().endswith(".npy")
                between = f", or with --time {name} take it as the time between steps" if named else ""
                text = (
                    f"{self.source}: the column {name!r} counts time or rows ({example}, … in {first.name}, and so in "
                    f"all others): leave it out with --columns {','.join(columns)}{between}; to learn from it as it "
                    f"is, name it there, too"
                )
                found.append(Problem(text))
        return found

    @property
    def channels(self) -> int:
        return self.records[0].values.shape[1]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the channels; empty where the files have none."""
        return self.records[0].columns or ()
