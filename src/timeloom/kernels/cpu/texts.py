"""Sources of the package's own steps: each of torch's cells, over u and over x, with and without masks.

They serve any width. A wheel holds them compiled, from the files in `generated/`; elsewhere they are built on first
use. After a change of what they are generated from, `make kernels` rewrites the files.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from timeloom.compile.builtin import EQUATIONS, builtin
from timeloom.compile.emit_cpu import Source, source_of_programs
from timeloom.compile.sizes import INPUTS, UNITS, named

FOLDER = Path(__file__).parent / "generated"


class Kernel(NamedTuple):
    """One kernel: a kind of `timeloom.compile.builtin`, whether it projects x, and whether inputs come with masks."""

    kind: str
    over_x: bool
    masked: bool

    @property
    def name(self) -> str:
        return "masked_" * self.masked + "x_" * self.over_x + self.kind


KERNELS = {kernel.name: kernel for kernel in map(Kernel._make, product(EQUATIONS, (False, True), (False, True)))}


@lru_cache
def source(kernel: Kernel) -> Source:
    """The source of a kernel.

    Over x, weight gradients are summed, and the adjoint always reads a tape. Over u it reads a tape only if there is
    one: the states of an adjoint sweep may not come from a forward sweep of the kernel.
    """
    made = builtin(kernel.kind, UNITS, INPUTS if kernel.over_x else None, kernel.masked)
    programs = {"forward": made.taped.forward, "taped": made.taped.adjoint}
    if not kernel.over_x and made.taped.width > 0:
        programs = {"forward": made.taped.forward, "adjoint": made.fused.adjoint, "taped": made.taped.adjoint}
    return source_of_programs(made.fused, programs, made.taped.width, named, kernel.name)


def write(folder: Path = FOLDER) -> None:
    """Write all sources as files."""
    for name, kernel in KERNELS.items():
        (folder / f"{name}.c").write_text(source(kernel).text)
