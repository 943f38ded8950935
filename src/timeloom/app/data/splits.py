"""Labels as tensors, and which series are for training, for choosing and for measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.app.data.records import NUMERIC, PER_STEP, Label, Record, Table, Task
from timeloom.app.errors import InputError, Problems

PADDING = -100
"""Class of a step that does not count, as padding: torch's losses leave it out. Numbers that do not count are NaN."""

MOST_NAMED = 12
"""Classes that a message lists."""


@dataclass(frozen=True)
class Examples:
    """Series with targets: a class index or a number `()`, or the class index or number of each step `(T,)`."""

    names: list[str]
    series: list[Tensor]
    targets: list[Tensor]

    def __len__(self) -> int:
        return len(self.series)


@dataclass(frozen=True)
class Splits:
    """What a training needs of its data."""

    source: str
    task: Task
    classes: tuple[str, ...]
    """Names of the classes in the order of their indices; empty for numbers."""
    channels: int
    train: Examples
    valid: Examples
    test: Examples
    columns: tuple[str, ...] = ()
    """Names of the channels, where the data have them."""
    drawn: str = "as the data name them"
    """Who chose which series are for what, in words."""


def examples(records: Sequence[Record], task: Task, classes: Sequence[str], source: str) -> Examples:
    """Series with their targets as tensors."""
    index = {name: i for i, name in enumerate(classes)}

    def of_class(name: str, record: Record) -> int:
        if name not in index:
            known = ", ".join(list(index)[:MOST_NAMED]) + (", …" if len(index) > MOST_NAMED else "")
            raise InputError(
                f"{source}: {record.name} has the label {name!r}, which is none of {known}, the {len(index)} classes "
                f"trained on; correct it or move it away",
                kind=f"the label {name!r}",
            )
        return index[name]

    def target(record: Record) -> Tensor:
        label = record.label
        if label is None:
            raise InputError(f"{source}: {record.without_label()}")
        if (isinstance(label, list), _numeric(label)) != (task in PER_STEP, task in NUMERIC):
            raise InputError(f"{source}: {record.name} is labelled for another task than {task}")
        if not isinstance(label, list):
            return torch.tensor(label if isinstance(label, float) else of_class(label, record))
        if task == "tracking":
            found = torch.tensor(label, dtype=torch.float32)
            return found if record.counts is None else found.masked_fill(~record.counts, float("nan"))
        counted = [True] * len(label) if record.counts is None else record.counts.tolist()
        return torch.tensor(
            [of_class(str(name), record) if real else PADDING for name, real in zip(label, counted, strict=True)]
        )

    targets, problems = list[Tensor](), Problems()
    for record in records:
        with problems.noted(record.name):
            targets.append(target(record))
    problems.tell(source)
    return Examples([r.name for r in records], [r.values for r in records], targets)


def _numeric(label: Label) -> bool:
    return isinstance(label[0] if isinstance(label, list) and label else label, float)


def split(
    table: Table, valid_share: float, test_share: float, seed: int, pool: bool = False, fold: tuple[int, int] = (0, 0)
) -> Splits:
    """Train, valid and test series; classes as evenly spread as their numbers allow, the same for the same seed.

    fold: `(i, k)` takes the i-th of k parts of all series, from 1 on, to test on; `(0, 0)` for no such parts.

    test_share: of all series, valid_share: of the training series; for data that do not say themselves what is what,
        and with `pool` for those that do, too.
    """
    if table.task is None:
        raise InputError(
            f"{table.source}: no labels found, and training needs them: give it a labels.csv with the columns file and "
            f"label (or target), or a subfolder for each class (timeloom train --help)"
        )
    pool = pool or fold[1] > 0
    train = [r for r in table.records if pool or r.split in ("train", None)]
    valid = [r for r in table.records if not pool and r.split == "valid"]
    test = [r for r in table.records if not pool and r.split == "test"]
    generator, drawn = torch.Generator().manual_seed(seed), []
    if fold[1]:
        train, test = _fold(train, *fold, generator, table.source)
        drawn.append(f"test ones are fold {fold[0]} of {fold[1]}")
    elif not test:
        train, test = _hold_back(train, test_share, generator)
        drawn.append(f"--test-fraction {test_share:g}")
    if not valid:
        train, valid = _hold_back(train, valid_share, generator)
        drawn.append(f"--valid-fraction {valid_share:g}")
    words = f"{', '.join(drawn)}, drawn by --seed {seed}" if drawn else Splits.drawn
    for name, part in (("train", train), ("validate", valid), ("test", test)):
        if not part:
            raise InputError(
                f"{table.source}: of {len(table.records)} series none is left to {name} on; add some, or change their "
                f"split or --valid-fraction and --test-fraction"
            )
    classes = () if table.task in NUMERIC else _classes(train)
    targets = {target for record in train for target in _targets(record)} if table.task in NUMERIC else set()
    if len(targets) == 1:
        raise InputError(f"{table.source}: all training series have the target {targets.pop():g}; two are needed")
    if len(classes) == 1:
        raise InputError(f"{table.source}: all training series have the label {classes[0]!r}; two classes are needed")
    parts = [examples(part, table.task, classes, table.source) for part in (train, valid, test)]
    return Splits(table.source, table.task, classes, table.channels, parts[0], parts[1], parts[2], table.columns, words)


def _targets(record: Record) -> list[float]:
    """The numbers to learn of a series: one, or one of every step that counts."""
    labels = record.label if isinstance(record.label, list) else [record.label]
    counts = [True] * len(labels) if record.counts is None else record.counts.tolist()
    return [label for label, counted in zip(labels, counts, strict=True) if counted and isinstance(label, float)]


def _classes(records: Sequence[Record]) -> tuple[str, ...]:
    found: set[str] = set()
    for record in records:
        found.update(map(str, record.label) if isinstance(record.label, list) else [str(record.label)])
    found.discard("")  # of steps that a mask leaves out
    return tuple(sorted(found, key=lambda name: (not _is_number(name), float(name) if _is_number(name) else 0, name)))


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def _groups(records: Sequence[Record]) -> list[list[int]]:
    """Indices of the series of each class; all in one group where series have no class."""
    groups: dict[Label | None, list[int]] = {}
    for index, record in enumerate(records):
        groups.setdefault(record.label if isinstance(record.label, str) else None, []).append(index)
    return list(groups.values())


def _hold_back(
    records: Sequence[Record], share: float, generator: torch.Generator
) -> tuple[list[Record], list[Record]]:
    """Two parts; of every class of two or more series, at least one stays and one is held back."""
    held: set[int] = set()
    for members in _groups(records):
        count = min(max(1, round(share * len(members))), len(members) - 1)
        order = torch.randperm(len(members), generator=generator).tolist()
        held.update(members[i] for i in order[:count])
    return [r for i, r in enumerate(records) if i not in held], [r for i, r in enumerate(records) if i in held]


def _fold(
    records: Sequence[Record], fold: int, folds: int, generator: torch.Generator, source: str
) -> tuple[list[Record], list[Record]]:
    """All series but those of a fold, and those: each is in one fold, and classes are dealt out in turn."""
    if len(records) < folds:
        raise InputError(f"{source}: {len(records)} series for --folds {folds}; give {len(records)} folds or fewer")
    dealt = [members[i] for members in _groups(records) for i in torch.randperm(len(members), generator=generator)]
    held = set(dealt[fold - 1 :: folds])
    return [r for i, r in enumerate(records) if i not in held], [r for i, r in enumerate(records) if i in held]
