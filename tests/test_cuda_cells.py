"""CUDA generated for cells, without a GPU: NVRTC compiles it, and an emulator runs it against the reference sweeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_cuda import ROOM, EmulatedSweeper
from emulator import COMPILER
from nvrtc_layout import same_layout
from random_cells import RandomCell
from test_fused_cells import INPUTS, UNITS, make
from torch import Tensor

from timeloom.auto.costs import GeneratedCost, cheapest
from timeloom.cells.fused import FusedCell
from timeloom.compile import cuda_layout, trace
from timeloom.compile.emit_cuda import CudaSource
from timeloom.compile.fuse import AGREES, Compiled, compile_step
from timeloom.compile.refusal import NotFused
from timeloom.kernels import faults
from timeloom.kernels.cuda import nvrtc
from timeloom.kernels.cuda.fused import arguments, in_fours, name_of, source_of
from timeloom.kernels.cuda.programs import headers
from timeloom.kernels.reference import AdjointData, ReferenceSweeper
from timeloom.problem import Recurrence, Segments, cut, empty_states

STEPS, BATCH, CHUNK = 11, 2, 4
needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no NVRTC: {nvrtc.unavailable()}")
emulated = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to emulate CUDA with")


def compiled_of(cell: Any, parts: tuple[int, ...], inputs: int = INPUTS) -> tuple[Compiled, Tensor, Tensor]:
    """A compiled step, its initial state `(B, S)` and x `(T, B, inputs)`."""
    generator = torch.Generator().manual_seed(3)
    state = tuple(torch.rand(BATCH, width, generator=generator) + 0.2 * k for k, width in enumerate(parts))
    x = torch.randn(STEPS, BATCH, inputs, generator=generator)
    return compile_step(cell, state, len(state) > 1, x.flatten(0, 1)), torch.cat(state, -1), x


def of_name(name: str) -> tuple[Compiled, Tensor, Tensor, Any]:
    cell = make(name, torch.float32)
    return *compiled_of(cell, (cell.hidden_size,) * cell.parts), cell


def sources_of(compiled: Compiled, room: int = ROOM) -> dict[str, CudaSource]:
    found = {direction: source_of(compiled.fused, direction, room) for direction in ("forward", "adjoint")}
    assert all(isinstance(source, CudaSource) for source in found.values()), found
    return found  # type: ignore[return-value]


# ---- NVRTC takes it --------------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("name", UNITS)
def test_every_cell_compiles(name: str) -> None:
    compiled, *_ = of_name(name)
    for direction, source in sources_of(compiled).items():
        kind = arguments(source.parts, len(source.weights), source.vectors)
        same = same_layout("FusedArgs", kind, "states", "batch")
        code = nvrtc.compile_source(source.text + same, "sm_90", headers())
        assert f"fused_{direction}".encode() in code


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
@pytest.mark.parametrize("name", UNITS)
def test_other_architectures_compile(name: str, architecture: str) -> None:
    if architecture == "sm_100" and nvrtc.version() < (12, 8):
        pytest.skip(f"NVRTC {nvrtc.version()} does not know {architecture}")
    compiled, *_ = of_name(name)
    nvrtc.compile_source(sources_of(compiled, 99 << 10)["adjoint"].text, architecture, headers())


# ---- the emulator runs it --------------------------------------------------------------------------------------------


def swept(kind: type[ReferenceSweeper], problem: Recurrence, lead: int, known: list[Tensor] | None) -> list[Tensor]:
    """All that sweeps forward and back give, from the same starts, entered `lead` steps early; `known`: the states
    that the adjoint reads, its own where none are given. What no sweep writes is NaN.
    """
    cell, dtype = problem.cell, problem.initial.dtype
    generator = torch.Generator().manual_seed(5)
    starts, incoming, final = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((len(cut(problem, CHUNK)), cell.size), (STEPS, BATCH, cell.size), (BATCH, cell.size))
    )
    forward, back = cut(problem, CHUNK), cut(problem, CHUNK, backwards=True)
    states = empty_states(STEPS, problem.initial, cell.parts)
    for part in states:
        part[1:] = torch.nan
    sweeper = kind(problem)
    found = list(sweeper.forward_entering(forward, lead, states, True)) if lead else []
    found += [] if lead else list(sweeper.forward(forward, 0.5 * starts, states, True))  # type: ignore[arg-type]
    found += [part.nan_to_num(nan=7.0) for part in states]
    gates = torch.full((STEPS, BATCH, cell.gate_width), torch.nan, dtype=dtype)
    reset_grads = None if problem.resets is None else torch.full((len(back), cell.size), torch.nan, dtype=dtype)
    data = AdjointData([part.nan_to_num(nan=0.0) for part in known or states], incoming, gates, reset_grads)
    found += (
        sweeper.adjoint_entering(back, lead, final, data, True) if lead else sweeper.adjoint(back, starts, data, True)
    )
    found += [gates.nan_to_num(nan=7.0), *([] if reset_grads is None else [reset_grads])]
    return found + [part.to(dtype) for part in states]


def problem_of(
    compiled: Compiled, cell: Any, initial: Tensor, x: Tensor, dtype: torch.dtype, **given: Any
) -> Recurrence:
    with torch.no_grad():
        weights, u = compiled.prepare(cell, x.flatten(0, 1), initial)
    fused = FusedCell(compiled.fused, tuple(weight.detach().to(dtype) for weight in weights))
    return Recurrence(fused, u.view(STEPS, BATCH, -1).to(dtype), initial.to(dtype), **given)


def assert_same(compiled: Compiled, cell: Any, initial: Tensor, x: Tensor, lead: int = 3, **given: Any) -> None:
    truth, own = (problem_of(compiled, cell, initial, x, dtype, **given) for dtype in (torch.float64, torch.float32))
    expected = swept(ReferenceSweeper, truth, lead, None)
    states = [part.float() for part in expected[-len(truth.cell.parts) :]]
    for number, (found, wanted) in enumerate(zip(swept(EmulatedSweeper, own, lead, states), expected, strict=True)):
        assert bool((found.isfinite() == wanted.isfinite()).all()), f"tensor {number}"
        difference = (found - wanted).nan_to_num().abs().max() / wanted.nan_to_num().abs().max().clamp(min=1e-3)
        assert float(difference) < 2e-5, f"tensor {number}: {float(difference):.1e}"


@emulated
@pytest.mark.parametrize("at_once", [0, 10**9], ids=["four rows", "one row"])
@pytest.mark.parametrize("name", UNITS)
def test_sweeps_are_the_references(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row and of four; threads run in order here and in reverse there."""
    monkeypatch.setattr(EmulatedSweeper, "at_once", at_once)
    monkeypatch.setattr(EmulatedSweeper, "in_reverse", at_once == 0)
    compiled, initial, x, cell = of_name(name)
    assert_same(compiled, cell, initial, x, lead=0)
    assert_same(compiled, cell, initial, x, lead=3)
    marks = torch.rand(STEPS, BATCH, generator=torch.Generator().manual_seed(2)) < 0.3
    for lead in (0, 3, STEPS):
        assert_same(compiled, cell, initial, x, lead, resets=marks, lengths=torch.tensor([STEPS, 5]))
    assert_same(compiled, cell, initial, x, 2, lengths=torch.tensor([0, STEPS - 1]))


