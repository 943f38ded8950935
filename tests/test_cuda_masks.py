"""The CUDA kernels with masks of a dropout inside the recurrence, emulated on a CPU, against their readable twin."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from emulated_rows import EmulatedRows
from emulator import COMPILER
from test_masked_kernels import ALL_MASKS, masked_problem, single, sweep_all

from timeloom.cells.base import NO_MASKS, Masks
from timeloom.kernels import ReferenceSweeper
from timeloom.kernels.cuda import nvrtc
from timeloom.kernels.cuda import sweeper as cuda_sweeper
from timeloom.kernels.cuda.programs import MOST_UNITS, Variant, Wide, headers, text_of

EXACT = torch.float64
BOTH = Masks(True, True)
CASES = [*(("gru", masks) for masks in ALL_MASKS), ("lstm", BOTH), ("tanh", BOTH), ("relu", BOTH)]
"""All masks of one cell; of the others, whose skeletons are the same, all at once."""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(("n", "resets", "saves"), [(5, False, True), (12, True, False)], ids=["saved", "computed"])
@pytest.mark.parametrize(("kind", "masks"), [*((kind, NO_MASKS) for kind in ("gru", "lstm", "tanh", "relu")), *CASES])
def test_sweeps_are_the_readable_twin_s(
    kind: str, masks: Masks, n: int, resets: bool, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends, decay, states and gradients of gates; what forward sweeps save is what the adjoint reads."""
    monkeypatch.setattr(cuda_sweeper, "on_device", lambda _: nullcontext())
    exact = masked_problem(kind, n, masks, EXACT, resets)
    problem = single(exact)
    sweeper = EmulatedRows(problem, EmulatedRows.room_for_saved(problem) if saves else None)
    sweeper.in_reverse = resets
    found, expected = sweep_all(sweeper, problem), sweep_all(ReferenceSweeper(exact), exact)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=3e-5, atol=3e-5)


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no NVRTC: {nvrtc.unavailable()}")
@pytest.mark.parametrize(("kind", "masks"), CASES)
def test_every_kind_of_kernel_compiles_with_masks(kind: str, masks: Masks) -> None:
    kernel = kind if kind in MOST_UNITS else f"rnn_{kind}"
    text = text_of(kernel, masks)
    same = f"static_assert(INPUTS == {text.inputs} && SAVED == {text.saved});\n"
    for adjoint in (False, True):
        counts = same + f"static_assert(STREAMS == {text.streams});\n" * adjoint
        for is_single, units in ((True, 20), (False, 20), (True, 150)):
            variant = Variant(kernel, units, 0, adjoint, is_single, 1 if adjoint else 2, True, True, masks)
            ring = variant.ring(227 << 10)
            assert ring is not None
            code = nvrtc.compile_source(variant.source(ring) + counts, "sm_90", headers(text.file))
            assert variant.name.encode() in code
        wide = Wide(kernel, 300, 3, adjoint, 1 if adjoint else 2, True, True, masks)
        assert wide.name.encode() in nvrtc.compile_source(wide.source + counts, "sm_90", headers(text.file))
