"""The CUDA kernels without a GPU: NVRTC compiles them, and structures lie as the host says."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from nvrtc_layout import same_layout

from timeloom.kernels.cuda import nvrtc
from timeloom.kernels.cuda.chain import CLUSTER
from timeloom.kernels.cuda.programs import (
    CHAIN_THREADS,
    FOLDER,
    MOST_UNITS,
    AdjointArgs,
    ChainArgs,
    ForwardArgs,
    Variant,
    Wide,
    WideAdjointArgs,
    WideForwardArgs,
    headers,
)
from timeloom.kernels.cuda.wide import SPLIT, WideWeights

ROOM = {"sm_80": 163 << 10, "sm_90": 227 << 10}
"""Bytes of shared memory that a block may have."""

pytestmark = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no NVRTC: {nvrtc.unavailable()}")


def compiled(variant: Variant, architecture: str = "sm_90", more: str = "") -> bytes:
    ring = variant.ring(ROOM[architecture])
    assert ring is not None
    return nvrtc.compile_source(variant.source(ring) + more, architecture, headers(variant.text.file))


@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
@pytest.mark.parametrize("single", [False, True], ids=["tile", "single"])
@pytest.mark.parametrize(("kernel", "units"), [("gru", 33), ("lstm", 64), ("rnn_tanh", 3), ("rnn_relu", 16)])
def test_every_cell_compiles(kernel: str, units: int, single: bool, adjoint: bool) -> None:
    variant = Variant(kernel, units, 0, adjoint, single, 1 if adjoint else 2, True, True)
    assert variant.name.encode() in compiled(variant)


@pytest.mark.parametrize("half", [1, 2], ids=["float16", "bfloat16"])
def test_half_precision_compiles(half: int) -> None:
    compiled(Variant("gru", 64, half, True, False, 1, False, False))


@pytest.mark.parametrize("single", [False, True], ids=["tile", "single"])
def test_an_older_architecture_compiles(single: bool) -> None:
    compiled(Variant("gru", 128, 0, True, single, 1, False, False), "sm_80")


@pytest.mark.parametrize(("kernel", "units", "blocks"), [("gru", 129, 2), ("gru", 512, 16), ("lstm", 128, 2)])
def test_wide_layers_are_shared_by_clusters_of_blocks(kernel: str, units: int, blocks: int) -> None:
    variant = Variant(kernel, units, 0, True, True, 1, False, False)
    assert variant.cluster == blocks
    assert variant.padded >= units
    assert variant.padded % (4 * variant.slices) == 0
    assert variant.padded // blocks * variant.slices == variant.threads
    assert variant.threads % 32 == 0
    compiled(variant)


def test_the_widest_layers_fit_no_cluster() -> None:
    assert Variant("gru", 1024, 0, True, True, 1, False, False).cluster == 0


def compiled_wide(variant: Wide, architecture: str = "sm_90", more: str = "") -> bytes:
    return nvrtc.compile_source(variant.source + more, architecture, headers(variant.text.file))


@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
@pytest.mark.parametrize("mode", range(4), ids=["split", "float16", "bfloat16", "plain"])
@pytest.mark.parametrize(("kernel", "units"), [("gru", 300), ("lstm", 1024), ("rnn_tanh", 129), ("rnn_relu", 3000)])
def test_a_launch_a_step_compiles(kernel: str, units: int, mode: int, adjoint: bool) -> None:
    variant = Wide(kernel, units, mode, adjoint, 1 if adjoint else 2, True, True)
    assert variant.threads % 32 == 0
    assert variant.name.encode() in compiled_wide(variant)


@pytest.mark.parametrize(
    ("name", "adjoint", "structure"),
    [("WideForwardArgs", False, WideForwardArgs), ("WideAdjointArgs", True, WideAdjointArgs)],
)
def test_structures_of_single_steps_lie_as_the_host_says(
    name: str, adjoint: bool, structure: type[ctypes.Structure]
) -> None:
    same = same_layout(name, structure, "step", "carried")
    compiled_wide(Wide("gru", 300, 0, adjoint, 1, False, False), more=same)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e6, 1e20])
@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
def test_split_weights_multiply_with_the_accuracy_of_float32(adjoint: bool, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = size * torch.randn(12, 5, generator=generator)
    wide = WideWeights(weights, SPLIT)
    factor = wide.factor(adjoint).double()
    given = torch.randn(7, 12 if adjoint else 5, generator=generator) * 2.0**10
    high = given.half()
    operand = torch.cat([high, (given - high.float()).half(), high], 1).double()
    exact = given.double() @ (weights.double() if adjoint else weights.double().t())
    assert wide.undo is not None
    found = operand @ factor * wide.undo.double()
    assert (found - exact).abs().max() <= 2e-6 * given.abs().max() * weights.abs().max()
    alone = high.double() @ factor[-given.shape[1] :] * wide.undo.double()  # one product of halves is not enough
    assert (alone - exact).abs().max() > 1e-5 * given.abs().max() * weights.abs().max()


def test_chains_compile() -> None:
    code = nvrtc.compile_source((FOLDER / "chain.cu").read_text() + f"static_assert(TOGETHER == {CLUSTER});", "sm_90")
    assert all(name.encode() in code for name in CHAIN_THREADS)
    assert b"certify" not in nvrtc.compile_source((FOLDER / "chain.cu").read_text(), "sm_80")


@pytest.mark.parametrize(
    ("name", "adjoint", "structure"), [("ForwardArgs", False, ForwardArgs), ("AdjointArgs", True, AdjointArgs)]
)
def test_structures_of_sweeps_lie_as_the_host_says(name: str, adjoint: bool, structure: type[ctypes.Structure]) -> None:
    variant = Variant("gru", 16, 0, adjoint, True, 0, False, False)
    compiled(variant, more=same_layout(name, structure, "lead", "resets"))
    with pytest.raises(nvrtc.CompileError, match="static assertion"):
        compiled(variant, more=f"static_assert(sizeof({name}) == 1);\n")


def test_the_structure_of_a_chain_lies_as_the_host_says() -> None:
    source = (FOLDER / "chain.cu").read_text()
    nvrtc.compile_source(source + same_layout("ChainArgs", ChainArgs, "floor", "limit"), "sm_90")


@pytest.mark.parametrize("kernel", list(MOST_UNITS))
def test_the_host_counts_what_the_cells_text_has(kernel: str) -> None:
    variant = Variant(kernel, 16, 0, True, True, 0, False, False)
    text = variant.text
    same = f"static_assert(PRODUCTS == {text.products} && INPUTS == {text.inputs} && SAVED == {text.saved});\n"
    compiled(variant, more=same + f"static_assert(STREAMS == {text.streams});\n")


@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
@pytest.mark.parametrize("half", [0, 1, 2])
@pytest.mark.parametrize("units", [1, 16, 33, 64, 100, 128])
def test_tiles_fit_the_shared_memory(units: int, half: int, adjoint: bool) -> None:
    variant = Variant("gru", units, half, adjoint, False, 1, False, False)
    ring = variant.ring(ROOM["sm_90"])
    assert ring is not None
    assert variant.shared_bytes(ring) <= ROOM["sm_90"]
    assert replace(variant, single=True).shared_bytes(ring) == 0
    rows = "ROWS * (HALF ? 4 : 8) * 2"
    products = "PRODUCTS" if adjoint else "1"
    vectors = "STREAMS" if adjoint else "INPUTS"
    size = f"2 * {rows} * ({products} * REGION + 4) + RING * ROWS * ({vectors} * N + 4) * 4 + 2 * WARPS * ROWS * 4"
    if units in (33, 128) and half < 2:
        compiled(variant, more=f"static_assert({size} == {variant.shared_bytes(ring)});\n")