@emulated
@pytest.mark.parametrize("seed", [1, 7, 12, 23])
def test_sweeps_of_random_cells_are_the_references(seed: int) -> None:
    cell = RandomCell(seed)
    try:
        compiled, initial, x = compiled_of(cell, tuple(cell.widths), cell.inputs)
    except NotFused as reason:
        pytest.skip(str(reason))
    assert_same(compiled, cell, initial, x)


@emulated
@pytest.mark.parametrize("where", ["shared", "memory"])
def test_weights_may_lie_in_shared_memory_or_beyond(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a thread may have several units, of which loops leave values for each other in shared memory."""
    monkeypatch.setattr(cuda_layout, "MOST_REGISTERS", 0)
    monkeypatch.setattr(cuda_layout, "MOST_THREADS", 32)
    monkeypatch.setattr(cuda_layout, "MOST_LOCAL", 1)
    for name in ("LayerNormGRU", "BlockGRU", "CfC"):
        compiled, initial, x, cell = of_name(name)
        room = ROOM
        if where == "memory":
            room = min(source.shared for source in sources_of(compiled).values()) // 2
            while isinstance(source_of(compiled.fused, "adjoint", room), str):
                room += 512
        monkeypatch.setattr(EmulatedSweeper, "room", room)
        assert where in {place for source in sources_of(compiled, room).values() for place in source.places}
        assert_same(compiled, cell, initial, x)


@emulated
def test_slices_of_a_unit_share_its_products() -> None:
    compiled, initial, x, cell = of_name("LayerNormGRU")
    threads = {source.threads for source in sources_of(compiled).values()}
    assert max(threads) > 32, "this width has one lane a unit: the test tests nothing"
    assert_same(compiled, cell, initial, x)


def test_a_step_too_large_for_shared_memory_is_refused_in_words() -> None:
    compiled, *_ = of_name("SLSTM")
    reason = source_of(compiled.fused, "adjoint", 1024)
    assert isinstance(reason, str)
    assert "shared memory" in reason
    assert "1024" in reason


def test_weights_in_fours_lie_as_the_kernel_reads_them() -> None:
    weights = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    packed, turned = in_fours(weights, False), in_fours(weights, True)
    assert packed.shape == (2, 2, 12, 4)
    assert turned.shape == (2, 1, 15, 4)
    for which, block, out, term in ((0, 0, 0, 0), (1, 2, 3, 4), (0, 1, 2, 3)):
        assert packed[which, term // 4, block * 4 + out, term % 4] == weights[which, block, out, term]
        assert turned[which, out // 4, block * 5 + term, out % 4] == weights[which, block, out, term]
    assert float(packed[:, 1, :, 1:].abs().max()) == 0


def test_empty_stretches_ask_for_nothing() -> None:
    compiled, initial, x, cell = of_name("LiGRU")
    problem = problem_of(compiled, cell, initial, x, torch.float32)
    none = Segments(*(torch.zeros(0, dtype=torch.int64) for _ in range(3)))
    ends, decay = EmulatedSweeper(problem).forward(none, initial[:0], None, True)
    assert ends.shape == (0, problem.cell.size)
    assert decay is not None


class RefusedSweeper(EmulatedSweeper):
    """A driver that launches nothing."""

    def _launch(self, *_: Any) -> None:
        raise RuntimeError("CUDA's driver refused fused_forward")


def test_what_cannot_be_launched_is_told_once_and_finished_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_broken", {})
    compiled, initial, x, cell = of_name("LiGRU")
    problem = problem_of(compiled, cell, initial, x, torch.float32)
    expected = swept(ReferenceSweeper, problem, 3, None)
    with pytest.warns(RuntimeWarning, match=f"the {name_of(compiled.fused)} kernel cannot run") as told:
        found = swept(RefusedSweeper, problem, 3, None)
    assert len(told) == 1
    for given, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(given, wanted, equal_nan=True)
    assert faults.broken(name_of(compiled.fused)) is not None


@pytest.mark.parametrize("name", ["LayerNormGRU", "LayerNormLSTM", "BlockGRU"])
def test_a_layer_norm_in_one_piece_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler itself compares it with the step."""
    whole, *_ = of_name(name)
    monkeypatch.setattr(trace, "_DECOMPOSED", [*trace._DECOMPOSED, torch.ops.aten.native_layer_norm])
    apart, *_ = of_name(name)
    assert any("native_layer_norm" in str(node.target) for node in whole.module.graph.nodes)
    assert whole.fused.describe() == apart.fused.describe()
    assert whole.fused.gate_width == apart.fused.gate_width


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", UNITS)
def test_half_precision_is_compiled_as_float32(name: str, dtype: torch.dtype) -> None:
    """The compiler compares the normal form in float32 with the trace in float32; weights and inputs are float32."""
    cell = make(name, dtype)
    state = tuple(torch.rand(3, cell.hidden_size).to(dtype) for _ in range(cell.parts))
    x = torch.randn(3, INPUTS).to(dtype)
    compiled = compile_step(cell, state, len(state) > 1, x)
    weights, u = compiled.prepare(cell, x, state[0].float())
    assert {tensor.dtype for tensor in (*weights, u)} == {torch.float32}
    u.sum().backward()
    assert all(parameter.grad is None or parameter.grad.dtype == dtype for parameter in cell.parameters())
    following = FusedCell(compiled.fused, weights).step(torch.cat(state, -1).float(), u)
    expected = cell(state if len(state) > 1 else state[0], x)
    expected = torch.cat(expected if isinstance(expected, tuple) else (expected,), -1).float()
    assert float((following - expected).detach().abs().max() / expected.detach().abs().max()) < AGREES[dtype]


@pytest.mark.parametrize(("batch", "chunks"), [(1, 132), (2, 261), (16, 33), (64, 16)])
def test_auto_cuts_time_into_as_many_chunks_as_fill_a_gpu(batch: int, chunks: int) -> None:
    chunk, warmup = cheapest(16384, batch, 50, GeneratedCost(132))
    assert -(-16384 // chunk) == chunks
    assert warmup == 50
