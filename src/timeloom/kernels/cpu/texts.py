"""Sources of the steps that come with the package: of each of torch's cells, over u and over x, with and without masks.

They serve any width. A wheel holds them compiled, from the files in `generated/`; elsewhere they are built as they are
asked for. After a change of what they are made of, `make kernels` writes the files anew.
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
    """Which of them: a kind of `timeloom.compile.builtin`, whether it projects x on the way, and whether masks stand
    beside its inputs.
    """

    kind: str
    over_x: bool
    masked: bool

    @property
    def name(self) -> str:
        return "masked_" * self.masked + "x_" * self.over_x + self.kind


KERNELS = {kernel.name: kernel for kernel in map(Kernel._make, product(EQUATIONS, (False, True), (False, True)))}


@lru_cache
def source(kernel: Kernel) -> Source:
    """The source of a kernel. Over x, gradients of weights are summed, and the tape is read; over u it is where there
    is one: an adjoint sweep may be of states there that no forward sweep of the kernel has found.
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
