"""The measured constants of `auto`: where each one is defined, and what measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Measured:
    """A constant, and how it is measured: `measure()` returns its value here, in the form of the stored one."""

    name: str
    """`folder/file.CONSTANT`, in `timeloom`."""
    measure: Callable[[], object]
    device: Device
    what: str

    @property
    def stored(self) -> object:
        return stored(self.name)


MEASURED: dict[str, Measured] = {}
BY_OTHERS = {
    **dict.fromkeys(
        (
            "auto/costs.SINGLE_STEP",
            "auto/costs.GATES",
            "auto/costs.SHARING",
            "auto/costs.TILE_STEP",
            "auto/costs.TILE_STORES",
            "auto/costs.TILES_SHARING",
            "auto/costs.SWEEP_START",
            "kernels/cuda/sweeper.WAVES",
        ),
        "python -m benchmarks.rows",
    ),
    "auto/beginnings.REACH": "python -m benchmarks.warm_starts",
    "auto/beginnings.COST_ON_GPU": "python -m benchmarks.gpu runs",
    "distributed/group.RING_UP_TO": "python -m benchmarks.ranks",
}
"""Constants that another command measures, by name."""


def measures(
    name: str, device: Device = "cpu", what: str = ""
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Marks a function as the measurement of a constant."""

    def mark(measure: Callable[[], object]) -> Callable[[], object]:
        MEASURED[name] = Measured(name, measure, device, what)
        return measure

    return mark


def stored(name: str) -> object:
    """The value in the source of `folder/file.CONSTANT`."""
    module, constant = name.rsplit(".", 1)
    found: object = getattr(import_module("timeloom." + module.replace("/", ".")), constant)
    return found
