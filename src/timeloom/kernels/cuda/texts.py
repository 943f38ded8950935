"""Texts of torch's cells for the CUDA kernels, with and without zoneout: the files in `generated/`.

After a change of what they are generated from, `make kernels` rewrites the files.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from timeloom.compile.builtin import EQUATIONS
from timeloom.compile.emit_cell import emit
from timeloom.kernels.cuda.programs import GENERATED, file_of

TEXTS = {file_of(kind, zoned): (kind, zoned) for kind, zoned in product(EQUATIONS, (False, True))}


def write(folder: Path = GENERATED) -> None:
    """Write all texts as files."""
    for file, which in TEXTS.items():
        (folder / file).write_text(emit(*which))
