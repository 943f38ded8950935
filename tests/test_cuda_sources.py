"""The CUDA kernels without a GPU: NVRTC compiles them, and structures lie as the host says."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from timeloom.kernels.cuda import nvrtc
from timeloom.kernels.cuda.programs import (
    CELLS,
    FOLDER,
    AdjointArgs,
    ChainArgs,
    ForwardArgs,
    Variant,
    headers,
)

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


def test_chains_compile() -> None:
    code = nvrtc.compile_source((FOLDER / "chain.cu").read_text(), "sm_90")
    assert all(name in code for name in (b"carry", b"measure", b"compare"))


@pytest.mark.parametrize(
    ("name", "adjoint", "structure"), [("ForwardArgs", False, ForwardArgs), ("AdjointArgs", True, AdjointArgs)]
)
def test_structures_of_sweeps_lie_as_the_host_says(name: str, adjoint: bool, structure: type[ctypes.Structure]) -> None:
    variant = Variant("gru", 16, 0, adjoint, True, 0, False, False)
    same = f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});\n"
    same += f"static_assert(__builtin_offsetof({name}, lead) == {structure.lead.offset});\n"
    same += f"static_assert(__builtin_offsetof({name}, resets) == {structure.resets.offset});\n"
    compiled(variant, more=same)
    with pytest.raises(nvrtc.CompileError, match="static assertion"):
        compiled(variant, more=f"static_assert(sizeof({name}) == 1);\n")


def test_the_structure_of_a_chain_lies_as_the_host_says() -> None:
    source = (FOLDER / "chain.cu").read_text()
    same = f"static_assert(sizeof(ChainArgs) == {ctypes.sizeof(ChainArgs)});\n"
    same += f"static_assert(__builtin_offsetof(ChainArgs, floor) == {ChainArgs.floor.offset});\n"
    nvrtc.compile_source(source + same, "sm_90")


@pytest.mark.parametrize("kernel", list(CELLS))
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
